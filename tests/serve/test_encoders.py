"""Encoders over HTTP: every answer is what the Python API gives, whatever else is requested meanwhile."""

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
    status, response = ask(house, path, body)
    assert status == 400, response
    message: str = response["error"]["message"]
    return message


def drawn(number: int, longest: int = 40) -> list[str]:
    """Returns random texts of mixed lengths."""
    draw = Random(number)
    return [" ".join(draw.choices(WORDS[:15], k=draw.randint(1, longest))) for _ in range(draw.randint(1, 5))]


def test_16_clients_get_what_each_alone_gets(house: House, encoders: dict[str, Any]) -> None:
    batches = [drawn(number) for number in range(16)]

    async def ask_all() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
            requests = (client.embeddings.create(model="embedder", input=texts) for texts in batches)
            return await asyncio.gather(*requests)

    for texts, answer in zip(batches, asyncio.run(ask_all()), strict=True):
        assert [data.index for data in answer.data] == [*range(len(texts))]
        actual = torch.tensor([data.embedding for data in answer.data])
        expected = torch.stack([encoders["embedder"].embed(text) for text in texts])
        assert torch.allclose(actual, expected, rtol=ULP, atol=ULP)
        lengths = [len(encoded.ids) for encoded in encoders["embedder"].tokenizer.inputs(texts)]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(lengths)


def test_exact_is_the_same_bits_in_float32(encoders: dict[str, Any]) -> None:
    embedder = encoder("embedder", encoders["embedder"].tokenizer, torch.float32)
    batches = [drawn(number) for number in range(8)]
    answers: dict[int, Any] = {}

    def ask_one(house: House, number: int) -> None:
        answers[number] = answered(house, "/v1/embeddings", model="own", input=batches[number])["data"]

    with serving_encoders({"own": embedder}, exact=True, decoders=()) as house:
        threads = [threading.Thread(target=ask_one, args=(house, number)) for number in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    for number, texts in enumerate(batches):
        expected = embedder.embed(texts, batch_size=1)
        assert torch.tensor([data["embedding"] for data in answers[number]]).equal(expected)


def test_embeddings_of_ids_and_in_base64(house: House, encoders: dict[str, Any]) -> None:
    embedder = encoders["embedder"]
    ids = [encoded.ids for encoded in embedder.tokenizer.inputs(TEXTS)]
    rows = answered(house, "/v1/embeddings", model="embedder", input=TEXTS)["data"]
    vectors = torch.tensor([data["embedding"] for data in rows])
    assert torch.allclose(vectors, embedder.embed(TEXTS), rtol=ULP, atol=ULP)
    by_ids = answered(house, "/v1/embeddings", model="embedder", input=ids)["data"]
    assert torch.allclose(torch.tensor([data["embedding"] for data in by_ids]), vectors, rtol=ULP, atol=ULP)
    (single,) = answered(house, "/v1/embeddings", model="embedder", input=ids[1])["data"]
    assert single["embedding"] == pytest.approx(vectors[1].tolist(), abs=ULP)
    coded = answered(
        house, "/v1/embeddings", model="embedder", input=TEXTS, encoding_format="base64", user="me"
    )
    assert "warnings" not in coded
    for vector, data in zip(vectors, coded["data"], strict=True):
        raw = base64.b64decode(data["embedding"])
        assert struct.unpack(f"<{len(vector)}f", raw) == pytest.approx(vector.tolist(), abs=ULP)
    response = answered(house, "/v1/embeddings", model="embedder", input="a dog", pooling="last")
    assert response["warnings"] == ["pooling is unknown and was ignored"]


def test_vectors_are_cut_where_they_were_trained_to_be(house: House, encoders: dict[str, Any]) -> None:
    rows = answered(house, "/v1/embeddings", model="nested", input=TEXTS, dimensions=8)["data"]
    actual = torch.tensor([row["embedding"] for row in rows])
    whole = encoders["nested"].embed(TEXTS)
    assert torch.allclose(actual, encoders["nested"].embed(TEXTS, dimensions=8), rtol=ULP, atol=ULP)
    assert torch.allclose(actual, torch.nn.functional.normalize(whole[:, :8]), atol=1e-6)
    message = refused(house, "/v1/embeddings", model="nested", input="a", dimensions=9)
    assert "have 32 dimensions" in message
    assert "8, 16" in message
    assert "matryoshka_dimensions" in refused(
        house, "/v1/embeddings", model="embedder", input="a", dimensions=8
    )
    assert len(encoders["embedder"].embed("a", dimensions=32)) == 32


def test_ranks_and_scores(house: House, encoders: dict[str, Any]) -> None:
    query, documents = "the cat", [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2], TEXTS[0]]
    vectors = encoders["embedder"].embed([query, *TEXTS[:3], TEXTS[0]])
    logits = encoders["ranker"].logits([(query, text) for text in (*TEXTS[:3], TEXTS[0])])[:, 0]
    for model, score, expected in (
        ("embedder", "cosine", cosine(vectors[:1], vectors[1:])),
        ("ranker", "sigmoid", logits.sigmoid()),
        ("ranker", "logit", logits),
    ):
        raw = {"raw_scores": True} if score == "logit" else {}
        for path in ("/v1/rerank", "/rerank"):
            response = answered(
                house, path, model=model, query=query, documents=documents, return_documents=True, **raw
            )
            assert response["score"] == score
            values = [row["relevance_score"] for row in response["results"]]
            order = [row["index"] for row in response["results"]]
            assert values == sorted(values, reverse=True)
            assert sorted(order) == [0, 1, 2, 3]
            assert order.index(0) < order.index(3)  # equals stay in their order
            assert values == pytest.approx(expected[order].tolist(), abs=1e-6)
            assert [row["document"]["text"] for row in response["results"]] == [
                [*TEXTS[:3], TEXTS[0]][i] for i in order
            ]
        best = answered(house, "/v1/rerank", model=model, query=query, documents=documents, top_n=2, **raw)
        assert best["results"] == [
            {"index": row["index"], "relevance_score": pytest.approx(row["relevance_score"], abs=1e-6)}
            for row in response["results"][:2]
        ]
        scores = answered(house, "/score", model=model, text_1=query, text_2=TEXTS[:3], **raw)
        assert [row["score"] for row in scores["data"]] == pytest.approx(expected[:3].tolist(), abs=1e-6)
        pairs = answered(house, "/score", model=model, text_1=[query] * 2, text_2=TEXTS[:2], **raw)
        assert [row["score"] for row in pairs["data"]] == pytest.approx(expected[:2].tolist(), abs=1e-6)
    assert "one label, and this one has 3" in refused(
        house, "/rerank", model="labels", query="a", documents=["b"]
    )
    assert "cosines" in refused(
        house, "/rerank", model="embedder", query="a", documents=["b"], raw_scores=True
    )
    assert "text_1 has 2 texts and text_2 3" in refused(
        house, "/score", model="ranker", text_1=["a", "b"], text_2=["a", "b", "c"]
    )


