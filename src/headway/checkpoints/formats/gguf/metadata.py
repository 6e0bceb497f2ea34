"""From GGUF's metadata to `ModelSpec` and back: LLaMA and Mistral ("llama"), Qwen2 and Qwen3.

Queries and keys of "llama" lie in adjacent pairs, as in Meta's own files, those of the Qwens in halves. A window in all
layers (Mistral) is the key attention.sliding_window, which llama.cpp does not honour in these architectures: to it all
keys are seen, which is the same for rows of up to that many tokens.
(ggml-org/ggml, docs/gguf.md; ggml-org/llama.cpp, src/llama-model.cpp and convert_hf_to_gguf.py.)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from headway.checkpoints.formats.gguf.keys import Keys
from headway.checkpoints.formats.gguf.rope import read_rope, write_rope
from headway.checkpoints.hf.config_keys import checked_sizes
from headway.checkpoints.hf.layouts import Inexpressible
from headway.checkpoints.hf.layouts.rules import decoder_names
from headway.checkpoints.hf.windows import from_foreign, last_keys_if_any
from headway.errors import CheckpointError, ConfigError, did_you_mean
from headway.models import ModelSpec
from headway.positions import Pairing
from headway.storage.gguf import Value
from headway.storage.reading import naming

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
NAMES = decoder_names(
    "",
    "token_embd",
    "output_norm",
    "blk.#.",
    {
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
    },
    head="output",
    unused=("rope_freqs.weight",),  # read with the positions
)
"""Our tensors' names and theirs."""
QKV_BIAS = {"qkv_bias": "blk.0.attn_q.bias"}


@dataclass(frozen=True)
class Architecture:
    """One `general.architecture`.

    Attributes:
        family: whose defaults it has.
        pairing: of its rotary positions.
        biases: fields of the spec that are on where a tensor is there.
        windowed: the family where there is a window.
        also: families that are written so, too.
    """

    family: str
    pairing: Pairing
    biases: Mapping[str, str] = field(default_factory=dict)
    windowed: str | None = None
    also: tuple[str, ...] = ()


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama",
        "adjacent",
        {**QKV_BIAS, "out_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_gate.bias"},
        windowed="mistral",
        also=("mistral", "ministral"),
    ),
    "qwen2": Architecture("qwen2", "halves", QKV_BIAS),
    "qwen3": Architecture("qwen3", "halves"),
}
SIZES = {
    "layers": "block_count",
    "width": "embedding_length",
    "hidden": "feed_forward_length",
    "heads": "attention.head_count",
    "trained_context": "context_length",
}
KV_HEADS, EPS, WINDOW = (
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
)
HEAD_DIMS = ("attention.key_length", "attention.value_length")
HARMLESS = ("tensor_data_layout",)
OURS = "headway."
FACTS: Mapping[str, type] = {
    "family": str,
    "max_context": int,
    **dict.fromkeys(
        ("dropout", "attention_dropout", "activation_dropout", "final_dropout", "init_std"), float
    ),
}
"""Fields of a spec that GGUF has no key for, which others need not know: under our own name."""


def read_spec(
    metadata: Mapping[str, Value], tensors: Collection[str], vocab: int, factors: Tensor | None, path: Path
) -> ModelSpec:
    """The spec that a file describes, with the names of its tensors, the rows of its embedding, and the divisors of its
    rotary frequencies.

    Raises CheckpointError, naming key and value, for an architecture that is unknown, keys that are missing, unknown or
    of another type, and values that contradict each other."""
    name = Keys(metadata, path, "general.").text("architecture")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture is {name!r}{did_you_mean(name, ARCHITECTURES)}, which is unsupported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    here, keys = ARCHITECTURES[name], Keys(metadata, path, f"{name}.")
    with naming(path):
        try:
            return _read(here, keys, Keys(metadata, path, OURS), tensors, vocab, factors)
        except ConfigError as error:
            raise CheckpointError(str(error).removeprefix("config.json: ")) from error


