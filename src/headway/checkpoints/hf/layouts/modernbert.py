"""Encoders with rotary positions in halves, as `transformers` stores them: Jina's third embedder, NomicBERT, EuroBERT
and ModernBERT (Sturua et al. 2024; Nussbaum et al. 2024; Boizard et al. 2025; Warner et al. 2024).

ModernBERT also has the norms and gates of newer decoders, a window in two of three layers, and no norm before its
first layer, whose input is the normalized embedding. A decoder differs only in its attention patterns (Weller et al.
2025).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.checkpoints.hf.config_keys import (
    SIZES,
    ConfigReader,
    Inexpressible,
    Key,
    activation,
    per_head,
    same_heads,
)
from headway.checkpoints.hf.harmless import words
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.layouts.encoders import (
    CLASSES,
    KEYS,
    LM_HEAD,
    encoder_layout,
    head_names,
    labels,
    write_encoder,
)
from headway.checkpoints.hf.layouts.rules import OWN_BLOCK, block
from headway.checkpoints.hf.windows import (
    FULL,
    SLIDING,
    every,
    from_foreign,
    read_kinds,
    read_rope_by_kind,
    write_rope_by_kind,
)
from headway.errors import ConfigError
from headway.models import Head, ModelSpec
from headway.patterns import Causal, Full, Pattern
from headway.patterns.program import interval

PUBLISHED: dict[str, Any] = {
    "layer": "encoder.layers.#.",
    "stack": {"embed_norm": "emb_ln"},
    "split": True,
    "only": {"classifier_dropout": (None,)},
    "harmless": (),
    "rope": "",
}
"""Names in the published files of Jina and Nomic, which transformers reads and writes, and keys of both."""
WITHOUT_ANSWERS = {ending: kind for ending, kind in CLASSES.items() if kind != "answer"}


def _base(usual: float) -> Part:
    """Returns the part that sets the rotary base to the family's `usual` one unless the config states another."""

    def read(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        sections = [config.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
        stated = config.get("rope_theta") is not None or any("rope_theta" in section for section in sections)
        return {} if stated else {"positions": replace(fields["positions"], theta=usual)}

    return Part(read=read)


JINA = encoder_layout(
    *("jina_embeddings_v3", "JinaEmbeddingsV3", LM_HEAD, head_names("classifier. dense out_proj")),
    **PUBLISHED,
    activations=("gelu", "tanh"),
    base="roberta",
    modules=block("norm1 norm2", "mixer. Wqkv out_proj", "mlp. fc1 fc2"),
    keys={**KEYS, "token_types": Key("type_vocab_size", 1), "norm_eps": Key("layer_norm_eps", 1e-5)},
    parts=(_base(20000.0),),
)
NOMIC_BERT = encoder_layout(
    *("nomic_bert", "NomicBert", head_names("cls.predictions. transform.dense transform.layer_norm decoder")),
    head_names("nomic_bert.pooler.dense classifier"),
    **PUBLISHED,
    classes=WITHOUT_ANSWERS,
    modules=block("norm1 norm2", "attn. Wqkv out_proj", "mlp. fc12 fc11 fc2"),
    keys={
        **KEYS,
        "head_dim": Key("head_dim", per_head),
        "activation": Key("hidden_act", "silu"),
        "dropout": Key("hidden_dropout_prob", 0.0),
        "attention_dropout": Key("attention_probs_dropout_prob", 0.0),
    },
    parts=(_base(1000.0), Part(write=lambda spec: {"pad_token_id": 0})),  # transformers requires the id
    pooler={},
)

POOLS = {"bos": "first", "mean": "mean"}


def _read_eurobert(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the head. Raises ConfigError for a classifier that pools its logits ("late")."""
    kind = config.task
    head: dict[str, Any] = {"task": kind}
    if kind == "classify":
        pool = config.text("classifier_pooling")
        if pool not in POOLS:
            raise ConfigError(
                f'config.json: "classifier_pooling" is {pool!r}: the mean of every token\'s logits is unsupported; '
                f"accepted is {' or '.join(map(repr, POOLS))}"
            )
        head |= {"dense": "gelu", "pool": POOLS[pool]}
    if kind in ("classify", "tag"):
        head["labels"] = labels(config)
    return {"tied": kind == "masked-lm" and config.flag("tie_word_embeddings"), "head": Head(**head)}


def _write_eurobert(spec: ModelSpec) -> dict[str, Any]:
    names = {pool: name for name, pool in POOLS.items()}
    return {
        **write_encoder(spec),
        "tie_word_embeddings": spec.tied,
        "classifier_pooling": names.get(spec.head.pool, "bos"),
    }


EUROBERT = encoder_layout(
    *("eurobert", "EuroBert", head_names("lm_head"), head_names("dense classifier")),
    classes=WITHOUT_ANSWERS,
    head=Part({"tie_word_embeddings": False, "classifier_pooling": "late"}, _read_eurobert, _write_eurobert),
    base="model",
    layer="layers.#.",
    modules=OWN_BLOCK,
    stack={"embed_tokens": "embed_tokens", "norm": "norm"},
    keys={
        **SIZES,
        "kv_heads": Key("num_key_value_heads", same_heads),
        "head_dim": Key("head_dim", per_head),
        "activation": Key("hidden_act", "silu"),
        "attention_dropout": Key("attention_dropout", 0.0),
        "norm_eps": Key("rms_norm_eps", 1e-5),
    },
    only={"attention_bias": (False, None), "mlp_bias": (False, None)},
    harmless=("mask_token_id",),
    unused=(),
    rope="",
    pooler={},
)


BASES = {FULL: ("global_rope_theta", 1.6e5), SLIDING: ("local_rope_theta", 1e4)}
PERIOD = "global_attn_every_n_layers"


def _read(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    kinds, task = read_kinds(config, fields["layers"], every(3, key=PERIOD)), config.task
    sides, words = config.whole("local_attention"), task in ("lm", "masked-lm")
    full: Pattern = Causal() if task == "lm" else Full()
    name, width = ("sliding_window", sides // 2) if task == "lm" else ("attention_window", sides)
    window = from_foreign(name, width)
    head: dict[str, Any] = {"task": task}
    if words:
        head |= {"dense": activation(config, "classifier_activation"), "bias": config.flag("classifier_bias")}
    return {
        "patterns": tuple(window if kind == SLIDING else full for kind in kinds),
        **read_rope_by_kind(config, kinds, fields["width"] // fields["heads"], BASES),
        "head": Head(**head),
        "tied": words and config.flag("tie_word_embeddings"),
        "output_bias": words and config.flag("decoder_bias"),
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    intervals = [interval(pattern) for pattern in spec.patterns]
    kinds = [FULL if sides is not None and sides[0] is None else SLIDING for sides in intervals]
    widths = {sides for sides, kind in zip(intervals, kinds, strict=True) if kind == SLIDING}
    if len(widths) > 1:
        raise Inexpressible("windows")
    before = next((sides[0] for sides in widths if sides is not None), 64)
    before = before if before is None else before + spec.causal  # a decoder's window counts the token itself
    return {
        **write_rope_by_kind(spec, kinds, BASES),
        "layer_types": kinds,
        "local_attention": 2 * (before or 0),
        "classifier_activation": spec.head.dense or "gelu",
        "classifier_bias": spec.head.dense is not None and spec.head.bias,
        "decoder_bias": spec.output_bias or not spec.head.needs_vocab,
        "tie_word_embeddings": spec.tied or not spec.head.needs_vocab,
    }


USUAL = {
    "max_position_embeddings": 8192,
    "local_attention": 128,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "decoder_bias": True,
    "tie_word_embeddings": True,
    **dict.fromkeys(("layer_types", "rope_parameters", "rope_scaling", PERIOD)),
    **dict.fromkeys(key for key, _ in BASES.values()),
}
MODERN: dict[str, Any] = {
    "base": "model",
    "layer": "layers.#.",
    "stack": {
        "embed_tokens": "embeddings.tok_embeddings",
        "embed_norm": "embeddings.norm",
        "norm": "final_norm",
    },
    "unused": (),
    "pooler": {},
    "head": Part(USUAL, _read, _write),
    "keys": {
        **SIZES,
        "activation": Key("hidden_activation", "gelu"),
        "norm_eps": Key("norm_eps", 1e-5),
        "norm_bias": Key("norm_bias"),
        **dict.fromkeys(("qkv_bias", "out_bias"), Key("attention_bias")),
        "mlp_bias": Key("mlp_bias"),
        "activation_dropout": Key("mlp_dropout", 0.0),
    },
}
"""Arguments that the layouts of ModernBERT and of its decoder share."""
ONLY = {
    **dict.fromkeys(("attention_dropout", "embedding_dropout"), (0.0, None)),
    "position_embedding_type": ("absolute", None),
    "sparse_prediction": (False, None),
}
# keys of text classifiers, of kernels, and of initialization
HARMLESS = words(
    "classifier_pooling classifier_dropout sparse_pred_ignore_index cls_token_id deterministic_flash_attn "
    "reference_compile repad_logits_with_grad initializer_cutoff_factor layer_norm_eps"
)
FORWARD = {"mlp.down_proj": "mlp.Wo", "mlp.gate_up_proj": "mlp.Wi"}
MODERNBERT = encoder_layout(
    *("modernbert", "ModernBert", head_names("head.dense head.norm decoder"), head_names("classifier")),
    **MODERN,
    classes={"ForMaskedLM": "masked-lm", "Model": "states"},
    modules={**block("attn_norm mlp_norm", "attn. Wqkv Wo", ""), **FORWARD},
    only=ONLY,
    harmless=HARMLESS,
)
MODERNBERT_DECODER = encoder_layout(
    *("modernbert-decoder", "ModernBertDecoder"),
    *(head_names("lm_head.dense lm_head.norm decoder"), head_names("classifier")),
    **MODERN,
    classes={"ForCausalLM": "lm"},
    modules={**block("attn_norm mlp_norm", "attn. q_proj k_proj v_proj Wo", ""), **FORWARD},
    only={**ONLY, "causal_mask": (True, None), "is_causal": (True, None)},
    harmless=(*HARMLESS, "sliding_window"),  # half of local_attention
    ids=("bos_token_id", "pad_token_id"),
)
