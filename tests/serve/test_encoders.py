"""Encoders over HTTP: every answer is what the Python API gives, whatever is asked beside it."""

import asyncio
import base64
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from random import Random
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from headway.api import TextEncoder
from headway.errors import ConfigError
from headway.similarity import cosine
from headway.text import Encoded
from tests.serve.conftest import House
from tests.serve.encoders import KINDS, ULP, WORDS, encoder, serving_encoders, words
from tests.serve.test_completions import wait_until
from tests.serve.test_guard import ask

openai = pytest.importorskip("openai")

from headway.serve.calls import Packed, Packing, served_as  # noqa: E402
from headway.serve.inputs import TASKS  # noqa: E402
from headway.serve.worker import Worker  # noqa: E402

TEXTS = ["the cat sat on a mat .", "who ran home", "a dog", "b c d e f g , not the cat"]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tokenizer = words(tmp_path_factory.mktemp("words"))
    made = {kind: encoder(kind, tokenizer) for kind in KINDS}
    made["nested"] = encoder("embedder", tokenizer, dimensions=(8, 16))
    return made


@pytest.fixture(scope="module")
def house(encoders: dict[str, Any]) -> Iterator[House]:
    with serving_encoders(encoders) as running:
        yield running


def answered(house: House, path: str, **body: Any) -> dict[str, Any]:
    status, told = ask(house, path, body)
    assert status == 200, told
    return told


def refused(house: House, path: str, **body: Any) -> str:
    status, told = ask(house, path, body)
    assert status == 400, told
    message: str = told["error"]["message"]
    return message


def waiting(packing: Packing) -> int:
    """How many texts are to be read."""
    return sum(not text.ended for text in packing.waiting)


def drawn(number: int, longest: int = 40) -> list[str]:
    """Texts of mixed lengths."""
    draw = Random(number)
    return [" ".join(draw.choices(WORDS[:15], k=draw.randint(1, longest))) for _ in range(draw.randint(1, 5))]


def test_16_clients_get_what_each_alone_gets(house: House, encoders: dict[str, Any]) -> None:
    asked = [drawn(number) for number in range(16)]

    async def ask_all() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as there:
            made = (there.embeddings.create(model="embedder", input=texts) for texts in asked)
            return await asyncio.gather(*made)

    for texts, answer in zip(asked, asyncio.run(ask_all()), strict=True):
        assert [one.index for one in answer.data] == [*range(len(texts))]
        found = torch.tensor([one.embedding for one in answer.data])
        alone = torch.stack([encoders["embedder"].embed(text) for text in texts])
        assert torch.allclose(found, alone, rtol=ULP, atol=ULP)
        lengths = [len(one.ids) for one in encoders["embedder"].tokenizer.inputs(texts)]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(lengths)


