"""One architecture of GGUF as a layout: its metadata, and the names of its tensors."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import Tensor

from headway.checkpoints.formats.gguf.experts import with_experts
from headway.checkpoints.formats.gguf.mixers import KV_HEADS, NORM, Mixing, with_mixers
from headway.checkpoints.formats.gguf.rope import FACTORS, ROPE, read_rope, write_rope
from headway.checkpoints.hf.config_keys import ConfigReader, Inexpressible, Key
from headway.checkpoints.hf.layouts.base import Layout, Part
from headway.checkpoints.hf.layouts.experts import ExpertKeys
from headway.checkpoints.hf.layouts.rules import FUSED, Modules, Rule, decoder_names
from headway.checkpoints.hf.windows import from_foreign, last_keys
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.models.mixers import parts_of
from headway.patterns import Causal
from headway.positions import Pairing, PerLayer, PositionScheme, Rotary

Fields = Callable[[ConfigReader, Mapping[str, Any]], dict[str, Any]]
"""A function of an architecture's keys and of the fields read so far, which returns further fields."""
Schemes = Callable[[Rotary, ConfigReader], tuple[PositionScheme, PositionScheme]]
"""A function of the rotation and the keys, which returns the positions of most layers, and those of every n-th."""
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
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
"""Our modules of a layer and theirs."""
BIASES = {
    "qkv_bias": "blk.0.attn_q.bias",
    "out_bias": "blk.0.attn_output.bias",
    "mlp_bias": "blk.0.ffn_gate.bias",
}
"""Fields of the spec that are true where the file has this tensor."""
SIZES = {
    "vocab": "vocab_size",
    "layers": "block_count",
    "width": "embedding_length",
    "hidden": "feed_forward_length",
    "heads": "attention.head_count",
    "trained_context": "context_length",
}
RMS, LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
WINDOW, MARKS = (f"attention.{name}" for name in ("sliding_window", "sliding_window_pattern"))
HEAD_DIMS = ("attention.key_length", "attention.value_length")
WINDOWED = {"llama": "mistral", "olmo2": "olmo3"}
"""The family of an architecture's models that have a window."""
MIXTURES = {"llama": "mixtral"}
"""The family of an architecture's models that have experts."""
SPARSE = {"nemotron_h": "nemotron_h_moe"}
"""The architecture of an architecture's models that have experts."""
TIED_VALUES = "attn_v"
"""Our key of whether there are layers with keys and no values."""
NONE: Mapping[str, Any] = MappingProxyType({})


