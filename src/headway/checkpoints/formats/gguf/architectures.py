"""The architectures of GGUF, as data: the metadata below an architecture's name, and the names of its tensors.

Queries and keys of "llama" and its like lie in adjacent pairs, as in Meta's own files, those of the others in halves. A
window in all layers (Mistral) is the key attention.sliding_window, which llama.cpp does not honour in these
architectures: to it all keys are seen, which is the same for rows of up to that many tokens. Which layers have no
positions (SmolLM3, Cohere 2), and which have a window (Cohere 2, Gemma 2 and 3, OLMo 3), need be no key: it is every
n-th that differs. Gemma's norms are stored as 1 + w (`model.py`).
(ggml-org/ggml, docs/gguf.md; ggml-org/llama.cpp, src/llama-model.cpp, src/models, conversion.)
"""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from headway.checkpoints.formats.gguf.derived import (
    EXPERTS,
    FACTORS,
    LOCAL_BASE,
    LOGIT_SCALE,
    ROPE,
    SCALE,
    THETA,
    Fields,
    Schemes,
    local_base,
    nth_without,
    read_experts,
    read_granite,
    read_rope,
    scale_of_27b,
    untruncated,
    with_experts,
    write_experts,
    write_granite,
    write_local_base,
    write_rope,
)
from headway.checkpoints.hf.config_keys import ConfigReader, Key
from headway.checkpoints.hf.layouts import Inexpressible, Layout
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.layouts.rules import FUSED, Modules, decoder_names
from headway.checkpoints.hf.windows import from_foreign, last_keys
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.patterns import Causal
from headway.positions import Learned, Pairing, PerLayer

MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
"""Our modules of a layer and theirs."""
BIASES = {
    "qkv_bias": "blk.0.attn_q.bias",
    "out_bias": "blk.0.attn_output.bias",
    "mlp_bias": "blk.0.ffn_gate.bias",
}
"""Fields of the spec that are on where a tensor is there."""
SIZES = {
    "vocab": "vocab_size",
    "layers": "block_count",
    "width": "embedding_length",
    "hidden": "feed_forward_length",
    "heads": "attention.head_count",
    "trained_context": "context_length",
}
RMS, LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
KV_HEADS, WINDOW, MARKS = (
    f"attention.{name}" for name in ("head_count_kv", "sliding_window", "sliding_window_pattern")
)
HEAD_DIMS = ("attention.key_length", "attention.value_length")
WINDOWED = {"llama": "mistral", "olmo2": "olmo3"}
"""The family of an architecture's models that have a window."""
MIXTURES = {"llama": "mixtral"}
"""... and that have experts."""
NONE: Mapping[str, Any] = MappingProxyType({})