def test_labels_spans_masks_and_answers(house: House, encoders: dict[str, Any]) -> None:
    response = answered(house, "/classify", model="labels", input=TEXTS)
    for row, labels in zip(response["data"], encoders["labels"].classify(TEXTS), strict=True):
        assert row["label"] == labels[0].label
        assert row["num_classes"] == len(row["probs"]) == 3
        named = {label.label: label.probability for label in labels}
        assert row["probs"] == pytest.approx([named[name] for name in ("no", "yes", "perhaps")], abs=ULP)
    response = answered(house, "/v1/tag", model="tagger", input=TEXTS)
    spans = encoders["tagger"].tag(TEXTS)
    assert any(spans)
    for row, expected_spans in zip(response["data"], spans, strict=True):
        expected = [
            {**vars(span), "probability": pytest.approx(span.probability, abs=ULP)} for span in expected_spans
        ]
        assert row["spans"] == expected
    masked = ["the [MASK] sat on a [MASK] .", "[MASK]"]
    response = answered(house, "/v1/fill-mask", model="filler", input=masked, top_k=3)
    for row, places in zip(response["data"], encoders["filler"].fill_mask(masked, top_k=3), strict=True):
        expected = [
            [
                {**vars(candidate), "probability": pytest.approx(candidate.probability, abs=ULP)}
                for candidate in place
            ]
            for place in places
        ]
        assert row["masks"] == expected
    long = " ".join(drawn(3, 90) + drawn(5, 90))
    options = {"top_k": 3, "stride": 9, "longest": 7, "no_answer": 0.5}
    response = answered(house, "/v1/answer", model="answerer", question="who sat", context=long, **options)
    answers = encoders["answerer"].answer("who sat", long, **options)
    assert response["answers"] == [
        {**vars(answer), "probability": pytest.approx(answer.probability, abs=1e-6)} for answer in answers
    ]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embeddings", {"model": "talker", "input": "a"}, "one for embed; loaded: embedder, nested"),
        ("/v1/completions", {"model": "embedder", "prompt": "a"}, "loaded: talker"),
        ("/classify", {"model": "tagger", "input": "a"}, "loaded: labels, ranker"),
        ("/v1/embeddings", {"model": "embedder", "input": ["a", "the cat " * 40]}, "has 82 tokens, but this"),
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
        ("/v1/answer", {"model": "answerer", "question": "a", "context": "the " * 9000, "stride": 1}, "raise stride"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(house: House, path: str, body: dict[str, Any], words: str) -> None:
    assert words in refused(house, path, **body)


def test_a_long_text_is_cut_where_that_is_asked(house: House, encoders: dict[str, Any]) -> None:
    long = "the cat " * 40
    response = answered(house, "/v1/embeddings", model="embedder", input=long, truncate=True)
    expected = encoders["embedder"].embed(long, cut=True)
    assert response["data"][0]["embedding"] == pytest.approx(expected.tolist(), abs=ULP)
    assert response["usage"]["prompt_tokens"] == 64


def test_too_many_tokens_are_refused_before_they_are_read(house: House) -> None:
    body = {"model": "answerer", "question": "a", "context": "." * 30000, "stride": 4}
    assert "more than 300000 tokens, the limit" in refused(house, "/v1/answer", **body)


def test_models_say_what_they_are_for(house: House) -> None:
    models = ask(house, "/v1/models", method="GET")[1]["data"]
    tasks = {model["id"]: model["task"] for model in models}
    assert tasks["talker"] == "causal-lm"
    assert tasks["filler"] == "masked-lm"
    assert {model["max_model_len"] for model in models if model["id"] in KINDS} == {64}


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
    bodies: dict[str, dict[str, Any]] = {
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
    assert bodies.keys() == fields.keys()
    draw, statuses = Random(1), set[int]()
    for _ in range(300):
        path = draw.choice([*fields])
        names = draw.sample(fields[path], draw.randint(1, 2))
        body = bodies[path] | {name: draw.choice(ODD) for name in names}
        status, response = ask(house, path, body)
        assert status in (200, 400, 404), (path, body, response)
        statuses.add(status)
    assert statuses == {200, 400, 404}
    assert house.worker.count == 0
