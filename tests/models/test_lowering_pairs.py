"""Native steps of encoder-decoders: the logits of their modules, for texts whose sources are of other lengths."""

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
"""Of sources: the last two have pages enough that texts of one source read them once."""


def model(family: str, **fields: Any) -> EncoderDecoder:
    sizes = {"vocab": 53, "width": 48, "heads": 4, "layers": 2, "hidden": 80, "max_context": 512}
    made = build(ModelSpec.of_pair(family, **sizes, **fields), seed=0).eval()
    assert isinstance(made, EncoderDecoder)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=drawn) * 0.1)
    return made


def read_together(readers: list[Reader], dtype: torch.dtype) -> None:
    """The same steps by all readers, with texts that come, are read in pieces, share pages, and go: by native calls,
    by modules, and by modules in float64."""
    draw = Random(0)
    texts = [[reader.cache.open() for _ in LENGTHS] for reader in readers]
    sources = [[draw.randrange(53) for _ in range(n)] for n in LENGTHS]
    read = []
    for reader in readers:
        assert reader.sources is not None
        read.append(reader.sources.read(sources))
    live = list(range(len(LENGTHS)))
    results = []
    for step in range(14):
        if step == 6:
            live.remove(2)
        if step == 8:
            live.reverse()
        if step == 9:
            for i, reader in enumerate(readers):
                texts[i].append(reader.cache.pool.fork(texts[i][4]))
                read[i].append(read[i][4])
            live.insert(1, 5)
        ids = [[draw.randrange(53) for _ in range(draw.choice([1, 1, 7]))] for _ in live]
        logits = []
        for i, reader in enumerate(readers):
            chunks = [(texts[i][at], new) for at, new in zip(live, ids, strict=True)]
            wanted = [range(len(new)) for new in ids]
            logits.append(reader.read(chunks, wanted, [read[i][at] for at in live]))
            reader.end()
        results.append(logits)
    ours, low, exact = (torch.cat(of_reader) for of_reader in zip(*results, strict=True))
    assert ours.dtype == dtype
    assert_within_reference(ours, exact, low)


@at_levels(0)
def test_norms_behind_layers_are_those_of_the_modules(use: Use, level: str) -> None:  # noqa: F811
    use(level)
    test_they_are_those_of_the_modules("bart", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", KINDS)
def test_they_are_those_of_the_modules(family: str, dtype: torch.dtype) -> None:
    made = model(family, **KINDS[family]).to(dtype)
    exact = model(family, **KINDS[family])
    exact.load_state_dict(made.state_dict())
    readers = [Reader(made), Reader(made), Reader(exact.double())]
    assert [reader.steps.what for reader in readers] == ["native", "native", "modules"]
    readers[1].native = None
    read_together(readers, dtype)


def test_what_the_kernels_do_not_know_has_its_reason() -> None:
    made = model("marian")
    made.decoder.blocks[1].cross_attention_layernorm = torch.nn.Identity()
    assert str(Reader(made).steps) == "modules: the kernels know no norm Identity"
    made.decoder.blocks[1].cross_attention_layernorm = RMSNorm(48)
    assert Reader(made).steps.what == "native"
    made.lm_head.register_forward_hook(lambda *_: None)
    assert "hooks" in Reader(made).steps.why
