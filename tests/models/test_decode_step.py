"""A step as one native call is the model's own step: same logits, same cache."""

from random import Random
from typing import Any

import pytest
import torch

from headway.cache import DecoderCache, KVCache
from headway.errors import BackendError
from headway.generate.session import DecoderSession
from headway.models import Decoder, ModelSpec, build
from headway.models.decode_step import DecodeStep
from headway.models.decode_support import unsupported_reason
from headway.nn import WEIGHTS, Adapter, BlockQuantized, Lora, attach, block_linears, linears, set_active
from headway.patterns import Causal, Pattern, Sink, Window
from headway.positions import Rotary
from tests.native.conftest import LEVELS, Use, use  # noqa: F401
from tests.tolerance import assert_rounded_once, assert_unbiased, assert_within_reference

FAMILIES = ["llama", "qwen2", "qwen3", "gpt2", "falcon", "gpt_neox", "phi", "starcoder2", "gpt_bigcode"]
CAUSAL = Causal()
WINDOWS = (Window.last(6) | (Causal() & Sink(2)), Causal(), Window.last(6))


def model(family: str = "llama", patterns: Pattern | tuple[Pattern, ...] = CAUSAL, **fields: Any) -> Decoder:
    layers = len(patterns) if isinstance(patterns, tuple) else 2
    sizes = {"width": 48, "heads": 4, "head_dim": 12, "layers": layers}
    spec = ModelSpec.of_depth(2, 53, family=family, patterns=patterns, **{**sizes, **fields})
    made = build(spec, seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made


def read(made: Decoder, rows: int, tokens: int = 5, slack: int = 0) -> DecoderCache:
    """A cache of random tokens, another number of them in each row."""
    ids = torch.randint(53, (rows, tokens), generator=torch.Generator().manual_seed(rows))
    cache = made.make_cache(rows, slack=slack)
    lengths = [max(1, tokens - i) for i in range(rows)]
    with torch.inference_mode():
        made(ids, tokens=cache.next_tokens(tokens, lengths), cache=cache)
    return cache


def steps(made: Decoder, rows: int, count: int = 14) -> None:
    """Steps of both kinds side by side, from one cache."""
    ours, plain = read(made, rows), read(made, rows)
    exact_model = Decoder(made.spec).double().eval()
    exact_model.load_state_dict({name: t.double() for name, t in made.state_dict().items()})
    exact = read(exact_model, rows)
    step = DecodeStep(made, ours)
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.randint(53, (rows, 1), generator=generator)
            low, right = (m(ids, cache=past) for m, past in ((made, plain), (exact_model, exact)))
            assert_within_reference(step(ids), right, low)
    assert ours.documents == plain.documents


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_tokens_of_each_row_and_some_taken_back(dtype: torch.dtype) -> None:
    """As drafts are read: rows of 0 to 4 tokens, of which up to 3 are trimmed."""
    made = model("llama", WINDOWS).to(dtype)
    exact_model = Decoder(made.spec).double().eval()
    exact_model.load_state_dict({name: t.double() for name, t in made.state_dict().items()})
    ours, plain = (read(made, 3, slack=3) for _ in range(2))
    exact, step = read(exact_model, 3, slack=3), DecodeStep(made, ours)
    assert step.fits(3, 4)
    assert not step.fits(3, 5)
    draw = Random(0)
    with torch.inference_mode():
        for _ in range(12):
            lengths = [draw.randint(0, 4), 4, draw.randint(1, 4)]
            ids = torch.tensor([[draw.randrange(53) for _ in range(4)] for _ in lengths])
            low, right = (
                m(ids, tokens=past.next_tokens(4, lengths), cache=past)
                for m, past in ((made, plain), (exact_model, exact))
            )
            found = step(ids, lengths)
            for b, n in enumerate(lengths):
                if n:
                    assert_within_reference(found[b, :n], right[b, :n], low[b, :n])
            back = [draw.randint(0, max(0, n - 1)) for n in lengths]
            for cache in (ours, plain, exact):
                cache.trim(back)
    assert ours.documents == plain.documents


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_what_lies_between_products_is_rounded_as_in_the_model(use: Use, level: str, family: str) -> None:  # noqa: F811
    """Norms, activations, gates, rotations, sums: what is stored of them is the model's, and prefers no side."""
    use(level)
    made = model(family, width=128, heads=8, head_dim=16).bfloat16()
    ours, plain = read(made, 9, 1), read(made, 9, 1)
    step = DecodeStep(made, ours)
    with torch.inference_mode():
        for _ in range(6):
            ids = torch.randint(53, (9, 1))
            assert_unbiased(step(ids), made(ids, cache=plain).double(), family)
        for at, (got, right) in enumerate(stored(ours, plain)):
            assert_unbiased(got, right.double(), family)
            if at < 2:  # keys and values of the first layer, before attention
                assert_rounded_once(got, right.double(), family, ulps=2)


def stored(ours: DecoderCache, plain: DecoderCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of both caches, layer by layer."""
    pairs = []
    for one, other in zip(ours.layers, plain.layers, strict=True):
        assert isinstance(one, KVCache)
        assert isinstance(other, KVCache)
        pairs += zip(one.tensors, other.tensors, strict=True)
    return [tuple(t[(a != 0).any(-1)] for t in pair) for pair in pairs for a in pair[1:]]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_rotated_where_positions_say_so(use: Use, level: str, dtype: torch.dtype) -> None:  # noqa: F811
    use(level)
    for pairing in ("halves", "adjacent"):
        steps(model(positions=Rotary(pairing=pairing, values=True)).to(dtype), 3, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, dtype: torch.dtype) -> None:
    made = model(family).to(dtype)
    for rows in (1, 3):
        steps(made, rows, 3)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_that_wrap_and_rows_that_differ(use: Use, level: str, dtype: torch.dtype) -> None:  # noqa: F811
    use(level)
    for rows in (1, 4, 9):
        steps(model("llama", WINDOWS).to(dtype), rows)


def test_rows_are_taken_more_than_once_and_dropped() -> None:
    """A session goes on with other rows than it began with."""
    made = model("llama", WINDOWS)
    native, plain = (DecoderSession(made, [[1, 2, 3], [4]]) for _ in range(2))
    plain._stepped = True  # decided: in Python
    assert torch.allclose(native.start(), plain.start())
    for ids, rows in (([5, 6], [0, 0, 1]), ([7, 8, 9], [2, 1]), ([3, 3], [1])):
        given = [[token] for token in ids]
        torch.testing.assert_close(native.step(given), plain.step(given))
        native.reorder(rows), plain.reorder(rows)
    assert native._native is not None


def test_what_cannot_be_one_call() -> None:
    def reason(made: Decoder, **cache: Any) -> str:
        return unsupported_reason(made, made.make_cache(1, **cache)) or ""

    assert not reason(model())
    hooked = model()
    hooked.lm_head.register_forward_hook(lambda *_: None)
    assert "hooks" in reason(hooked)
    adapted = model()
    attach(adapted, Adapter.fresh(adapted, Lora(rank=2, magnitude=True)))
    assert "DoRA" in reason(adapted)
    set_active(adapted, [])
    assert not reason(adapted)
    for layer in block_linears(adapted).values():
        layer.keep(WEIGHTS["nf4"].pack(layer.matrix))
    assert "no weights in nf4" in reason(adapted)
    assert "one type" in reason(model().double())
    assert "in the type of the weights" in reason(model(), dtype=torch.int8)
    assert "scores" in reason(model("bloom"))
    late = Rotary(pairing="halves", scaling=None, trainable=True)
    assert "trained" in reason(model(positions=late))
    assert "heads of 1 to 512" in reason(model(head_dim=520))
    with pytest.raises(BackendError, match="in the type of the weights"):
        DecodeStep(model(), model().make_cache(1, dtype=torch.int8))


def with_adapters(made: Decoder, count: int) -> None:
    """LoRAs no part of which is as it began, of several ranks, on some layers each."""
    targets = [(), ("q_proj", "v_proj", "down_proj"), ("gate_proj",)]
    for number in range(count):
        lora = Lora(rank=2 + number, alpha=3.0)
        adapter = Adapter.fresh(made, lora, targets[number], seed=number)
        drawn = torch.Generator().manual_seed(number)
        for value in adapter.tensors.values():
            value.add_(torch.randn(value.shape, generator=drawn) * 0.1)
        attach(made, adapter, str(number))


@pytest.mark.parametrize("adapters", [0, 1, 3])
@pytest.mark.parametrize("weights", [name for name in WEIGHTS if name != "nf4"])
def test_every_form_of_weights_and_adapters_beside_it(weights: str, adapters: int) -> None:
    """In bf16, within twice what the modules err: their reference is the numbers that the weights stand for, of
    inputs that are not rounded to 8 bits."""
    blocks = issubclass(WEIGHTS[weights], BlockQuantized)
    size = {"tied": False, **({"width": 256, "head_dim": 64, "hidden": 256} if blocks else {})}
    made = model("llama", **size).to(torch.bfloat16).requires_grad_(False)
    for layer in (*block_linears(made).values(), made.lm_head):
        layer.keep(WEIGHTS[weights].pack(layer.matrix))
    with_adapters(made, adapters)
    exact_model = model("llama", **size).double().requires_grad_(False)
    for name, layer in linears(made).items():
        linears(exact_model)[name].weight.data = layer.matrix.double()
    with_adapters(exact_model, adapters)
    for name, value in made.state_dict().items():
        if "adapters" in name or "norm" in name or "embed" in name:
            exact_model.get_parameter(name).data = value.double()
    ours, plain, exact = read(made, 3), read(made, 3), read(exact_model, 3)
    step, ids = DecodeStep(made, ours), torch.tensor([[7], [11], [13]])
    with torch.inference_mode():
        for _ in range(3):
            low, right = (m(ids, cache=past) for m, past in ((made, plain), (exact_model, exact)))
            assert_within_reference(step(ids), right, low)