def test_exact_is_the_same_bits_in_float32(encoders: dict[str, Any]) -> None:
    own = encoder("embedder", encoders["embedder"].tokenizer, torch.float32)
    asked = [drawn(number) for number in range(8)]
    found: dict[int, Any] = {}

    def one(house: House, number: int) -> None:
        found[number] = answered(house, "/v1/embeddings", model="own", input=asked[number])["data"]

    with serving_encoders({"own": own}, exact=True, decoders=()) as house:
        threads = [threading.Thread(target=one, args=(house, number)) for number in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    for number, texts in enumerate(asked):
        alone = own.embed(texts, batch_size=1)
        assert torch.tensor([data["embedding"] for data in found[number]]).equal(alone)


def test_embeddings_of_ids_and_in_base64(house: House, encoders: dict[str, Any]) -> None:
    own = encoders["embedder"]
    ids = [one.ids for one in own.tokenizer.inputs(TEXTS)]
    said = answered(house, "/v1/embeddings", model="embedder", input=TEXTS)["data"]
    wanted = torch.tensor([one["embedding"] for one in said])
    assert torch.allclose(wanted, own.embed(TEXTS), rtol=ULP, atol=ULP)
    by_ids = answered(house, "/v1/embeddings", model="embedder", input=ids)["data"]
    assert torch.allclose(torch.tensor([one["embedding"] for one in by_ids]), wanted, rtol=ULP, atol=ULP)
    (one,) = answered(house, "/v1/embeddings", model="embedder", input=ids[1])["data"]
    assert one["embedding"] == pytest.approx(wanted[1].tolist(), abs=ULP)
    coded = answered(
        house, "/v1/embeddings", model="embedder", input=TEXTS, encoding_format="base64", user="me"
    )
    assert "warnings" not in coded
    for vector, data in zip(wanted, coded["data"], strict=True):
        raw = base64.b64decode(data["embedding"])
        assert struct.unpack(f"<{len(vector)}f", raw) == pytest.approx(vector.tolist(), abs=ULP)
    told = answered(house, "/v1/embeddings", model="embedder", input="a dog", pooling="last")
    assert told["warnings"] == ["pooling is unknown here and changes nothing"]


def test_vectors_are_cut_where_they_were_trained_to_be(house: House, encoders: dict[str, Any]) -> None:
    said = answered(house, "/v1/embeddings", model="nested", input=TEXTS, dimensions=8)["data"]
    found = torch.tensor([one["embedding"] for one in said])
    whole = encoders["nested"].embed(TEXTS)
    assert torch.allclose(found, encoders["nested"].embed(TEXTS, dimensions=8), rtol=ULP, atol=ULP)
    assert torch.allclose(found, torch.nn.functional.normalize(whole[:, :8]), atol=1e-6)
    message = refused(house, "/v1/embeddings", model="nested", input="a", dimensions=9)
    assert "have 32 numbers" in message
    assert "8, 16" in message
    assert "matryoshka_dimensions" in refused(
        house, "/v1/embeddings", model="embedder", input="a", dimensions=8
    )
    assert len(encoders["embedder"].embed("a", dimensions=32)) == 32


def test_ranks_and_scores(house: House, encoders: dict[str, Any]) -> None:
    query, documents = "the cat", [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2], TEXTS[0]]
    vectors = encoders["embedder"].embed([query, *TEXTS[:3], TEXTS[0]])
    logits = encoders["ranker"].logits([(query, text) for text in (*TEXTS[:3], TEXTS[0])])[:, 0]
    for model, score, wanted in (
        ("embedder", "cosine", cosine(vectors[:1], vectors[1:])),
        ("ranker", "sigmoid", logits.sigmoid()),
        ("ranker", "logit", logits),
    ):
        raw = {"raw_scores": True} if score == "logit" else {}
        for path in ("/v1/rerank", "/rerank"):
            told = answered(
                house, path, model=model, query=query, documents=documents, return_documents=True, **raw
            )
            assert told["score"] == score
            values = [one["relevance_score"] for one in told["results"]]
            order = [one["index"] for one in told["results"]]
            assert values == sorted(values, reverse=True)
            assert sorted(order) == [0, 1, 2, 3]
            assert order.index(0) < order.index(3)  # equals stay in their order
            assert values == pytest.approx(wanted[order].tolist(), abs=1e-6)
            assert [one["document"]["text"] for one in told["results"]] == [
                [*TEXTS[:3], TEXTS[0]][i] for i in order
            ]
        best = answered(house, "/v1/rerank", model=model, query=query, documents=documents, top_n=2, **raw)
        assert best["results"] == [
            {"index": one["index"], "relevance_score": pytest.approx(one["relevance_score"], abs=1e-6)}
            for one in told["results"][:2]
        ]
        scores = answered(house, "/score", model=model, text_1=query, text_2=TEXTS[:3], **raw)
        assert [one["score"] for one in scores["data"]] == pytest.approx(wanted[:3].tolist(), abs=1e-6)
        pairs = answered(house, "/score", model=model, text_1=[query] * 2, text_2=TEXTS[:2], **raw)
        assert [one["score"] for one in pairs["data"]] == pytest.approx(wanted[:2].tolist(), abs=1e-6)
    assert "3 labels" in refused(house, "/rerank", model="labels", query="a", documents=["b"])
    assert "cosines" in refused(
        house, "/rerank", model="embedder", query="a", documents=["b"], raw_scores=True
    )
    assert "text_1 has 2 texts and text_2 3" in refused(
        house, "/score", model="ranker", text_1=["a", "b"], text_2=["a", "b", "c"]
    )


