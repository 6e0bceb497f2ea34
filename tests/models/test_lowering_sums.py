"""Native steps of linear attention: the logits of its modules, and the same bits however a text is cut into steps."""

from random import Random
from typing import Any

import pytest
import torch

from headway.attention.linear_attention import LinearAttentionSpec, LinearState
from headway.generate import Reader
from headway.models import Decoder, ModelSpec, build
from headway.positions import NoPositions, Rotary
from tests.native.conftest import Use, at_levels, use  # noqa: F401
from tests.tolerance import assert_within_reference

SPECS: dict[str, tuple[LinearAttentionSpec, dict[str, Any]]] = {
    "elu+1": (LinearAttentionSpec(), {}),
    "adjacent": (LinearAttentionSpec(), {"positions": Rotary(pairing="adjacent", dims=8)}),
    "cosine": (LinearAttentionSpec("cosine"), {"kv_heads": 2}),
    "relu": (LinearAttentionSpec("relu"), {"head_dim": 20}),
    "square": (LinearAttentionSpec("square", rotary="none"), {"positions": NoPositions()}),
    "exp": (LinearAttentionSpec("exp", "relu"), {"kv_heads": 1}),
    "softmax": (LinearAttentionSpec("softmax", eps=0.25), {}),
}


def model(linear: LinearAttentionSpec, **fields: Any) -> Decoder:
    sizes = {"vocab": 53, "width": 48, "heads": 4, "layers": 2, "hidden": 80, "trained_context": 512}
    made = build(ModelSpec.of("llama", mixers=linear, **{**sizes, **fields}), seed=0).eval()
    assert isinstance(made, Decoder)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=drawn) * 0.1)
    return made


def read_together(readers: list[Reader]) -> list[torch.Tensor]:
    """The logits of each reader, of texts that come, are read in pieces, fork and go."""
    draw = Random(0)
    texts = [[reader.cache.open() for _ in range(5)] for reader in readers]
    live, results = list(range(5)), []
    for step in range(12):
        if step == 5:
            live.remove(2)
            for i, reader in enumerate(readers):
                reader.cache.pool.close(texts[i][2])
                texts[i][2] = reader.cache.open()  # in pages that were others' before
        if step == 7:
            live = [2, *reversed(live)]
        if step == 9:
            for i, reader in enumerate(readers):
                texts[i].append(reader.cache.pool.fork(texts[i][4]))
            live.append(5)
        ids = [[draw.randrange(53) for _ in range(draw.choice([1, 1, 9]))] for _ in live]
        logits = []
        for i, reader in enumerate(readers):
            chunks = [(texts[i][at], new) for at, new in zip(live, ids, strict=True)]
            logits.append(reader.read(chunks, [range(len(new)) for new in ids]))
            reader.end()
        results.append(logits)
    return [torch.cat(of_reader) for of_reader in zip(*results, strict=True)]


def check(kind: str, dtype: torch.dtype) -> None:
    linear, fields = SPECS[kind]
    made = model(linear, **fields).to(dtype)
    exact = model(linear, **fields)
    exact.load_state_dict(made.state_dict())
    readers = [Reader(made), Reader(made), Reader(exact.double())]
    assert [reader.steps.what for reader in readers] == ["native", "native", "modules"]
    readers[1].native = None
    assert_within_reference(*(read_together(readers)[i] for i in (0, 2, 1)))
    states = [[LinearState(*layer.tensors) for layer in reader.cache.layers] for reader in readers]
    for ours, low, wide in zip(*states, strict=True):
        assert torch.equal(ours.count, low.count)
        assert_within_reference(ours.kv, wide.kv, low.kv)
        assert_within_reference(ours.k, wide.k, low.k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SPECS)
def test_they_are_those_of_the_modules(kind: str, dtype: torch.dtype) -> None:
    check(kind, dtype)


@at_levels(0)
def test_at_every_level(use: Use, level: str) -> None:  # noqa: F811
    use(level)
    check("cosine", torch.float32)
    check("elu+1", torch.float32)


def test_rotation_may_be_in_both_where_it_is_unsafe() -> None:
    """Denominators of any size: rows of the native step and of modules are equal where both are large."""
    linear = LinearAttentionSpec("elu+1", rotary="both")
    made = model(linear).double().float()
    readers = [Reader(made), Reader(made)]
    readers[1].native = None
    ours, modules = read_together(readers)
    torch.testing.assert_close(ours, modules, rtol=1e-2, atol=1e-3)


def test_a_text_has_the_same_bits_however_it_is_cut() -> None:
    made = model(LinearAttentionSpec()).to(torch.bfloat16)
    draw, results = Random(3), []
    ids = [draw.randrange(53) for _ in range(150)]
    for pieces in ([150], [1] * 150, [64, 64, 22], [7] * 21 + [3]):
        reader = Reader(made, exact=True)
        text, other, rows, first = reader.cache.open(), reader.cache.open(), [], 0
        for n in pieces:
            new = ids[first : first + n]
            logits = reader.read([(other, [1, 2]), (text, new)], [[], range(n)])
            reader.end()
            rows.append(logits)
            first += n
        results.append(torch.cat(rows))
    for other_way in results[1:]:
        assert torch.equal(results[0], other_way)


def test_what_the_kernels_do_not_know_has_its_reason() -> None:
    for fields in ({"qk_norm": "head"}, {"positions": Rotary(pairing="halves", values=True)}):
        made = model(LinearAttentionSpec(), **fields)
        assert "no norms of queries and no rotated values" in Reader(made).steps.why
