"""Models with every kind of layer, each with the reason why its decode steps are not native, if they are not."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from headway.attention.delta import DeltaSpec
from headway.attention.linear_attention import LinearAttentionSpec
from headway.models import FAMILIES, Decoder, Head
from headway.models.mixers import Softmax
from headway.nn import (
    ACTIVATIONS,
    Experts,
    Lora,
    ShortConv,
)
from headway.nn.block import ORDERS
from headway.nn.feedforward import TRAINED
from headway.nn.norms import NORMS
from headway.nn.weights import WEIGHTS
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
from tests.models.changes import (
    adapted,
    both,
    hooked,
    kept_as,
    other_activation,
    other_mlp,
    other_norm,
    scored,
    shared,
    sunk,
    turned,
)


class Kind(NamedTuple):
    """A small model of two layers and a change; `reason` is part of why its steps are not native, None if they are."""

    fields: dict[str, Any]
    reason: str | None = None
    change: Callable[[Decoder], None] | None = None


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
        ("dynamic", Rotary(pairing="halves", scaling=DYNAMIC), "depend on the length"),
        ("longrope", Rotary(pairing="halves", scaling=LONG), "depend on the length"),
        ("matrices", SpecialOrthogonal(Rotary(pairing="halves")), "by matrices"),
        ("of each layer", PerLayer((Rotary(pairing="halves"), NoPositions())), None),
        ("relative", Relative(4), "score=RelativeKey"),
        ("alibi", LinearBias(), None),
        ("biases of T5", T5Bias(buckets=8, max_distance=16), None),
    ]
}


SOME = Experts(count=4, top=2)


GROUPED = {"groups": 4, "top_groups": 2}


STATE = {"heads": 4, "key_heads": 2, "head_dim": 8}


WIDE = {"width": 256, "hidden": 256, "head_dim": 64}


FIELDS = {weights: WIDE if weights.endswith("_K") or weights == "nf4" else {} for weights in WEIGHTS}
"""Fields of models whose weights are stored in each format: NF4 has blocks of 64 inputs, K-quants of 256."""


def _reason(fields: Mapping[str, Any]) -> str | None:
    """Returns part of the message why a model with these fields is not native, None if it is."""
    norms = {"rotated": "qk_norm='rotated'"}
    if fields.get("norm") == "layer":
        norms["head"] = "qk_norm by RMSNorm only"
    reasons = [
        "support query_growth" if getattr(fields.get("positions"), "grows", False) else None,
        norms.get(fields.get("qk_norm", "none")),
        "support the activation"
        if fields.get("activation") in ("relu2", "xielu", "clamped_swiglu")
        else None,
        "support a dense layer before" if "head" in fields and fields["head"].dense else None,
    ]
    return next((reason for reason in reasons if reason is not None), None)


LAYERED = {"norm": "layer", "qk_norm": "head"}


GROWING = {"positions": Rotary(pairing="halves", query_growth=(0.5, 2))}


DENSE = {"head": Head("lm", dense="gelu")}


OTHER_LAYERS = {
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "lara_mini"),
        "values in multiples of 16",
    ),
    **dict.fromkeys(("mamba2", "bamba", "granitemoehybrid", "nemotron_h"), "do not support SSD"),
    "falcon_h1": "do not support AttentionBeside",
    "gemma3n_text": "altup and laurel",
    "gemma4_text": "per_layer_embedding and layer_scalar",
}
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
    "factors of a feed-forward": Kind({"mlp_scale": 0.5}, "mlp_scale and mlp_gate_scale"),
    "factors of gates": Kind({"mlp_gate_scale": 0.5}, "mlp_scale and mlp_gate_scale"),
    "a layer without a feed-forward": Kind({"layer_hidden": (0, None)}),
    "a dense layer in front of the output": Kind(DENSE, _reason(DENSE)),
    "experts in some layers": Kind({"experts": (None, Experts(count=4, top=2))}),
    **{f"{heads} kv heads": Kind({"kv_heads": heads, "qk_norm": "head"}) for heads in (1, 2, 4)},
    "sink logits": Kind({"sink_logit": True}, change=sunk),
    "a gate of each head": Kind({"gate": "head"}),
    "a gate of each channel": Kind({"gate": "channel", "order": "parallel"}),
    "gates and sinks": Kind({"gate": "head", "sink_logit": True, "kv_heads": 2}, change=sunk),
    "gated sums": Kind({"gate": "channel", "mixers": LinearAttentionSpec()}),
    "another gate": Kind({"gate": "head", "gate_act": "softplus"}, "gate_act='softplus'"),
    "experts": Kind({"experts": Experts(count=5, top=2)}),
    "experts by sigmoids": Kind(
        {"experts": Experts(count=8, top=3, score="sigmoid", choice_bias=True, sum_eps=0.3, scale=2.5, **GROUPED)}
    ),
    "experts and a shared one": Kind(
        {"experts": Experts(count=6, top=2, shared=24, shared_gate=True, normalized=False, router_bias=True)}
    ),
    **{
        f"experts {order}": Kind({"order": order, "experts": Experts(count=4, top=2, shared=8), **fields})
        for order, fields in zip(ORDERS, [{}, {"residual_scale": 0.3}, {"mlp_bias": True}] * 2, strict=False)
    },
    **{
        f"experts as {weights}": Kind(
            {**FIELDS[weights], "experts": Experts(count=4, top=2)}, None, kept_as(weights)
        )
        for weights in WEIGHTS
    },
    "experts with adapters": Kind(
        {"experts": SOME}, "support adapters of experts", adapted(Lora(rank=2))
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
    "delta of odd values": Kind({"mixers": (DeltaSpec(**STATE), Softmax())}, "values in multiples of 16"),
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
    "each head": Kind({"patterns": PerHead(*(Window.last(4),) * 2, *(Causal(),) * 2)}, "PerHead patterns"),
    "linear attention": Kind({"mixers": LinearAttentionSpec(), "positions": NoPositions()}),
    "wide heads": Kind({"head_dim": 520}, "head sizes from 1 to 512"),
    "scaled logits": Kind({"logit_scale": 0.3}),
    "hooks": Kind({}, "hooks", hooked),
    "another feed-forward": Kind({}, "support Identity", other_mlp),
    "another norm": Kind({}, "support the norm Identity", other_norm),
    "another activation": Kind({}, "activation 'tanh'", other_activation),
    "columns that lie apart": Kind({}, "contiguous rows", turned),
    "shared by processes": Kind({}, "tensor parallel", shared),
    "float64": Kind({}, "in one dtype", lambda made: made.double()),
    "float16 head": Kind({"tied": False}, "in one dtype", lambda made: made.lm_head.half()),
    **{f"weights {weights}": Kind(FIELDS[weights], None, kept_as(weights)) for weights in WEIGHTS},
    "nf4 in blocks that rows share": Kind({}, "a multiple of 64 inputs", kept_as("nf4")),
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
