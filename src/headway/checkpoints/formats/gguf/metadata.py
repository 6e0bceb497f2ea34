"""From GGUF's metadata to `ModelSpec` and back: LLaMA and Mistral ("llama"), and families that are named alike.

An architecture is a `Layout`, whose config has the metadata's keys below the architecture's name, and what tensors say
besides. Queries and keys of "llama" lie in adjacent pairs, as in Meta's own files, those of the Qwens in halves. A
window in all layers (Mistral) is the key attention.sliding_window, which llama.cpp does not honour in these
architectures: to it all keys are seen, which is the same for rows of up to that many tokens. Which layers have no
positions (SmolLM3, Cohere 2), and which have a window (Cohere 2), is no key: it is every fourth.
(ggml-org/ggml, docs/gguf.md; ggml-org/llama.cpp, src/llama-model.cpp and convert_hf_to_gguf.py.)
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from headway.checkpoints.formats.gguf.rope import FACTORS, ROPE, decimal, read_rope, rounded, write_rope
from headway.checkpoints.hf.config_keys import OURS, ConfigReader, Key, reading
from headway.checkpoints.hf.headway_config import own_facts
from headway.checkpoints.hf.layouts import Inexpressible, Layout
from headway.checkpoints.hf.layouts.base import differing
from headway.checkpoints.hf.layouts.rules import TensorNames, decoder_names
from headway.checkpoints.hf.windows import from_foreign, last_keys
from headway.errors import CheckpointError, ConfigError, check_known
from headway.models import ModelSpec
from headway.patterns import Causal
from headway.positions import NoPositions, Pairing, PerLayer
from headway.storage.gguf import GGUF, Value
from headway.storage.lazy import LazyTensors

PARTS, EMBEDDING, OUTPUT = "split.count", "token_embd.weight", "output.weight"
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
KV_HEADS, WINDOW = "attention.head_count_kv", "attention.sliding_window"
HEAD_DIMS = ("attention.key_length", "attention.value_length")
WINDOWED = {"llama": "mistral"}
"""The family of an architecture's models that have a window."""
FACTS: Mapping[str, tuple[type, ...]] = {
    "family": (str,),
    "max_context": (int,),
    **dict.fromkeys(
        ("dropout", "attention_dropout", "activation_dropout", "final_dropout", "init_std"), (float,)
    ),
}
"""Fields of a spec that GGUF has no key for, which others need not know: under our own name."""


EVERY = 4
"""Of so many layers the last is another."""