def _read(
    here: Architecture, keys: Keys, ours: Keys, tensors: Collection[str], vocab: int, factors: Tensor | None
) -> ModelSpec:
    sizes: dict[str, Any] = {field: keys.whole(key) for field, key in SIZES.items()}
    width, heads = sizes["width"], sizes["heads"]
    lengths = {keys.whole(key, width // heads or None) for key in HEAD_DIMS}
    if len(lengths) > 1:
        raise CheckpointError(
            f"keys of {' and '.join(map(str, lengths))} dims and values of others are unsupported"
        )
    head_dim = lengths.pop()
    if keys.whole("vocab_size", vocab) != vocab:
        raise CheckpointError(f"vocab_size is {keys.whole('vocab_size')}, but {EMBEDDING} has {vocab} rows")
    window = keys.maybe_whole(WINDOW)
    given = {
        **checked_sizes(
            {**sizes, "kv_heads": keys.whole(KV_HEADS, heads), "head_dim": head_dim, "vocab": vocab}
        ),
        "norm_eps": keys.number(EPS),
        "patterns": from_foreign("huggingface sliding_window", window),
        "positions": read_rope(keys, head_dim, sizes["trained_context"], here.pairing, factors),
        "tied": OUTPUT not in tensors,
        **{bias: name in tensors for bias, name in here.biases.items()},
    }
    keys.only("attention.causal", True)
    keys.refuse_others(HARMLESS)
    family = here.windowed if window is not None and here.windowed is not None else here.family
    return ModelSpec.of(**{"family": family, **given, **_facts(ours)})


def _facts(keys: Keys) -> dict[str, Any]:
    read: Mapping[type, Callable[[str], Any]] = {str: keys.text, int: keys.whole, float: keys.number}
    found = {name: read[kind](name) for name, kind in FACTS.items() if keys.get(name) is not None}
    keys.refuse_others()
    return found


def architecture_of(spec: ModelSpec) -> str:
    """The architecture that a spec is written as. Raises ConfigError for a family that has none."""
    for name, one in ARCHITECTURES.items():
        if spec.family in (one.family, *one.also):
            return name
    known = [family for one in ARCHITECTURES.values() for family in (one.family, *one.also)]
    raise ConfigError(f"a {spec.family} has no architecture in GGUF here; written are {', '.join(known)}")


def write_spec(spec: ModelSpec) -> tuple[dict[str, Any], Tensor | None]:
    """The keys of a spec, whose positions must have the pairing of its architecture, and the divisors of its rotary
    frequencies; reading them again gives the spec.

    Raises ConfigError, naming the fields, for a spec that the keys cannot express."""
    name = architecture_of(spec)
    here = ARCHITECTURES[name]
    try:
        keys, factors = _keys(spec)
    except Inexpressible as error:
        raise ConfigError(f"GGUF's {name} cannot express the {error} of this {spec.family}") from error
    metadata: dict[str, Any] = {
        "general.architecture": name,
        **{f"{name}.{key}": value for key, value in keys.items()},
    }
    tensors = {bias for field, bias in here.biases.items() if getattr(spec, field)} | (
        set() if spec.tied else {OUTPUT}
    )

    def differing() -> list[str]:
        rounded = {key: _rounded(value) for key, value in metadata.items()}
        back = read_spec(rounded, tensors, spec.vocab, factors, Path("the file"))
        return [
            f.name for f in fields(ModelSpec) if f.init and getattr(spec, f.name) != getattr(back, f.name)
        ]

    metadata |= {f"{OURS}{name}": getattr(spec, name) for name in differing() if name in FACTS}
    if lost := differing():
        raise ConfigError(f"GGUF's {name} cannot express the {', '.join(lost)} of this {spec.family}")
    return metadata, factors


def _keys(spec: ModelSpec) -> tuple[dict[str, Any], Tensor | None]:
    """The keys below the architecture's name, and the divisors."""
    windows = {last_keys_if_any(pattern) for pattern in spec.patterns}
    if len(windows) > 1:
        raise Inexpressible("windows")
    window = windows.pop()
    rope, factors = write_rope(spec)
    return {
        **{key: getattr(spec, field) for field, key in SIZES.items()},
        KV_HEADS: spec.kv_heads,
        **dict.fromkeys(HEAD_DIMS, spec.head_dim),
        "vocab_size": spec.vocab,
        EPS: spec.norm_eps,
        **({} if window is None else {WINDOW: window}),
        **rope,
    }, factors


def _rounded(value: Any) -> Any:
    """A number as a file of 32-bit ones gives it back."""
    return struct.unpack("<f", struct.pack("<f", value))[0] if isinstance(value, float) else value
