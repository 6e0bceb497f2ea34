"""Native steps of encoder-decoders: the logits of their modules, for sequences with sources of different lengths."""

from random import Random
from typing import Any

import pytest
import torch

from headway.generate import Reader
from headway.models import EncoderDecoder, ModelSpec, build
from headway.nn import RMSNorm
from tests.native.conftest import Use, at_levels, use  # noqa: F401
from tests.tolerance import assert_within_reference

KINDS: dict[str, dict[str, Any]] = {
    "marian": {},
    "bart": {},
    "t5": {},
    "transformer": {"order": "pre", "norm": "rms", "final_norm": True},
}
LENGTHS = [1, 64, 65, 300, 290]
"""Lengths of sources: the last two have enough pages that sequences with the same source read it once."""


def model(family: str, **fields: Any) -> EncoderDecoder:
    sizes = {"vocab": 53, "width": 48, "heads": 4, "layers": 2, "hidden": 80, "max_context": 512}
    pair = build(ModelSpec.of_pair(family, **sizes, **fields), seed=0).eval()
    assert isinstance(pair, EncoderDecoder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in pair.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return pair


def read_together(readers: list[Reader], dtype: torch.dtype) -> None:
    """Makes the same steps by native calls, by modules, and by modules in float64, with sequences that end, are read in
    pieces and share pages."""
    rng = Random(0)
    tables = [[reader.cache.open() for _ in LENGTHS] for reader in readers]
    sources = [[rng.randrange(53) for _ in range(n)] for n in LENGTHS]
    memories = []
    for reader in readers:
        assert reader.sources is not None
        memories.append(reader.sources.read(sources))
    active = list(range(len(LENGTHS)))
    results = []
    for step in range(14):
        if step == 6:
            active.remove(2)
        if step == 8:
            active.reverse()
        if step == 9:
            for i, reader in enumerate(readers):
                tables[i].append(reader.cache.pool.fork(tables[i][4]))
                memories[i].append(memories[i][4])
            active.insert(1, 5)
        ids = [[rng.randrange(53) for _ in range(rng.choice([1, 1, 7]))] for _ in active]
        logits = []
        for i, reader in enumerate(readers):
            chunks = [(tables[i][index], new_ids) for index, new_ids in zip(active, ids, strict=True)]
            logits_for = [range(len(new_ids)) for new_ids in ids]
            logits.append(reader.read(chunks, logits_for, [memories[i][index] for index in active]))
            reader.end()
        results.append(logits)
    native, reference, exact = (torch.cat(of_reader) for of_reader in zip(*results, strict=True))
    assert native.dtype == dtype
    assert_within_reference(native, exact, reference)


@at_levels(0)
def test_norms_behind_layers_are_those_of_the_modules(use: Use, level: str) -> None:  # noqa: F811
    use(level)
    test_they_are_those_of_the_modules("bart", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", KINDS)
def test_they_are_those_of_the_modules(family: str, dtype: torch.dtype) -> None:
    pair = model(family, **KINDS[family]).to(dtype)
    exact = model(family, **KINDS[family])
    exact.load_state_dict(pair.state_dict())
    readers = [Reader(pair), Reader(pair), Reader(exact.double())]
    assert [reader.steps.what for reader in readers] == ["native", "native", "modules"]
    readers[1].native = None
    read_together(readers, dtype)


def test_what_the_kernels_do_not_know_has_its_reason() -> None:
    pair = model("marian")
    pair.decoder.blocks[1].cross_attention_layernorm = torch.nn.Identity()
    assert str(Reader(pair).steps) == "modules: the kernels do not support the norm Identity"
    pair.decoder.blocks[1].cross_attention_layernorm = RMSNorm(48)
    assert Reader(pair).steps.what == "native"
    pair.lm_head.register_forward_hook(lambda *_: None)
    assert "hooks" in Reader(pair).steps.why