def test_labels_spans_masks_and_answers(house: House, encoders: dict[str, Any]) -> None:
    said = answered(house, "/classify", model="labels", input=TEXTS)
    for one, labels in zip(said["data"], encoders["labels"].classify(TEXTS), strict=True):
        assert one["label"] == labels[0].label
        assert one["num_classes"] == len(one["probs"]) == 3
        named = {label.label: label.probability for label in labels}
        assert one["probs"] == pytest.approx([named[name] for name in ("no", "yes", "perhaps")], abs=ULP)
    said = answered(house, "/v1/tag", model="tagger", input=TEXTS)
    spans = encoders["tagger"].tag(TEXTS)
    assert any(spans)
    for one, own in zip(said["data"], spans, strict=True):
        wanted = [{**vars(span), "probability": pytest.approx(span.probability, abs=ULP)} for span in own]
        assert one["spans"] == wanted
    masked = ["the [MASK] sat on a [MASK] .", "[MASK]"]
    said = answered(house, "/v1/fill-mask", model="filler", input=masked, top_k=3)
    for one, places in zip(said["data"], encoders["filler"].fill_mask(masked, top_k=3), strict=True):
        wanted = [
            [{**vars(found), "probability": pytest.approx(found.probability, abs=ULP)} for found in place]
            for place in places
        ]
        assert one["masks"] == wanted
    long = " ".join(drawn(3, 90) + drawn(5, 90))
    how = {"top_k": 3, "stride": 9, "longest": 7, "no_answer": 0.5}
    said = answered(house, "/v1/answer", model="answerer", question="who sat", context=long, **how)
    found = encoders["answerer"].answer("who sat", long, **how)
    assert said["answers"] == [
        {**vars(one), "probability": pytest.approx(one.probability, abs=1e-6)} for one in found
    ]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embeddings", {"model": "talker", "input": "a"}, "there are embedder, nested"),
        ("/v1/completions", {"model": "embedder", "prompt": "a"}, "there are talker"),
        ("/classify", {"model": "tagger", "input": "a"}, "there are labels, ranker"),
        ("/v1/embeddings", {"model": "embedder", "input": ["a", "the cat " * 40]}, "has 82 tokens, and this"),
        ("/v1/embeddings", {"model": "embedder", "input": "  "}, "empty"),
        ("/v1/embeddings", {"model": "embedder", "input": []}, "input"),
        ("/v1/embeddings", {"model": "embedder", "input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"model": "embedder", "input": [9999]}, "outside the model's vocabulary"),
        ("/v1/embeddings", {"model": "embedder", "input": [[1], []]}, "empty"),
        ("/v1/embeddings", {"model": "embedder", "input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/rerank", {"model": "ranker", "query": "a", "documents": [{"text": "a", "title": "b"}]}, "documents.0"),
        ("/rerank", {"model": "ranker", "query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/classify", {"model": "ranker", "input": "a"}, "one label"),
        ("/v1/fill-mask", {"model": "filler", "input": "a cat"}, r"no [MASK]"),
        ("/v1/answer", {"model": "answerer", "question": "a", "context": "the " * 9000, "stride": 1}, "longer stride"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(house: House, path: str, body: dict[str, Any], words: str) -> None:
    assert words in refused(house, path, **body)


def test_a_long_text_is_cut_where_that_is_asked(house: House, encoders: dict[str, Any]) -> None:
    long = "the cat " * 40
    told = answered(house, "/v1/embeddings", model="embedder", input=long, truncate=True)
    wanted = encoders["embedder"].embed(long, cut=True)
    assert told["data"][0]["embedding"] == pytest.approx(wanted.tolist(), abs=ULP)
    assert told["usage"]["prompt_tokens"] == 64


def test_too_many_tokens_are_refused_before_they_are_read(house: House) -> None:
    body = {"model": "answerer", "question": "a", "context": "." * 30000, "stride": 4}
    assert "more than 300000 tokens are too many for a request" in refused(house, "/v1/answer", **body)


def test_models_say_what_they_are_for(house: House) -> None:
    told = ask(house, "/v1/models", method="GET")[1]["data"]
    tasks = {model["id"]: model["task"] for model in told}
    assert tasks["talker"] == "causal-lm"
    assert tasks["filler"] == "masked-lm"
    assert {model["max_model_len"] for model in told if model["id"] in KINDS} == {64}


def test_an_encoder_without_a_head_is_not_served(encoders: dict[str, Any]) -> None:
    from headway.models import Head, build

    model = build(encoders["embedder"].spec.with_head(Head("states")), seed=0).eval()
    with pytest.raises(ConfigError, match="without a head"):
        served_as("bare", TextEncoder(model), Worker(), keep=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [0, 2])
def test_no_more_than_may_wait_are_taken(encoders: dict[str, Any], most: int) -> None:
    with serving_encoders({"embedder": encoders["embedder"]}, most=most, decoders=()) as house:
        packing: Any = house.models.places["embedder"].model.engine  # type: ignore[attr-defined]
        read, goes_on = packing._read, threading.Event()
        packing._read = lambda texts: goes_on.wait(10) and read(texts)
        body = {"model": "embedder", "input": "a dog"}
        found: list[Any] = []
        threads = [
            threading.Thread(target=lambda: found.append(ask(house, "/v1/embeddings", body)))
            for _ in range(most)
        ]
        [thread.start() for thread in threads]
        wait_until(lambda: house.worker.count == most)
        status, told = ask(house, "/v1/embeddings", body)
        assert (status, told["error"]["type"]) == (429, "rate_limit_error")
        goes_on.set()
        [thread.join() for thread in threads]
        assert [status for status, _ in found] == [200] * most


ODD: list[Any] = [
    *(None, True, -1, 0, 2, 10**30, 1e308, -0.5, "", "a", "[MASK] a", "\0", " ", "a " * 300, [], [[]], [1], [[1], [2]]),
    *([1, 2.5], ["a", 1], {}, [{"text": "a"}], [{"text": None}], ["a"] * 3, [True], [-1], [10**20]),
    *(float("inf"), float("nan")),
]  # fmt: skip


def test_odd_requests_are_answered_or_refused(house: House) -> None:
    own: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"model": "embedder", "input": "a"},
        "/v1/rerank": {"model": "ranker", "query": "a", "documents": ["a"]},
        "/v1/score": {"model": "embedder", "text_1": "a", "text_2": "b"},
        "/v1/classify": {"model": "labels", "input": "a"},
        "/v1/tag": {"model": "tagger", "input": "a"},
        "/v1/fill-mask": {"model": "filler", "input": "[MASK] a"},
        "/v1/answer": {"model": "answerer", "question": "a", "context": "the cat"},
        "/v1/translate": {"model": "talker", "text": "a"},
    }
    fields = {task.path: [*task.model_fields, "bogus"] for task in TASKS}
    assert own.keys() == fields.keys()
    draw, found = Random(1), set[int]()
    for _ in range(300):
        path = draw.choice([*fields])
        names = draw.sample(fields[path], draw.randint(1, 2))
        body = own[path] | {name: draw.choice(ODD) for name in names}
        status, told = ask(house, path, body)
        assert status in (200, 400, 404), (path, body, told)
        found.add(status)
    assert found == {200, 400, 404}
    assert house.worker.count == 0


def test_a_decoder_writes_while_many_texts_are_read(house: House) -> None:
    packing: Any = house.models.places["embedder"].model.engine  # type: ignore[attr-defined]
    read, begun = packing._read, threading.Event()

    def slow(texts: Any) -> Any:
        begun.set()
        time.sleep(0.02)
        return read(texts)

    packing._read = slow
    try:
        body = {"model": "embedder", "input": ["the cat " * 20] * 300}
        thread = threading.Thread(target=ask, args=(house, "/v1/embeddings", body))
        thread.start()
        assert begun.wait(10)
        answered(house, "/v1/completions", model="talker", prompt="a", max_tokens=8)
        assert waiting(packing) > 0
        thread.join()
    finally:
        packing._read = read


def test_a_client_that_leaves_takes_its_texts_along(house: House) -> None:
    packing: Any = house.models.places["embedder"].model.engine  # type: ignore[attr-defined]
    read, begun, goes_on = packing._read, threading.Event(), threading.Event()

    def slow(texts: Any) -> Any:
        begun.set()
        assert goes_on.wait(10)
        return read(texts)

    packing._read = slow
    try:
        body = json.dumps({"model": "embedder", "input": ["the cat " * 20] * 500}).encode()
        address = urlsplit(house.url)
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((address.hostname, address.port)) as there:
            there.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert begun.wait(10)
            assert waiting(packing) > 400
        wait_until(lambda: waiting(packing) == 0)
    finally:
        packing._read = read
        goes_on.set()
    wait_until(lambda: house.worker.count == 0)


@pytest.mark.parametrize("seed", range(20))
def test_a_step_reads_as_much_as_its_budget_holds(seed: int) -> None:
    draw = Random(seed)
    lengths = [draw.randint(1, 60) for _ in range(draw.randint(1, 40))]
    steps: list[list[int]] = []

    def read(some: Any) -> list[torch.Tensor]:
        steps.append([len(one.ids) for one in some])
        return [torch.zeros(1)] * len(some)

    packing = Packing(read, 50)
    for i, n in enumerate(lengths):
        packing.add(Packed(Encoded.of([0] * n), sum(lengths[:i])))
    while waiting(packing):
        packing.step()
    assert [n for step in steps for n in step] == lengths
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        assert sum(step) <= 50 or len(step) == 1
        assert after is None or sum(step) + after[0] > 50


def test_a_short_request_does_not_wait_for_a_long_one() -> None:
    steps: list[list[int]] = []

    def read(some: Any) -> list[torch.Tensor]:
        steps.append([one.ids[0] for one in some])
        return [torch.zeros(1)] * len(some)

    packing = Packing(read, 100)
    for i in range(50):
        packing.add(Packed(Encoded.of([1] * 50), i * 50))
    packing.step()
    for i in range(3):
        packing.add(Packed(Encoded.of([2] * 50), i * 50))
    while waiting(packing):
        packing.step()
    assert sum(2 in step for step in steps[:5]) >= 2
    assert sum(step.count(2) for step in steps[:6]) == 3
    assert sum(step.count(1) for step in steps) == 50


def test_what_cannot_be_read_fails_its_own_texts_alone() -> None:
    calls: list[int] = []

    def read(some: Any) -> list[torch.Tensor]:
        calls.append(len(some))
        if len(calls) == 1:
            raise RuntimeError("broken")
        return [torch.tensor([float("nan") if one.ids[0] == 7 else 1.0]) for one in some]

    packing = Packing(read, 4)
    texts = [Packed(Encoded.of([token] * 2), i) for i, token in enumerate([1, 1, 7, 1])]
    for text in texts:
        packing.add(text)
    packing.step()
    assert [text.ended for text in texts] == [True, True, False, False]
    packing.step()
    assert [type(text.error) for text in texts] == [
        RuntimeError,
        RuntimeError,
        FloatingPointError,
        type(None),
    ]
    assert [len(text.deltas) for text in texts] == [0, 0, 0, 1]
