"""Native steps of linear attention: the logits of its modules, and the same bits however a row is cut into steps."""

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
    decoder = build(ModelSpec.of("llama", mixers=linear, **{**sizes, **fields}), seed=0).eval()
    assert isinstance(decoder, Decoder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return decoder


def read_together(readers: list[Reader]) -> list[torch.Tensor]:
    """Returns the logits of each reader for sequences that start, are read in pieces, fork and end."""
    rng = Random(0)
    tables = [[reader.cache.open() for _ in range(5)] for reader in readers]
    active, results = list(range(5)), []
    for step in range(12):
        if step == 5:
            active.remove(2)
            for i, reader in enumerate(readers):
                reader.cache.pool.close(tables[i][2])
                tables[i][2] = reader.cache.open()  # in pages that another sequence had
        if step == 7:
            active = [2, *reversed(active)]
        if step == 9:
            for i, reader in enumerate(readers):
                tables[i].append(reader.cache.pool.fork(tables[i][4]))
            active.append(5)
        ids = [[rng.randrange(53) for _ in range(rng.choice([1, 1, 9]))] for _ in active]
        logits = []
        for i, reader in enumerate(readers):
            chunks = [(tables[i][index], new_ids) for index, new_ids in zip(active, ids, strict=True)]
            logits.append(reader.read(chunks, [range(len(new_ids)) for new_ids in ids]))
            reader.end()
        results.append(logits)
    return [torch.cat(of_reader) for of_reader in zip(*results, strict=True)]


def check(kind: str, dtype: torch.dtype) -> None:
    linear, fields = SPECS[kind]
    decoder = model(linear, **fields).to(dtype)
    exact_decoder = model(linear, **fields)
    exact_decoder.load_state_dict(decoder.state_dict())
    readers = [Reader(decoder), Reader(decoder), Reader(exact_decoder.double())]
    assert [reader.steps.what for reader in readers] == ["native", "native", "modules"]
    readers[1].native = None
    assert_within_reference(*(read_together(readers)[i] for i in (0, 2, 1)))
    states = [[LinearState(*layer.tensors) for layer in reader.cache.layers] for reader in readers]
    for native, reference, expected in zip(*states, strict=True):
        assert torch.equal(native.count, reference.count)
        assert_within_reference(native.kv, expected.kv, reference.kv)
        assert_within_reference(native.k, expected.k, reference.k)


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
    """Denominators may be near 0 and outputs large; native steps and modules still agree within 1 %."""
    linear = LinearAttentionSpec("elu+1", rotary="both")
    decoder = model(linear).double().float()
    readers = [Reader(decoder), Reader(decoder)]
    readers[1].native = None
    native, modules = read_together(readers)
    torch.testing.assert_close(native, modules, rtol=1e-2, atol=1e-3)


def test_a_text_has_the_same_bits_however_it_is_cut() -> None:
    decoder = model(LinearAttentionSpec()).to(torch.bfloat16)
    rng, results = Random(3), []
    ids = [rng.randrange(53) for _ in range(150)]
    for pieces in ([150], [1] * 150, [64, 64, 22], [7] * 21 + [3]):
        reader = Reader(decoder, exact=True)
        table, other_table, rows, start = reader.cache.open(), reader.cache.open(), [], 0
        for n in pieces:
            chunk = ids[start : start + n]
            logits = reader.read([(other_table, [1, 2]), (table, chunk)], [[], range(n)])
            reader.end()
            rows.append(logits)
            start += n
        results.append(torch.cat(rows))
    for result in results[1:]:
        assert torch.equal(results[0], result)


def test_what_the_kernels_do_not_know_has_its_reason() -> None:
    for fields in ({"qk_norm": "head"}, {"positions": Rotary(pairing="halves", values=True)}):
        decoder = model(LinearAttentionSpec(), **fields)
        assert "do not support qk_norm or rotated values" in Reader(decoder).steps.why
