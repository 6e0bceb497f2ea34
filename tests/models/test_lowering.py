"""One law over all kinds of layers: a kind's native steps are those of its modules, or it has a reason that is said."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from headway.attention.delta import DeltaSpec
from headway.attention.linear_attention import LinearAttentionSpec
from headway.generate import Reader
from headway.models import FAMILIES, Decoder, Head
from headway.models.decode_step import DecodeStep, choose_step, say_once
from headway.models.mixers import Softmax
from headway.models.operations import NotLowered
from headway.nn import (
    ACTIVATIONS,
    Adapter,
    Experts,
    Lora,
    Scores,
    Share,
    ShortConv,
    attach,
    linears,
    set_active,
)
from headway.nn.block import ORDERS
from headway.nn.experts import Router
from headway.nn.feedforward import TRAINED
from headway.nn.norms import NORMS
from headway.nn.weights import WEIGHTS
from headway.parallel import TensorParallel
from headway.patterns import Causal, Chunk, PerHead, Sink, Window
from headway.positions import (
    DynamicNTK,
    Learned,
    LinearBias,
    LinearScaling,
    Llama3,
    LongRope,
    NoPositions,
    PerLayer,
    Relative,
    Rotary,
    Sinusoidal,
    SpecialOrthogonal,
    T5Bias,
    YaRN,
)
from headway.scores import SoftCap
from tests.models.test_decode_step import model, native, read, stepped
from tests.native.conftest import LEVELS, Use, use  # noqa: F401
from tests.parallel.simulation import simulate
from tests.tolerance import assert_within_reference


class Kind(NamedTuple):
    """A model of two small layers, changed; `reason`: a word of why its steps are not native, None where they are."""

    fields: dict[str, Any]
    reason: str | None = None
    change: Callable[[Decoder], None] | None = None


def kept_as(weights: str) -> Callable[[Decoder], None]:
    def change(made: Decoder) -> None:
        for layer in linears(made.requires_grad_(False)).values():
            layer.keep(WEIGHTS[weights].pack(layer.matrix.bfloat16().to(_dtype(weights, layer.matrix))))

    return change


def _dtype(weights: str, like: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if weights == "compressed" else like.dtype


def adapted(*loras: Lora) -> Callable[[Decoder], None]:
    """No part of an adapter is as it began; each is on some layers, of all that the first is on."""
    targets = [(), ("q_proj", "v_proj", "down_proj"), ("gate_proj",)]

    def change(made: Decoder) -> None:
        for number, lora in enumerate(loras):
            adapter = Adapter.fresh(made, lora, targets[number], seed=number)
            drawn = torch.Generator().manual_seed(number)
            for value in adapter.tensors.values():
                value.add_(torch.randn(value.shape, generator=drawn) * 0.1)
            attach(made, adapter, str(number))

    return change


def both(*changes: Callable[[Decoder], None]) -> Callable[[Decoder], None]:
    def change(made: Decoder) -> None:
        for one in changes:
            one(made)

    return change


def hooked(made: Decoder) -> None:
    made.lm_head.register_forward_hook(lambda *_: None)


def other_mlp(made: Decoder) -> None:
    made.model.blocks[1].mlp = nn.Identity()


def other_norm(made: Decoder) -> None:
    made.model.blocks[0].input_layernorm = nn.Identity()


def other_activation(made: Decoder) -> None:
    made.model.blocks[1].mlp.act = "tanh"  # type: ignore[union-attr, assignment]


def scored(made: Decoder) -> None:
    for number, block in enumerate(made.model.blocks):
        block.self_attn.score = Scores((SoftCap(1.0 + number),))


def sunk(made: Decoder) -> None:
    for number, block in enumerate(made.model.blocks):
        logit = block.self_attn.sink_logit
        assert logit is not None
        logit.data.copy_(torch.linspace(-1.0, 2.0 + number, len(logit)))


def turned(made: Decoder) -> None:
    layer = made.model.blocks[0].self_attn.q_proj
    layer.weight = nn.Parameter(layer.weight.T.contiguous().T)


def shared(made: Decoder) -> None:
    (share,) = simulate(1, lambda exchange: Share(TensorParallel(exchange), 0))
    made.lm_head.share = share


DYNAMIC, LONG = DynamicNTK(4.0, 32), LongRope((1.0,) * 6, (2.0,) * 6, 32, 2.0)
POSITIONS: dict[str, Kind] = {
    name: Kind({"positions": scheme}, reason)
    for name, scheme, reason in [
        ("none", NoPositions(), None),
        ("learned", Learned(1024), None),
        ("sinusoidal", Sinusoidal(), None),
        ("halves", Rotary(pairing="halves"), None),
        ("adjacent", Rotary(pairing="adjacent"), None),
        ("some dims", Rotary(pairing="halves", dims=4), None),
        ("values", Rotary(pairing="adjacent", values=True), None),
        ("trained", Rotary(pairing="halves", scaling=None, trainable=True), None),
        ("linear scaling", Rotary(pairing="halves", scaling=LinearScaling(4.0)), None),
        ("yarn", Rotary(pairing="halves", scaling=YaRN(4.0, 32)), None),
        ("llama 3", Rotary(pairing="halves", scaling=Llama3(8.0, 1.0, 4.0, 32)), None),
        ("dynamic", Rotary(pairing="halves", scaling=DYNAMIC), "depends on the length"),
        ("longrope", Rotary(pairing="halves", scaling=LONG), "depends on the length"),
        ("matrices", SpecialOrthogonal(Rotary(pairing="halves")), "by matrices"),
        ("of each layer", PerLayer((Rotary(pairing="halves"), NoPositions())), None),
        ("relative", Relative(4), "no score RelativeKey"),
        ("alibi", LinearBias(), None),
        ("biases of T5", T5Bias(buckets=8, max_distance=16), None),
    ]
}
SOME = Experts(count=4, top=2)
GROUPED = {"groups": 4, "top_groups": 2}
STATE = {"heads": 4, "key_heads": 2, "head_dim": 8}
WIDE = {"width": 256, "hidden": 256, "head_dim": 64}
FIELDS = {weights: WIDE if weights.endswith("_K") or weights == "nf4" else {} for weights in WEIGHTS}
"""Of models whose matrices are kept so: NF4 has blocks of 64 inputs, K-quants of 256."""


def _reason(fields: Mapping[str, Any]) -> str | None:
    """A word of why a model with these fields is not native."""
    norms = {"rotated": "before they rotate them"}
    if fields.get("norm") == "layer":
        norms["head"] = "by their mean square alone"
    reasons = [
        "lets queries grow" if getattr(fields.get("positions"), "grows", False) else None,
        norms.get(fields.get("qk_norm", "none")),
        "know the activation" if fields.get("activation") in ("relu2", "xielu", "clamped_swiglu") else None,
        "no dense layer in front" if "head" in fields and fields["head"].dense else None,
    ]
    return next((reason for reason in reasons if reason is not None), None)


LAYERED = {"norm": "layer", "qk_norm": "head"}
GROWING = {"positions": Rotary(pairing="halves", query_growth=(0.5, 2))}
DENSE = {"head": Head("lm", dense="gelu")}
OTHER_LAYERS = dict.fromkeys(
    ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"), "whole 16 numbers"
)
OTHER_LAYERS |= {"gemma4_text": "no embeddings and no factors"}
OTHER_LAYERS |= dict.fromkeys(("mamba2", "bamba", "granitemoehybrid"), "know no SSD")
KINDS: dict[str, Kind] = {
    **{
        f"family {name}": Kind({"family": name}, OTHER_LAYERS.get(name) or _reason(family.defaults))
        for name, family in FAMILIES.items()
        if family.defaults.get("causal", True)
    },
    **{f"positions {name}": kind for name, kind in POSITIONS.items()},
    **{f"norm {norm} {bias}": Kind({"norm": norm, "norm_bias": bias}) for norm in NORMS for bias in (True, False)},
    **{f"order {o}": Kind({"order": o}) for o in ORDERS},
    **{
        f"{act} {gated}": Kind({"activation": act, "gated": gated}, _reason({"activation": act}))
        for act in (*ACTIVATIONS, *TRAINED)
        for gated in (True, False)
    },
    **{f"norm {norm} without weights": Kind({"norm": norm, "norm_weight": False}) for norm in NORMS},
    "norms of queries without weights": Kind({"norm_weight": False, "qk_norm": "head"}),
    "an offset of layer norms": Kind({"norm": "layer", "norm_bias": True, "norm_offset": 1.0}),
    "norms behind rotations": Kind({"qk_norm": "rotated"}, _reason({"qk_norm": "rotated"})),
    "layer norms of queries": Kind(LAYERED, _reason(LAYERED)),
    "queries that grow": Kind(GROWING, _reason(GROWING)),
    "a dense layer in front of the output": Kind(DENSE, _reason(DENSE)),
    "experts in some layers": Kind({"experts": (None, Experts(count=4, top=2))}),
    **{f"{heads} kv heads": Kind({"kv_heads": heads, "qk_norm": "head"}) for heads in (1, 2, 4)},
    "sink logits": Kind({"sink_logit": True}, change=sunk),
    "a gate of each head": Kind({"gate": "head"}),
    "a gate of each channel": Kind({"gate": "channel", "order": "parallel"}),
    "gates and sinks": Kind({"gate": "head", "sink_logit": True, "kv_heads": 2}, change=sunk),
    "gated sums": Kind({"gate": "channel", "mixers": LinearAttentionSpec()}),
    "another gate": Kind({"gate": "head", "gate_act": "softplus"}, "no softplus of an output gate"),
    "experts": Kind({"experts": Experts(count=5, top=2)}),
    "experts by sigmoids": Kind(
        {"experts": Experts(count=8, top=3, score="sigmoid", choice_bias=True, sum_eps=0.3, scale=2.5, **GROUPED)}
    ),
    "experts and a shared one": Kind(
        {"experts": Experts(count=6, top=2, shared=24, shared_gate=True, normalized=False, router_bias=True)}
    ),
    **{
        f"experts {order}": Kind({"order": order, "experts": Experts(count=4, top=2, shared=8), **more})
        for order, more in zip(ORDERS, [{}, {"residual_scale": 0.3}, {"mlp_bias": True}] * 2, strict=False)
    },
    **{
        f"experts as {weights}": Kind(
            {**FIELDS[weights], "experts": Experts(count=4, top=2)}, None, kept_as(weights)
        )
        for weights in WEIGHTS
    },
    "experts with adapters": Kind(
        {"experts": SOME}, "no adapters of experts", adapted(Lora(rank=2))
    ),
    "experts that clamp": Kind(
        {"activation": "clamped_swiglu", "experts": SOME}, "'clamped_swiglu'"
    ),
    **{
        f"delta by {decay}, {gate}, {rank}": Kind(
            {"mixers": (Softmax(), DeltaSpec(**STATE, value_dim=16, decay=decay, gate=gate, rank=rank, beta_scale=1.5))}
        )
        for decay, gate, rank in [("head", "silu", None), ("channel", "sigmoid", 6), ("channel", "silu", None)]
    },
    "delta of odd values": Kind({"mixers": (DeltaSpec(**STATE), Softmax())}, "whole 16 numbers"),
    **{
        f"short convolutions {bias}": Kind({"mixers": (ShortConv(conv=3, bias=bias), Softmax()), "order": order})
        for bias, order in [(True, "pre"), (False, "sandwich")]
    },
    "chunks": Kind({"patterns": (Chunk(3) & Causal(), Chunk(5) & Causal() | Sink(2) & Causal())}),
    "norms over all heads": Kind({"qk_norm": "all", "kv_heads": 2}),
    **{f"scaled residuals {o}": Kind({"order": o, "residual_scale": 0.3, "out_bias": True}) for o in ORDERS},
    **{f"norms with an offset {o}": Kind({"order": o, "norm_offset": 1.0, "qk_norm": "head"}) for o in ORDERS},
    "adapters on outputs that are normed": Kind({"order": "sandwich"}, None, adapted(Lora(rank=2, alpha=3.0))),
    "no first norm": Kind({"first_norm": False}),
    "capped": Kind({"score_cap": 0.5, "logit_cap": 2.0, "patterns": (Window.last(4), Causal())}),
    "biases": Kind({"qkv_bias": True, "out_bias": True, "mlp_bias": True, "output_bias": True}),
    "attention alone": Kind({"hidden": 0}),
    "no last norm": Kind({"final_norm": False}),
    "untied": Kind({"tied": False}),
    "embedding": Kind({"embedding_norm": True, "embedding_scale": 3.0}),
    "scores' scale": Kind({"attention_scale": 0.5, "head_dim": 10}),
    "scores of each layer": Kind({}, None, scored),
    "window": Kind({"patterns": Window.last(4)}),
    "window and sinks": Kind({"patterns": (Window.last(4) | (Causal() & Sink(2)), Causal())}),
    "dilated": Kind({"patterns": Causal() & Window.last(3, step=2)}),
    "each head": Kind({"patterns": PerHead(*(Window.last(4),) * 2, *(Causal(),) * 2)}, "one pattern for all heads"),
    "linear attention": Kind({"mixers": LinearAttentionSpec(), "positions": NoPositions()}),
    "wide heads": Kind({"head_dim": 520}, "heads of 1 to 512"),
    "scaled logits": Kind({"logit_scale": 0.3}),
    "hooks": Kind({}, "hooks", hooked),
    "another feed-forward": Kind({}, "no Identity", other_mlp),
    "another norm": Kind({}, "no norm Identity", other_norm),
    "another activation": Kind({}, "activation 'tanh'", other_activation),
    "columns that lie apart": Kind({}, "rows lie whole", turned),
    "shared by processes": Kind({}, "processes share", shared),
    "float64": Kind({}, "one type", lambda made: made.double()),
    "float16 head": Kind({"tied": False}, "one type", lambda made: made.lm_head.half()),
    **{f"weights {weights}": Kind(FIELDS[weights], None, kept_as(weights)) for weights in WEIGHTS},
    "nf4 in blocks that rows share": Kind({}, "whole blocks of 64", kept_as("nf4")),
    "adapter": Kind({}, None, adapted(Lora(rank=2, alpha=3.0))),
    "adapter of a power of two": Kind({}, None, adapted(Lora(rank=2, alpha=4.0))),
    "three adapters": Kind({}, None, adapted(*(Lora(rank=2 + i, alpha=3.0) for i in range(3)))),
    "an adapter and scaled logits": Kind({"logit_scale": 0.3}, None, adapted(Lora(rank=2, alpha=3.0))),
    "magnitudes": Kind({"qkv_bias": True}, None, adapted(Lora(rank=2, alpha=3.0, magnitude=True))),
    "magnitudes beside others": Kind(
        {}, None, adapted(DORA := Lora(rank=2, alpha=3.0, magnitude=True), Lora(rank=2, alpha=5.0), DORA)
    ),
    **{
        f"magnitudes beside {weights}": Kind(FIELDS[weights], None, both(kept_as(weights), adapted(DORA)))
        for weights in WEIGHTS
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_native_steps_are_those_of_the_modules_or_have_a_reason(kind: str, dtype: torch.dtype) -> None:
    fields, reason, change = KINDS[kind]
    made = model(**fields).to(dtype)
    wide = made.spec.norm == "rms" and bool(made.spec.norm_offset)
    if wide and made.spec.order == "post" and dtype == torch.bfloat16:
        reason = reason or "rounded behind it"
    if change is not None:
        change(made)
    if reason is None:
        # together: ten tokens are too few for what a reference's error says
        results = [*stepped(made, 1, 10), *stepped(made, 9, 10)]
        assert_within_reference(*map(torch.cat, zip(*results, strict=True)))
        return
    step, choice = choose_step(made, made.make_cache(1).pages)
    assert step is None
    assert choice.what == "modules"
    assert reason in choice.why


@pytest.mark.parametrize("level", LEVELS)
def test_operations_beside_products_at_every_level(use: Use, level: str) -> None:  # noqa: F811
    use(level)
    beside = (
        "gates and sinks",
        "a gate of each channel",
        "scaled residuals sandwich",
        "short convolutions True",
    )
    mixtures = "experts and a shared one", "experts by sigmoids"
    for kind in (*beside, *mixtures, "delta by head, silu, None", "delta by channel, sigmoid, 6"):
        test_native_steps_are_those_of_the_modules_or_have_a_reason(kind, torch.float32)


def test_a_cache_of_another_type_and_switched_off_adapters() -> None:
    made = model()
    other = made.make_cache(1, dtype=torch.float64).pages
    step, choice = choose_step(made, other)
    assert step is None
    assert "in the type of the weights" in choice.why
    with pytest.raises(NotLowered, match="in the type of the weights"):
        DecodeStep(made, other)
    before, ids = read(made, 2), torch.tensor([[7], [9]])
    adapted(Lora(rank=2, magnitude=True))(made)
    set_active(made, [])
    wanted = native(DecodeStep(model(), before.pages), before, ids)
    again = read(made, 2)
    assert torch.equal(native(DecodeStep(made, again.pages), again, ids), wanted)


def test_the_reason_is_said_once_and_a_reader_knows_it(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        scheme = Rotary(pairing="halves", scaling=DYNAMIC)
        for made in (model(positions=scheme), model(positions=scheme), model()):
            assert Reader(made).steps.what == ("modules" if made.spec.positions == scheme else "native")
    assert [record.getMessage() for record in caplog.records] == [
        "decoding by modules, not by native steps: the kernels know no rotation that depends on the length",
    ]
    assert str(Reader(model(), use_cache=False).steps) == "modules: no cache is used"


@pytest.mark.parametrize("level", LEVELS)
def test_scores_of_experts_that_are_no_numbers_give_none(use: Use, level: str) -> None:  # noqa: F811
    """Of one expert, of some in all groups, and of all; there are more groups than std::sort inserts one by one."""
    use(level)
    for which in (slice(5, 6), slice(0, None, 2), slice(None)):
        experts = Experts(count=72, top=3, score="sigmoid", choice_bias=True, groups=36, top_groups=3)
        made = model(experts=experts)
        before, ids = read(made, 3), torch.tensor([[7], [9], [2]])
        with torch.no_grad():
            for layer in made.modules():
                if isinstance(layer, Router):
                    layer.weight[which] = torch.nan
            assert native(DecodeStep(made, before.pages), before, ids).isnan().all()
            assert made(ids).isnan().all()
