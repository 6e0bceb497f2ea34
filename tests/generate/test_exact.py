"""Exact logits: a bitwise function of the text alone, however it is read."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from headway.errors import ConfigError
from headway.generate import Engine, GenerationConfig, NgramDraft, Reader, generate
from headway.generate.requests import Request
from headway.models import Decoder, EncoderDecoder, ModelSpec, build
from headway.models.quantize import quantize_model
from headway.patterns import Causal, Sink, Window
from headway.positions import Learned, LinearBias
from tests.generate.bits import Bits
from tests.generate.conftest import small
from tests.generate.engines import MODELS, drain, used
from tests.generate.test_adapters import with_adapters
from tests.generate.test_many_requests import request, text
from tests.models.test_encoder import seq2seq

BF16 = torch.bfloat16


def of_family(name: str, **more: Any) -> Decoder:
    spec = ModelSpec.of(name, vocab=330, width=64, layers=2, heads=4, hidden=96, trained_context=4096, **more)
    return build(spec, seed=3).eval()  # type: ignore[return-value]


def in_int4(model: Decoder) -> Decoder:
    quantize_model(model, "int4")
    return model


KINDS: dict[str, Callable[[], Decoder | EncoderDecoder]] = {
    "full": lambda: small(Causal(), context=4096).to(BF16),
    "float32": lambda: small(Causal(), context=4096),
    "windows": lambda: small((Window.last(70) | (Causal() & Sink(2)), Window.last(600)), context=4096).to(
        BF16
    ),
    "dilated": lambda: small((Window.last(20, step=3), Causal()), context=4096).to(BF16),
    "alibi": lambda: of_family("llama", positions=LinearBias()).to(BF16),
    "gpt2": lambda: of_family("gpt2", positions=Learned(4096)).to(BF16),
    "int4": lambda: in_int4(small(Causal(), context=4096).to(BF16)),
    "int8 cache": lambda: small(Causal(), context=4096).to(BF16),
    "adapters": lambda: with_adapters(small(Causal(), context=4096).to(BF16)),
    "linear": lambda: deepcopy(MODELS["linear"]).to(BF16),
    "encoder-decoder": lambda: build(seq2seq(), seed=5).eval().to(BF16),  # type: ignore[return-value]
}
SLOW = ("float32", "dilated", "alibi")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in KINDS]
)
def test_logits_belong_to_the_text(kind: str) -> None:
    """Alone, in any batch, in pieces, after stored prefixes, after preemption, and with drafts."""
    model, draw, bits = KINDS[kind](), Random(5), Bits()
    longest = 2300 if kind in ("full", "float32") else 200  # more than 2048 keys are attended to in parts
    common = [draw.randrange(model.spec.vocab) for _ in range(longest)]
    requests = [request(model, draw, number, common) for number in range(14)]
    options: dict[str, Any] = {"exact": True, "kv_dtype": torch.int8 if kind == "int8 cache" else None}
    for each in requests:
        run(Engine(bits.watch(Reader(model, **options))), [each], draw)
    run(Engine(bits.watch(Reader(model, **options))), requests, draw)
    narrow = Reader(model, budget=1, **options)
    narrow.cache.pool.budget = (8 + longest // 64) * sum(kind.nbytes for kind in narrow.cache.pool.classes)
    run(Engine(bits.watch(narrow), step_tokens=90, beside=24), requests, draw)
    if isinstance(model, Decoder) and kind != "linear":
        drafted = Engine(
            bits.watch(Reader(model, slack=3, **options)), step_tokens=20, draft=NgramDraft(tokens=3, least=1)
        )
        run(drafted, [each for each in requests if each.config.beams is None], draw)
    assert bits.agreed >= 2 * len(bits.of_text) > 100
    assert not bits.differed


def test_without_it_they_depend_on_how_the_text_is_read() -> None:
    model, draw, bits = KINDS["full"](), Random(5), Bits()
    common = [draw.randrange(330) for _ in range(200)]
    requests = [request(model, draw, number, common) for number in range(6)]
    for step_tokens in (None, 50):
        run(Engine(bits.watch(Reader(model)), step_tokens=step_tokens), requests, draw)
    assert bits.differed


def run(engine: Engine, requests: Sequence[Request], draw: Random) -> None:
    for each in requests:
        engine.add(text(each))
        for _ in range(draw.randint(0, 2)):
            engine.step()
    drain(engine)
    assert used(engine) == 0


def test_a_call_may_ask_for_it() -> None:
    model = KINDS["full"]()
    prompts = [[*range(100)], [5, 6]]
    config = GenerationConfig(max_new_tokens=5, log_probs=True, exact=True)
    together, in_pieces = generate(model, prompts, config), replace(config, prefill_chunk=9)
    for prompt, beside in zip(prompts, together, strict=True):
        (alone,) = generate(model, [prompt], in_pieces)
        assert (alone.ids, alone.log_probs) == (beside.ids, beside.log_probs)
    with pytest.raises(ConfigError, match=r"exact: .*all weights on the CPU, in one dtype"):
        generate(small(Causal()).double(), prompts[1:], config)


def test_where_it_cannot_be_is_said() -> None:
    with pytest.raises(ConfigError, match="exact needs use_cache=True"):
        GenerationConfig(exact=True, use_cache=False)
    with pytest.raises(
        ConfigError,
        match=r"cannot compute this: the kernels need all weights on the CPU, in one dtype, .*; leave exact out",
    ):
        Reader(small(Causal()).double(), exact=True)
    magnitudes = with_adapters(small(Causal()), magnitude=True)
    Reader(magnitudes, exact=True).check_adapters(None)
    with pytest.raises(ConfigError, match=r"adapters=\['tone'\], exact: .*magnitudes"):
        Reader(magnitudes, exact=True).check_adapters(["tone"])
    with pytest.raises(ConfigError, match="prefill_chunk and exact must be the same"):
        generate(KINDS["full"](), [[1], [2]], [GenerationConfig(exact=True), GenerationConfig()])
