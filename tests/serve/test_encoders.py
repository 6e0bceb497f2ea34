"""Encoders over HTTP: every answer is what the Python API gives, whatever is asked beside it."""

import asyncio
import base64
import struct
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch

from headway.api import TextEncoder
from headway.errors import ConfigError
from headway.similarity import cosine
from tests.serve.conftest import House
from tests.serve.encoders import KINDS, ULP, WORDS, answered, encoder, serving_encoders
from tests.serve.test_guard import ask

openai = pytest.importorskip("openai")

from headway.serve.calls import served_as  # noqa: E402
from headway.serve.inputs import TASKS  # noqa: E402
from headway.serve.worker import Worker  # noqa: E402

TEXTS = ["the cat sat on a mat .", "who ran home", "a dog", "b c d e f g , not the cat"]


@pytest.fixture(scope="module")
def house(encoders: dict[str, Any]) -> Iterator[House]:
    with serving_encoders(encoders) as running:
        yield running


def refused(house: House, path: str, **body: Any) -> str:
    status, told = ask(house, path, body)
    assert status == 400, told
    message: str = told["error"]["message"]
    return message


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
