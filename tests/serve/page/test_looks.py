"""What is computed to look at a text: one token over the keys that pages hold of the text, or the whole text again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.api import LanguageModel
from headway.attention.linear_attention import LinearAttentionSpec
from headway.cache import PAGE
from headway.models import Decoder, ModelSpec, build
from headway.nn.adapters import attach, set_active
from headway.patterns import Causal, Pattern, PerHead, Sink, Window
from headway.positions import Learned, LinearBias, PositionScheme, Rotary
from headway.serve.served import Decoding
from headway.serve.visits import Key
from headway.serve.worker import Worker
from tests.generate.conftest import small
from tests.serve.conftest import House, Models, placed, running, serving, talker
from tests.serve.sources import saved_adapter
from tests.serve.test_guard import ask
from tests.text.conftest import byte_level

IDS = [(7 * i * i + 3 * i) % 300 for i in range(5 * PAGE + 20)]
PATTERNS: dict[str, tuple[Pattern, ...]] = {
    "full": (Causal(), Causal()),
    "window": (Window.last(70), Window.last(70)),
    "mixed": (Window.last(70) | (Causal() & Sink(3)), Causal()),
    "heads": (PerHead(*[Window.last(n) for n in (3, 50, 90, 130)]), Causal()),
}


@contextmanager
def reading(model: Decoder) -> Iterator[tuple[House, list[int]]]:
    """Yields a server of a model, and the numbers of tokens of its forward passes."""
    lm, worker, counts = LanguageModel(model, byte_level()), Worker(), list[int]()

    def count(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        counts.append(inputs[0].shape[1])

    assert model.stack.embed_tokens is not None
    model.stack.embed_tokens.register_forward_pre_hook(count)
    with running(Models(placed(Decoding("small", lm, worker, keep=1 << 24))), worker) as house:
        yield house, counts


def look(house: House, path: str, query: int, ids: Sequence[int] = IDS, **options: Any) -> dict[str, Any]:
    status, response = ask(house, f"/v1/{path}", {"prompt": [*ids], "query": query, **options})
    assert status == 200, response
    return response


def store(house: House) -> None:
    """Completes the text, so that pages hold its keys."""
    assert ask(house, body={"prompt": IDS, "max_tokens": 1})[0] == 200


def check(house: House, query: int, response: dict[str, Any], layer: int, head: int) -> None:
    """Checks that a row is that of the Python API."""
    lm = house.models.places["small"].model.lm  # type: ignore[union-attr]
    attention_map = lm.attention(IDS, layers=layer, heads=head)[layer]
    assert response["weights"] == pytest.approx(attention_map.row(query)[0].tolist(), abs=1e-5)
    assert response["sum"] == pytest.approx(1, abs=1e-5)
    assert response["difference"] < 1e-5 * max(1, response["largest"])
    assert response["largest"] == pytest.approx(float(attention_map.result(query).abs().max()), rel=1e-4)
    for name, queries in (("shares", [query]), ("mean_shares", response["sampled"])):
        (shares,) = attention_map.shares(queries)
        assert response[name] == pytest.approx({**shares._asdict(), "kind": shares.kind}, abs=1e-4)


@pytest.fixture
def counted() -> Iterator[tuple[House, list[int]]]:
    with reading(small(PATTERNS["full"], context=512)) as (house, counts):
        store(house)
        counts.clear()
        yield house, counts


def test_a_token_takes_a_pass_of_that_token(counted: tuple[House, list[int]]) -> None:
    house, counts = counted
    first = look(house, "attention/heads", 100)
    assert (first["stored"], first["computed"], counts) == (5 * PAGE, 21, [20, 1])
    row = look(house, "attention", 100, layer=1, head=2)
    assert row["computed"] == len(row["sampled"]) == 64  # the sampled queries are computed once for the text
    assert counts == [20, 1, 64]
    check(house, 100, row, 1, 2)
    for query, computed in ((101, 1), (5 * PAGE - 2, 1), (0, 1), (100, 1), (99, 0), (5 * PAGE + 2, 1)):
        counts.clear()
        response = look(house, "attention", query, layer=0, head=1)
        assert (response["stored"], response["computed"], sum(counts)) == (5 * PAGE, computed, computed)
        check(house, query, response, 0, 1)


def test_a_text_that_no_page_holds_is_read_once() -> None:
    with reading(small(PATTERNS["full"], context=512)) as (house, counts):
        for query, computed in ((100, len(IDS)), (7, 0), (len(IDS) - 1, 0)):
            response = look(house, "attention", query, layer=1, head=0)
            assert (response["stored"], response["computed"]) == (0, computed)
            assert counts == [len(IDS)]
        store(house)
        assert look(house, "attention", 100, layer=1, head=0)["computed"] == 0


@pytest.mark.parametrize("kind", PATTERNS)
def test_rows_are_those_of_the_python_api(kind: str) -> None:
    with reading(small(PATTERNS[kind], context=512)) as (house, _):
        store(house)
        lm = house.models.places["small"].model.lm  # type: ignore[union-attr]
        for query in (
            len(IDS) - 1,
            5 * PAGE + 7,
            200,
            3,
        ):  # with windows, keys that the last two queries see were released
            for layer, head in ((0, 1), (1, 3)):
                response = look(house, "attention", query, layer=layer, head=head)
                assert bool(response["stored"]) == (kind == "full" or query > 200)
                check(house, query, response, layer, head)
            response, log_probs = look(house, "attention/heads", query), lm.next_log_probs(IDS[: query + 1])
            assert [candidate["log_prob"] for candidate in response["next"]] == pytest.approx(
                [float(log_probs[candidate["id"]]) for candidate in response["next"]], abs=1e-4
            )


@pytest.mark.parametrize("positions", [Learned(512), LinearBias(), Rotary(10000.0, pairing="halves", dims=4)])
def test_positions_are_those_of_the_text(positions: PositionScheme) -> None:
    sizes: dict[str, Any] = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48, "vocab": 330}
    spec = ModelSpec.of("llama", **sizes, positions=positions, trained_context=512)
    model = build(spec, seed=1).eval()
    assert isinstance(model, Decoder)
    with reading(model) as (house, _):
        store(house)
        response = look(house, "attention", 150, layer=1, head=2)
        assert response["stored"] == 5 * PAGE
        check(house, 150, response, 1, 2)


def test_a_text_that_is_too_long_to_be_read_is_looked_at_where_pages_hold_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway.serve.looks.MOST_BYTES", 10_000)
    with reading(small(PATTERNS["window"], context=512)) as (house, _):
        store(house)
        for _ in range(2):
            response = look(house, "attention", -1, layer=1, head=0)
            check(house, len(IDS) - 1, response, 1, 0)
            body = {"prompt": IDS, "query": 100, "layer": 1, "head": 0}
            status, refused = ask(house, "/v1/attention", body)
            assert (status, "at most 11 tokens" in refused["error"]["message"]) == (400, True)


def test_sums_hold_no_keys() -> None:
    sizes: dict[str, Any] = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48, "vocab": 330}
    spec = ModelSpec.of("llama", **sizes, mixers=LinearAttentionSpec(), trained_context=512)
    model = build(spec, seed=1).eval()
    assert isinstance(model, Decoder)
    with reading(model) as (house, _):
        store(house)
        response = look(house, "attention", 150, layer=1, head=2)
        assert (response["stored"], response["computed"]) == (0, len(IDS))


def test_pages_stay_as_they_are(counted: tuple[House, list[int]]) -> None:
    house, _ = counted
    cache = house.models.places["small"].model.engine.reader.cache  # type: ignore[union-attr]

    def state() -> list[Any]:
        books = [(p.page, [*p.idle.items()], p.users, p.free) for p in cache.pool.stored]
        return [repr(books), cache.pool.held, cache.step, cache.copied]

    before, tensors = state(), [t.clone() for layer in cache.layers for t in layer.tensors]
    for query in (0, 100, len(IDS) - 1):
        assert look(house, "attention", query, layer=1, head=0)["stored"]
        look(house, "attention/heads", query)
    assert state() == before
    now = [t for layer in cache.layers for t in layer.tensors]
    for old, new in zip(tensors, now, strict=True):  # as bits: memory that was never written may hold NaN
        assert torch.equal(old.view(torch.int32), new.view(torch.int32))


@pytest.mark.filterwarnings("ignore:.*stores no fingerprint")
def test_a_model_is_looked_at_without_the_adapters_of_others(tmp_path: Path) -> None:
    lm = talker()
    adapter = saved_adapter(lm, tmp_path / "one", 0)
    with serving(keys=[Key("boss", admin=True)]) as house:
        headers = {"X_Api_Key": "boss"}
        body = {"lora_name": "one", "lora_path": str(tmp_path / "one")}
        assert ask(house, "/v1/load_lora_adapter", body=body, **headers)[0] == 200
        attach(lm.model, adapter, "own")
        for name, active in (("small", []), ("one", ["own"])):
            set_active(lm.model, active)
            request = {"model": name, "prompt": IDS, "query": 90}
            for stored in (0, 5 * PAGE):
                _, row = ask(house, "/v1/attention", {**request, "layer": 1, "head": 3}, **headers)
                expected = lm.attention(IDS, layers=1, heads=3)[1].row(90)[0]
                assert row["weights"] == pytest.approx(expected.tolist(), abs=1e-5)
                assert row["stored"] == stored
                _, response = ask(house, "/v1/what-if", {**request, "cuts": []}, **headers)
                log_probs = lm.next_log_probs(IDS[:91])
                for token in response["tokens"]:
                    assert token["before"] == pytest.approx(float(log_probs[token["id"]]), abs=1e-4)
                # only after a look at another text does a look at this one use what was stored of it
                assert ask(house, body={**request, "max_tokens": 1, "query": None}, **headers)[0] == 200
                ask(house, "/v1/attention/heads", {"model": name, "prompt": "x"}, **headers)
