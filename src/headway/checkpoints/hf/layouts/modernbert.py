"""ModernBERT as `transformers` stores it (Warner et al. 2024): an encoder with the norms, rotations and gates of newer
decoders, a window in two layers of three, and no norm in front of its first layer, whose embedding is normed; and the
decoder that is the same but for what its layers see (Weller et al. 2025)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.checkpoints.hf.config_keys import SIZES, ConfigReader, Inexpressible, Key, activation
from headway.checkpoints.hf.harmless import words
from headway.checkpoints.hf.layer_types import (
    FULL,
    SLIDING,
    every,
    read_kinds,
    read_rope_by_kind,
    write_rope_by_kind,
)
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.rules import Rule, TensorNames, block, module_rules, same_names, within
from headway.checkpoints.hf.windows import from_foreign
from headway.models import Head, ModelSpec
from headway.patterns import Causal, Full, Pattern
from headway.patterns.program import interval

BASES = {FULL: ("global_rope_theta", 1.6e5), SLIDING: ("local_rope_theta", 1e4)}
PERIOD = "global_attn_every_n_layers"
TOP = {
    "model.embed_tokens": "model.embeddings.tok_embeddings",
    "model.embed_norm": "model.embeddings.norm",
    "model.norm": "model.final_norm",
    "head.out": "decoder",
    "lm_head": "decoder",
}


def _rules(spec: ModelSpec) -> list[Rule]:
    parts = "q_proj k_proj v_proj" if spec.causal else "Wqkv"
    modules = block("attn_norm mlp_norm", f"attn. {parts} Wo", "")
    head = "lm_head" if spec.causal else "head"
    top = {**TOP, **within("head.", f"{head}.", same_names("dense", "norm"))}
    layer = "model.layers.#."
    modules |= {"mlp.down_proj": "mlp.Wo", "mlp.gate_up_proj": "mlp.Wi"}
    return module_rules(spec, {**top, **within(layer, layer, modules)})


def _read(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    kinds = read_kinds(given, fields["layers"], every(given.whole(PERIOD, 3)))
    sides, words = given.whole("local_attention"), kind in ("lm", "masked-lm")
    full: Pattern = Causal() if kind == "lm" else Full()
    name, width = ("sliding_window", sides // 2) if kind == "lm" else ("attention_window", sides)
    window = from_foreign(name, width)
    head: dict[str, Any] = {"task": kind}
    if words:
        head |= {"dense": activation(given, "classifier_activation"), "bias": given.flag("classifier_bias")}
    return {
        "patterns": tuple(window if kind == SLIDING else full for kind in kinds),
        **read_rope_by_kind(given, kinds, fields["width"] // fields["heads"], BASES),
        "head": Head(**head),
        "tied": words and given.flag("tie_word_embeddings"),
        "output_bias": words and given.flag("decoder_bias"),
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    each = [interval(pattern) for pattern in spec.patterns]
    kinds = [FULL if sides is not None and sides[0] is None else SLIDING for sides in each]
    widths = {sides for sides, kind in zip(each, kinds, strict=True) if kind == SLIDING}
    if len(widths) > 1:
        raise Inexpressible("windows")
    before = next((sides[0] for sides in widths if sides is not None), 64)
    before = before if before is None else before + spec.causal  # counts the token itself, there
    return {
        **write_rope_by_kind(spec, kinds, BASES),
        "layer_types": kinds,
        "local_attention": 2 * (before or 0),
        "classifier_activation": spec.head.dense or "gelu",
        "classifier_bias": spec.head.dense is not None and spec.head.bias,
        "decoder_bias": spec.output_bias or not spec.head.needs_vocab,
        "tie_word_embeddings": spec.tied or not spec.head.needs_vocab,
    }


MODERNBERT = Layout(
    family="modernbert",
    architectures={"ModernBertForMaskedLM": "masked-lm", "ModernBertModel": "states"},
    keys={
        **SIZES,
        "activation": Key("hidden_activation", "gelu"),
        "norm_eps": Key("norm_eps", 1e-5),
        "norm_bias": Key("norm_bias"),
        **dict.fromkeys(("qkv_bias", "out_bias"), Key("attention_bias")),
        "mlp_bias": Key("mlp_bias"),
        "activation_dropout": Key("mlp_dropout", 0.0),
    },
    more={
        "max_position_embeddings": 8192,
        "local_attention": 128,
        "classifier_activation": "gelu",
        "classifier_bias": False,
        "decoder_bias": True,
        "tie_word_embeddings": True,
        **dict.fromkeys(("layer_types", "rope_parameters", "rope_scaling", PERIOD)),
        **dict.fromkeys(key for key, _ in BASES.values()),
    },
    only={
        **dict.fromkeys(("attention_dropout", "embedding_dropout"), (0.0, None)),
        "position_embedding_type": ("absolute", None),
        "sparse_prediction": (False, None),
    },
    # of classifiers of texts, of kernels, of fresh weights
    harmless=words(
        "classifier_pooling classifier_dropout sparse_pred_ignore_index cls_token_id deterministic_flash_attn "
        "reference_compile repad_logits_with_grad initializer_cutoff_factor layer_norm_eps"
    ),
    read=_read,
    write=_write,
    tensors=TensorNames(
        rules=_rules,
        prefix="model.",
        aliases={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
        heads=("head.", "decoder.", "classifier."),
        outputs=dict.fromkeys(("lm", "masked-lm"), "decoder"),
    ),
)
MODERNBERT_DECODER = replace(
    MODERNBERT,
    family="modernbert-decoder",
    architectures={"ModernBertDecoderForCausalLM": "lm"},
    harmless=(*MODERNBERT.harmless, "sliding_window"),  # half of local_attention
    ids=("bos_token_id", "pad_token_id"),
    only={**MODERNBERT.only, "causal_mask": (True, None), "is_causal": (True, None)},
)