def _without_positions(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Every fourth layer without positions."""
    kinds = [NoPositions() if (i + 1) % EVERY == 0 else spec["positions"] for i in range(spec["layers"])]
    return {"positions": PerLayer.of(kinds)}


def _without_windows(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Every fourth layer without a window, and without positions."""
    full = [(i + 1) % EVERY == 0 for i in range(spec["layers"])]
    return {**_without_positions(spec), "patterns": [Causal() if one else spec["patterns"] for one in full]}


def _layout(
    name: str,
    pairing: Pairing,
    biases: Collection[str] = (),
    *,
    family: str | None = None,
    also: tuple[str, ...] = (),
    eps: str = RMS,
    numbers: Mapping[str, Key] = MappingProxyType({}),
    modules: Mapping[str, str] = MappingProxyType({}),
    tied: bool | None = None,
    by_layer: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda spec: {},
) -> Layout:
    """One `general.architecture`, by default of the family of that name: `numbers` are further fields that are keys,
    `modules` are those with another name, `by_layer` gives the fields that differ between layers from those that are
    read. Where `tied` is not None, all are or none is."""

    def read(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        keys, width, heads = given.below(f"{name}."), fields["width"], fields["heads"]
        lengths = {keys.whole(key, width // heads or None) for key in HEAD_DIMS}
        if len(lengths) > 1:
            raise ConfigError(
                f"keys of {' and '.join(map(str, lengths))} dims and values of others are unsupported"
            )
        found = {
            "head_dim": (head_dim := lengths.pop()),
            "kv_heads": keys.whole(KV_HEADS, heads),
            "patterns": from_foreign("sliding_window", keys.get(WINDOW)),
            "positions": read_rope(keys, head_dim, pairing, given.get(FACTORS)),
        }
        return {**found, **by_layer({**fields, **found})}

    def write(spec: ModelSpec) -> dict[str, Any]:
        windows = {last_keys(pattern) for pattern in spec.patterns}
        if len(windows - {None}) > 1 or (len(windows) > 1 and by_layer is not _without_windows):
            raise Inexpressible("windows")
        window = next(iter(windows - {None}), None)
        rope, factors = write_rope(spec)
        keys = {
            KV_HEADS: spec.kv_heads,
            **dict.fromkeys(HEAD_DIMS, spec.head_dim),
            **({} if window is None else {WINDOW: window}),
            **rope,
        }
        return {**{f"{name}.{key}": value for key, value in keys.items()}, FACTORS: factors}

    own = {field: key._replace(names=f"{name}.{key.names}") for field, key in numbers.items()}
    return Layout(
        family=family or name,
        architectures={name: "lm"},
        keys={field: Key(f"{name}.{key}") for field, key in {**SIZES, "norm_eps": eps}.items()}
        | {field: Key(field) for field in biases}
        | ({"tied": Key("tied")} if tied is None else {})
        | own,
        more=dict.fromkeys((FACTORS, *(f"{name}.{key}" for key in (KV_HEADS, WINDOW, *HEAD_DIMS, *ROPE)))),
        only={f"{name}.attention.causal": (True,), **({} if tied is None else {"tied": (tied,)})},
        harmless=(f"{name}.tensor_data_layout",),
        read=read,
        write=write,
        tensors=decoder_names(
            *("", "token_embd", "output_norm", "blk.#.", {**MODULES, **modules}),
            head="output",
            unused=(FACTORS,),  # read with the positions
        ),
        pairing=pairing,
        also=also,
    )


LOGITS = {"logit_scale": Key("logit_scale")}
ARCHITECTURES: Mapping[str, Layout] = {
    "llama": _layout("llama", "adjacent", BIASES, also=("mistral", "ministral")),
    "qwen2": _layout("qwen2", "halves", ("qkv_bias",)),
    "qwen3": _layout("qwen3", "halves"),
    "smollm3": _layout("smollm3", "adjacent", by_layer=_without_positions),
    "ernie4_5": _layout("ernie4_5", "adjacent"),
    "seed_oss": _layout(
        *("seed_oss", "halves", ("qkv_bias",)), modules={"post_attention_layernorm": "post_attention_norm"}
    ),
    "command-r": _layout(*("command-r", "adjacent"), family="cohere", eps=LAYER, numbers=LOGITS, tied=True),
    "cohere2": _layout(
        *("cohere2", "adjacent"), eps=LAYER, numbers=LOGITS, tied=True, by_layer=_without_windows
    ),
}


def names_in(file: GGUF) -> TensorNames:
    """How the tensors of a file of a known architecture are named."""
    return ARCHITECTURES[str(file.metadata["general.architecture"])].tensors


def read_spec(file: GGUF, numbers: LazyTensors) -> ModelSpec:
    """The spec that a file describes; `numbers` are its tensors, unpacked.

    Raises CheckpointError for one of several parts, or without an embedding, and, naming key and value, for an
    architecture that is unknown, keys that are missing, unknown or of another type, and values that contradict each
    other."""
    metadata, path = file.metadata, file.path
    if metadata.get(PARTS, 1) not in (0, 1):
        raise CheckpointError(
            f"{path} is one of {metadata[PARTS]} parts; join them first: llama-gguf-split --merge FIRST OUT"
        )
    if EMBEDDING not in numbers or len(numbers.forms[EMBEDDING].shape) != 2:
        raise CheckpointError(
            f"{path} has no matrix {EMBEDDING}: it is no language model, or a vocabulary alone"
        )
    name, vocab = metadata.get("general.architecture"), numbers.forms[EMBEDDING].shape[0]
    name = str(name)[:80]
    check_known(name, ARCHITECTURES, f"{path}: there is no general.architecture", error=CheckpointError)
    layout, size = ARCHITECTURES[name], f"{name}.{SIZES['vocab']}"
    there = {field: BIASES[field] in numbers for field in BIASES.keys() & layout.keys.keys()}
    metadata = {key: decimal(value) if isinstance(value, float) else value for key, value in metadata.items()}
    config = {
        size: vocab,
        "tied": OUTPUT not in numbers,
        FACTORS: numbers.get(FACTORS),
        **there,
        **_below(metadata, f"{name}."),
    }
    facts = {key.removeprefix(f"{OURS}."): value for key, value in _below(metadata, f"{OURS}.").items()}
    with reading(path):
        if config[size] != vocab:
            raise ConfigError(f"{size} is {config[size]}, but {EMBEDDING} has {vocab} rows")
        return _spec(layout, config, own_facts({OURS: facts}, FACTS))


def _below(metadata: Mapping[str, Value], beginning: str) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key.startswith(beginning)}


def _spec(layout: Layout, config: Mapping[str, Any], facts: Mapping[str, Any]) -> ModelSpec:
    spec = layout.spec(config)
    windowed = any(pattern != Causal() for pattern in spec.patterns)
    family = WINDOWED.get(layout.family, spec.family) if windowed else spec.family
    return replace(spec, **{"family": family, **facts})


def architecture_of(spec: ModelSpec) -> str:
    """The architecture that a spec is written as. Raises ConfigError for a family that has none."""
    known = {family: name for name, one in ARCHITECTURES.items() for family in (one.family, *one.also)}
    if spec.family not in known:
        raise ConfigError(f"a {spec.family} has no architecture in GGUF here; written are {', '.join(known)}")
    return known[spec.family]


def write_spec(spec: ModelSpec) -> tuple[dict[str, Any], Tensor | None]:
    """The keys of a spec, whose positions must have the pairing of its architecture, and the divisors of its rotary
    frequencies; reading them again gives the spec.

    Raises ConfigError, naming the fields, for a spec that the keys cannot express."""
    name = architecture_of(spec)
    layout = ARCHITECTURES[name]
    try:
        config = layout.config(spec)
    except Inexpressible as error:
        raise ConfigError(f"GGUF's {name} cannot express the {error} of this {spec.family}") from error
    keys = _below(config, f"{name}.")
    stored = {key: _given_back(value) for key, value in config.items()}
    with reading(Path("the file")):
        back = _spec(layout, stored, {})
    facts = {field: getattr(spec, field) for field in differing(spec, back) if field in FACTS}
    lost = differing(spec, replace(back, **{field: _given_back(value) for field, value in facts.items()}))
    if lost:
        raise ConfigError(f"GGUF's {name} cannot express the {', '.join(lost)} of this {spec.family}")
    return {
        "general.architecture": name,
        **keys,
        **{f"{OURS}.{field}": value for field, value in facts.items()},
    }, config[FACTORS]


def _given_back(value: Any) -> Any:
    """A value as it is read from a file."""
    return decimal(rounded(value)) if isinstance(value, float) else value
