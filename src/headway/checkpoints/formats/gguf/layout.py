"""Builds the layout of an architecture of GGUF: its metadata keys, and the names of its tensors."""

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
"""A function of an architecture's keys and of the fields read so far, which returns more fields."""
Schemes = Callable[[Rotary, ConfigReader], tuple[PositionScheme, PositionScheme]]
"""A function of the rotation and the keys, which returns the positions of most layers, and of every n-th layer."""
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
"""Our modules of a layer and their names in GGUF."""
BIASES = {
    "qkv_bias": "blk.0.attn_q.bias",
    "out_bias": "blk.0.attn_output.bias",
    "mlp_bias": "blk.0.ffn_gate.bias",
}
"""Fields of the spec that are true if the file has this tensor."""
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
"""The family of an architecture's models if they have a window."""
MIXTURES = {"llama": "mixtral"}
"""The family of an architecture's models if they have experts."""
SPARSE = {"nemotron_h": "nemotron_h_moe"}
"""The architecture of an architecture's models if they have experts."""
TIED_VALUES = "attn_v"
"""Our key for whether there are layers with keys and no values."""
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
    """Returns the layout of one `general.architecture`, by default of the family of that name; its positions are rotary
    if it has a `pairing`.

    biases: fields of the spec that say whether biases exist (`BIASES`).
    also: more families that are written as this architecture.
    eps: the key of the norms' epsilon.
    numbers: more fields that have keys.
    modules, top: modules of a layer, and outside of layers, whose names are not the usual ones.
    tied: whether the output layer is the embedding, in all models; None if the file decides.
    sized: whether kv heads and feed-forward widths may be lists, which `further` reads.
    every: every `every`-th layer has full attention, and the second of `schemes`.
    further, written: reads more fields from the keys `more`, and writes them.
    only: keys that must have one of these values.
    experts: the experts that layers may have.
    mixing: the token mixer of some layers.
    harmless: keys that are ignored.
    tensors: rules that replace the usual ones.
    unused: suffixes of names of tensors that may be in a file and that no model uses."""

    def read(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        keys, width, heads = config.below(f"{name}."), fields["width"], fields["heads"]
        lengths = {keys.whole(key, width // heads or None) for key in HEAD_DIMS}
        if len(lengths) > 1:
            raise ConfigError(
                f"{' and '.join(HEAD_DIMS)} must be equal, got {' and '.join(map(str, sorted(lengths)))}"
            )
        window = from_foreign("sliding_window", keys.get(WINDOW) or None)
        seeing = _seeing(keys, every, fields["layers"])
        by_layer = sized or (mixing is not None and mixing.marks == "heads")
        common_heads = {} if by_layer else {"kv_heads": keys.whole(KV_HEADS, heads)}
        mixers = {} if mixing is None else mixing.layers(keys, len(seeing))
        values = {
            "head_dim": (head_dim := lengths.pop()),
            "patterns": [Causal() if sees else window for sees in seeing],
            **common_heads,
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
    defaults = {**dict.fromkeys(keys_read), **({} if experts is None else experts.part.keys)}
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
            unused=(FACTORS, *unused),  # FACTORS is read with the positions
        )
    )
    plain = plain if mixing is None else with_mixers(plain, mixing)
    replaced = {rule.ours[0] for rule in tensors}

    def rules(spec: ModelSpec) -> list[Rule]:
        return [*(rule for rule in plain.rules(spec) if rule.ours[0] not in replaced), *tensors]

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
                    **{f"{name}.{key}": value for key, value in defaults.items()},
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
    """Returns whether each layer has full attention while others may have a window: by default every n-th has."""
    marks = keys.get(MARKS) if every else None
    if marks is None or isinstance(marks, int):
        return [bool(every) and (i + 1) % (marks or every) == 0 for i in range(layers)]
    if len(marks) != layers or not set(marks) <= {0, 1}:
        raise keys.wrong(MARKS, f"a truth value for each of {layers} layers", list(marks))
    return [not windowed for windowed in marks]