def gguf_layout(
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
    sized: bool = False,
    every: int = 0,
    schemes: Schemes = lambda rotary, keys: (rotary, rotary),
    more: tuple[str, ...] = (),
    only: Mapping[str, tuple[Any, ...]] = NONE,
    further: Fields = lambda keys, fields: {},
    written: Callable[[ModelSpec], dict[str, Any]] = lambda spec: {},
    experts: ExpertKeys | None = None,
    mixing: Mixing | None = None,
    harmless: tuple[str, ...] = (),
    tensors: Sequence[Rule] = (),
    unused: Sequence[str] = (),
) -> Layout:
    """One `general.architecture`, by default of the family of that name; its positions are rotary where it has a
    `pairing`.

    `numbers` are further fields that have keys; `modules`, and `top` outside of layers, are those with another name.
    Where `tied` is not None, it holds for all models. Where layers are `sized`, kv heads and widths of feed-forwards
    may be lists, which `further` reads. Every `every`-th layer has full attention, and the second of `schemes`.
    `further` reads fields from the keys `more`, `written` writes them; keys of `only` have one value. `experts` are
    those that layers may have, `mixing` is the token mixer of some layers. `tensors` are those with names of their own,
    `unused` ends of names of those that files may have and no model uses."""

    def read(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        keys, width, heads = config.below(f"{name}."), fields["width"], fields["heads"]
        lengths = {keys.whole(key, width // heads or None) for key in HEAD_DIMS}
        if len(lengths) > 1:
            raise ConfigError(
                f"keys of {' and '.join(map(str, lengths))} dims and values of others are unsupported"
            )
        window = from_foreign("sliding_window", keys.get(WINDOW) or None)
        seeing = _seeing(keys, every, fields["layers"])
        by_layer = sized or (mixing is not None and mixing.marks == "heads")
        usual = {} if by_layer else {"kv_heads": keys.whole(KV_HEADS, heads)}
        mixers = {} if mixing is None else mixing.layers(keys, len(seeing))
        values = {
            "head_dim": (head_dim := lengths.pop()),
            "patterns": [Causal() if sees else window for sees in seeing],
            **usual,
            **mixers,
        }
        if pairing is not None:
            most, last = schemes(read_rope(keys, head_dim, pairing, config.get(FACTORS)), keys)
            values["positions"] = PerLayer.of([last if sees else most for sees in seeing])
        mixture = {} if experts is None else experts.read(keys, fields)
        return {**values, **mixture, **further(keys, {**fields, **values})}

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
            **({} if experts is None else experts.write(spec)),
            **({} if mixing is None else mixing.keys_of(spec)),
            **written(spec),
        }
        tied_values = any(getattr(mixer, "tied_values", False) for mixer in spec.mixers)
        norm = any(getattr(part, "norm", False) for mixer in spec.mixers for part in parts_of(mixer))
        return {
            **{f"{name}.{key}": value for key, value in keys.items()},
            FACTORS: rope[1],
            NORM: norm,
            TIED_VALUES: tied_values,
        }

    number_keys = {
        field: key._replace(names=f"{name}.{key.names}") if key.each else key
        for field, key in numbers.items()
    }
    keys_read = (KV_HEADS, WINDOW, *HEAD_DIMS, *ROPE, *([MARKS] if every else ()), *more)
    keys_read += (SIZES["hidden"],) if sized else ()
    keys_read += () if mixing is None else mixing.needed
    usual = {**dict.fromkeys(keys_read), **({} if experts is None else experts.part.keys)}
    joined = {
        part for whole, parts in FUSED.items() if any(whole in module for module in modules) for part in parts
    }
    names = {
        ours: theirs
        for ours, theirs in {**MODULES, **modules}.items()
        if ours.rpartition(".")[2] not in joined
    }
    plain = with_experts(
        decoder_names(
            *("", "token_embd", "output_norm", "blk.#.", names),
            top=top,
            head="output",
            unused=(FACTORS, *unused),  # the first is read with the positions
        )
    )
    plain = plain if mixing is None else with_mixers(plain, mixing)
    named = {rule.ours[0] for rule in tensors}

    def rules(spec: ModelSpec) -> list[Rule]:
        return [*(rule for rule in plain.rules(spec) if rule.ours[0] not in named), *tensors]

    sizes = {field: key for field, key in SIZES.items() if not (sized and field == "hidden")}
    return Layout(
        family=family or name,
        architectures={name: "lm"},
        keys={field: Key(f"{name}.{key}") for field, key in {**sizes, "norm_eps": eps}.items()}
        | {field: Key(field) for field in biases}
        | ({"tied": Key("tied")} if tied is None else {})
        | number_keys,
        only={
            f"{name}.attention.causal": (True,),
            **{f"{name}.{key}": values for key, values in only.items()},
            **({} if tied is None else {"tied": (tied,)}),
        },
        harmless=tuple(f"{name}.{key}" for key in ("tensor_data_layout", *harmless)),
        parts=(
            Part(
                {
                    **dict.fromkeys((FACTORS, NORM, TIED_VALUES)),
                    **{f"{name}.{key}": value for key, value in usual.items()},
                },
                read,
                write,
            ),
        ),
        tensors=replace(plain, rules=rules),
        pairing=pairing or "halves",
        also=also,
    )


def _seeing(keys: ConfigReader, every: int, layers: int) -> list[bool]:
    """For each layer, whether it has full attention where others may have a window: every n-th unless the file says."""
    marks = keys.get(MARKS) if every else None
    if marks is None or isinstance(marks, int):
        return [bool(every) and (i + 1) % (marks or every) == 0 for i in range(layers)]
    if len(marks) != layers or not set(marks) <= {0, 1}:
        raise keys.wrong(MARKS, f"a truth value for each of {layers} layers", list(marks))
    return [not windowed for windowed in marks]