def _layout(
    name: str,
    pairing: Pairing | None,
    biases: Collection[str] = (),
    *,
    family: str | None = None,
    also: tuple[str, ...] = (),
    eps: str = RMS,
    numbers: Mapping[str, Key] = NONE,
    modules: Modules = NONE,
    top: Modules = NONE,
    tied: bool | None = None,
    every: int = 0,
    schemes: Schemes = lambda rotary, keys: (rotary, rotary),
    more: tuple[str, ...] = (),
    only: Mapping[str, tuple[Any, ...]] = NONE,
    further: Fields = lambda keys, fields: {},
    written: Callable[[ModelSpec], dict[str, Any]] = lambda spec: {},
    experts: Mapping[str, Any] | None = None,
) -> Layout:
    """One `general.architecture`, by default of the family of that name; its positions are rotary where it has a
    `pairing`.

    `numbers` are further fields that are keys; `modules`, and `top` outside of layers, are those with another name.
    Where `tied` is not None, all are or none is. Of `every` so many layers the last sees all, and has the second of
    `schemes`. `further` are fields that `more` keys say, as `written` writes them; keys of `only` have one value.
    `experts` are the fields of `Experts` that have no key where layers may have some."""

    def read(given: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        keys, width, heads = given.below(f"{name}."), fields["width"], fields["heads"]
        lengths = {keys.whole(key, width // heads or None) for key in HEAD_DIMS}
        if len(lengths) > 1:
            raise ConfigError(
                f"keys of {' and '.join(map(str, lengths))} dims and values of others are unsupported"
            )
        window = from_foreign("sliding_window", keys.get(WINDOW) or None)
        seeing = _seeing(keys, every, fields["layers"])
        found = {
            "head_dim": (head_dim := lengths.pop()),
            "kv_heads": keys.whole(KV_HEADS, heads),
            "patterns": [Causal() if sees else window for sees in seeing],
        }
        if pairing is not None:
            most, last = schemes(read_rope(keys, head_dim, pairing, given.get(FACTORS)), keys)
            found["positions"] = PerLayer.of([last if sees else most for sees in seeing])
        mixture = {} if experts is None else read_experts(keys, fields["hidden"], experts)
        return {**found, **mixture, **further(keys, {**fields, **found})}

    def write(spec: ModelSpec) -> dict[str, Any]:
        windows = {last_keys(pattern) for pattern in spec.patterns}
        if len(windows - {None}) > 1 or (len(windows) > 1 and not every):
            raise Inexpressible("windows")
        rope: tuple[dict[str, Any], Tensor | None] = ({}, None) if pairing is None else write_rope(spec)
        keys = {
            KV_HEADS: spec.kv_heads,
            **dict.fromkeys(HEAD_DIMS, spec.head_dim),
            WINDOW: next(iter(windows - {None}), None),
            **rope[0],
            **{key: value for key, (value,) in only.items()},
            **({} if experts is None else write_experts(spec)),
            **written(spec),
        }
        return {**{f"{name}.{key}": value for key, value in keys.items()}, FACTORS: rope[1]}

    own = {field: key._replace(names=f"{name}.{key.names}") for field, key in numbers.items()}
    read_keys = (KV_HEADS, WINDOW, *HEAD_DIMS, *ROPE, *([MARKS] if every else ()), *more)
    read_keys += () if experts is None else EXPERTS
    joined = {
        part for whole, parts in FUSED.items() if any(whole in one for one in modules) for part in parts
    }
    names = {
        ours: theirs
        for ours, theirs in {**MODULES, **modules}.items()
        if ours.rpartition(".")[2] not in joined
    }
    return Layout(
        family=family or name,
        architectures={name: "lm"},
        keys={field: Key(f"{name}.{key}") for field, key in {**SIZES, "norm_eps": eps}.items()}
        | {field: Key(field) for field in biases}
        | ({"tied": Key("tied")} if tied is None else {})
        | own,
        only={
            f"{name}.attention.causal": (True,),
            **{f"{name}.{key}": values for key, values in only.items()},
            **({} if tied is None else {"tied": (tied,)}),
        },
        harmless=(f"{name}.tensor_data_layout",),
        parts=(Part(dict.fromkeys((FACTORS, *(f"{name}.{key}" for key in read_keys))), read, write),),
        tensors=with_experts(
            decoder_names(
                *("", "token_embd", "output_norm", "blk.#.", names),
                top=top,
                head="output",
                unused=(FACTORS,),  # read with the positions
            )
        ),
        pairing=pairing or "halves",
        also=also,
    )


def _seeing(keys: ConfigReader, every: int, layers: int) -> list[bool]:
    """Whether a layer sees all where others may have a window: every n-th does, unless the file says which."""
    marks = keys.get(MARKS) if every else None
    if marks is None or isinstance(marks, int):
        return [bool(every) and (i + 1) % (marks or every) == 0 for i in range(layers)]
    if len(marks) != layers or not set(marks) <= {0, 1}:
        raise keys.wrong(MARKS, f"a truth value for each of {layers} layers", list(marks))
    return [not windowed for windowed in marks]


LOGITS = {"logit_scale": Key(LOGIT_SCALE)}
PARALLEL = "use_parallel_residual"
QKV, GATE_UP = {"self_attn.qkv_proj": "attn_qkv"}, {"mlp.gate_up_proj": "ffn_up"}
POST = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
SANDWICH = {**POST, "pre_feedforward_layernorm": "ffn_norm"}
LLAMAS = ("mixtral", "mistral", "ministral", "internlm3", "iquestcoder", "helium")
TABLE: Mapping[str, Any] = {
    "top": {"model.embed_positions": "position_embd"},
    "further": lambda keys, fields: {"positions": Learned(fields["trained_context"])},
}
ARCHITECTURES: Mapping[str, Layout] = {
    "llama": _layout("llama", "adjacent", BIASES, also=LLAMAS, experts=NONE),
    "qwen2": _layout("qwen2", "halves", ("qkv_bias",)),
    "qwen3": _layout("qwen3", "halves"),
    "qwen3moe": _layout("qwen3moe", "halves", family="qwen3_moe", experts=NONE),
    "gpt-oss": _layout(
        *("gpt-oss", "halves"),
        family="gpt_oss",
        modules={"post_attention_layernorm": "post_attention_norm"},
        every=2,
        schemes=untruncated,
        experts={"router_bias": True},
    ),
    "smollm3": _layout("smollm3", "adjacent", every=4, schemes=nth_without),
    "ernie4_5": _layout("ernie4_5", "adjacent"),
    "seed_oss": _layout(
        *("seed_oss", "halves", ("qkv_bias",)), modules={"post_attention_layernorm": "post_attention_norm"}
    ),
    "command-r": _layout(*("command-r", "adjacent"), family="cohere", eps=LAYER, numbers=LOGITS, tied=True),
    "cohere2": _layout(
        *("cohere2", "adjacent"), eps=LAYER, numbers=LOGITS, tied=True, every=4, schemes=nth_without
    ),
    "granite": _layout(
        *("granite", "adjacent", BIASES),
        numbers={name: Key(name, 1.0) for name in ("embedding_scale", "residual_scale")},
        more=(SCALE, LOGIT_SCALE),
        only={"rope.scaling.finetuned": (True,)},  # false means no positions there
        further=read_granite,
        written=write_granite,
    ),
    "olmo2": _layout(
        *("olmo2", "halves"),
        modules=POST,
        tied=False,
        every=4,
        schemes=local_base(None),
        more=(LOCAL_BASE,),
        written=write_local_base,
        also=("olmo3",),
    ),
    "gemma": _layout("gemma", "halves", tied=True),
    "gemma2": _layout(
        *("gemma2", "halves"),
        modules=SANDWICH,
        tied=True,
        numbers={
            "score_cap": Key("attn_logit_softcapping", 50.0),
            "logit_cap": Key("final_logit_softcapping", 30.0),
        },
        every=2,
        further=scale_of_27b(46),
    ),
    "gemma3": _layout(
        *("gemma3", "halves"),
        family="gemma3_text",
        modules=SANDWICH,
        numbers={"logit_cap": Key("final_logit_softcapping")},
        every=6,
        schemes=local_base(THETA),
        more=(LOCAL_BASE,),
        further=scale_of_27b(62),
        written=write_local_base,
    ),
    "phi3": _layout("phi3", "halves", modules={**QKV, **GATE_UP}),
    "chatglm": _layout("chatglm", "adjacent", ("qkv_bias",), family="glm", modules=GATE_UP),
    "stablelm": _layout(
        *("stablelm", "halves", ("qkv_bias",)), eps=LAYER, tied=False, only={PARALLEL: (False,)}
    ),
    "starcoder2": _layout("starcoder2", "halves", eps=LAYER),
    "phi2": _layout("phi2", "halves", family="phi", eps=LAYER, tied=False),
    "gptneox": _layout(
        *("gptneox", "halves"),
        family="gpt_neox",
        eps=LAYER,
        numbers={"order": Key(PARALLEL, True, {False: "pre", True: "parallel"})},
        modules=QKV,
        tied=False,
    ),
    "falcon": _layout("falcon", "halves", eps=LAYER, modules=QKV),
    "gpt2": _layout("gpt2", None, eps=LAYER, modules=QKV, **TABLE),
    "starcoder": _layout("starcoder", None, family="gpt_bigcode", eps=LAYER, modules=QKV, **TABLE),
    "bloom": _layout(*("bloom", None), eps=LAYER, modules=QKV, top={"model.embed_norm": "token_embd_norm"}),
    "mpt": _layout(*("mpt", None), eps=LAYER, modules=QKV, only={"attention.max_alibi_bias": (8.0,)}),
}
