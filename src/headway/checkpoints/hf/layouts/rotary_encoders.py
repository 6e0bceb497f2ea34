"""Jina's third embedder, NomicBERT and EuroBERT as `transformers` stores them: encoders with rotary positions in halves
(Sturua et al. 2024; Nussbaum et al. 2024; Boizard et al. 2025)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headway.checkpoints.hf.config_keys import SIZES, ConfigReader, Key, per_head, same_heads
from headway.checkpoints.hf.layouts.encoders import (
    CLASSES,
    KEYS,
    LM_HEAD,
    encoder_layout,
    labels,
    read_encoder,
    write_encoder,
)
from headway.errors import ConfigError
from headway.models import Head, ModelSpec

NORMS = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"}
FUSED: dict[str, Any] = {"layer": "encoder.layers.#.", "stack": {"embed_norm": "emb_ln"}, "split": True}
"""Names in the published files of Jina and Nomic, which transformers reads and writes."""
LLAMA = (
    *(f"self_attn.{letter}_proj" for letter in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    *NORMS,
)


def _theta(
    usual: float, read: Callable[[ConfigReader, str], dict[str, Any]]
) -> Callable[[ConfigReader, str, Mapping[str, Any]], dict[str, Any]]:
    """`read`, and the rotation, whose base is the family's usual one where no key gives another."""

    def all_of_it(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        places = [given.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
        said = given.get("rope_theta") is not None or any("rope_theta" in place for place in places)
        positions = fields["positions"] if said else replace(fields["positions"], theta=usual)
        return {**read(given, kind), "positions": positions}

    return all_of_it


JINA = encoder_layout(
    *("jina_embeddings_v3", "JinaEmbeddingsV3"),
    _theta(20000.0, lambda given, kind: read_encoder(given, kind, masked="gelu")),
    write_encoder,
    LM_HEAD,
    classifier={"dense": "classifier.dense", "out": "classifier.out_proj"},
    base="roberta",
    modules={
        **NORMS,
        "self_attn.qkv_proj": "mixer.Wqkv",
        "self_attn.o_proj": "mixer.out_proj",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
    },
    **FUSED,
    keys={**KEYS, "token_types": Key("type_vocab_size", 1), "norm_eps": Key("layer_norm_eps", 1e-5)},
    only={"classifier_dropout": (None,)},
    more={"tie_word_embeddings": True},
    harmless=(),
    rope="",
)
NOMIC_BERT = encoder_layout(
    *("nomic_bert", "NomicBert"),
    _theta(1000.0, read_encoder),
    lambda spec: {**write_encoder(spec), "pad_token_id": 0},  # transformers insists on one
    {
        "dense": "cls.predictions.transform.dense",
        "norm": "cls.predictions.transform.layer_norm",
        "out": "cls.predictions.decoder",
    },
    classifier={"dense": "nomic_bert.pooler.dense", "out": "classifier"},
    modules={
        **NORMS,
        "self_attn.qkv_proj": "attn.Wqkv",
        "self_attn.o_proj": "attn.out_proj",
        "mlp.up_proj": "mlp.fc11",
        "mlp.gate_proj": "mlp.fc12",
        "mlp.down_proj": "mlp.fc2",
    },
    **FUSED,
    keys={
        **KEYS,
        "head_dim": Key("head_dim", per_head),
        "activation": Key("hidden_act", "silu"),
        "dropout": Key("hidden_dropout_prob", 0.0),
        "attention_dropout": Key("attention_probs_dropout_prob", 0.0),
    },
    architectures={f"NomicBert{ending}": kind for ending, kind in CLASSES.items() if kind != "answer"},
    only={"classifier_dropout": (None,)},
    more={"tie_word_embeddings": True},
    harmless=(),
    rope="",
    pooler={},
)

POOLS = {"bos": "first", "mean": "mean"}


def _read_eurobert(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for a classifier that pools its logits ("late")."""
    head: dict[str, Any] = {"task": kind}
    if kind == "classify":
        pool = given.text("classifier_pooling")
        if pool not in POOLS:
            raise ConfigError(
                f'config.json: "classifier_pooling" is {pool!r}: the mean of every token\'s logits is unsupported; '
                f"accepted is {' or '.join(map(repr, POOLS))}"
            )
        head |= {"dense": "gelu", "pool": POOLS[pool]}
    if kind in ("classify", "tag"):
        head["labels"] = labels(given)
    return {"tied": kind == "masked-lm" and given.flag("tie_word_embeddings"), "head": Head(**head)}


def _write_eurobert(spec: ModelSpec) -> dict[str, Any]:
    said = {pool: name for name, pool in POOLS.items()}
    return {
        **write_encoder(spec),
        "tie_word_embeddings": spec.tied,
        "classifier_pooling": said.get(spec.head.pool, "bos"),
    }


EUROBERT = encoder_layout(
    *("eurobert", "EuroBert", _read_eurobert, _write_eurobert, {"out": "lm_head"}),
    classifier={"dense": "dense", "out": "classifier"},
    base="model",
    layer="layers.#.",
    modules={name: name for name in LLAMA},
    stack={"embed_tokens": "embed_tokens", "norm": "norm"},
    keys={
        **SIZES,
        "kv_heads": Key("num_key_value_heads", same_heads),
        "head_dim": Key("head_dim", per_head),
        "activation": Key("hidden_act", "silu"),
        "attention_dropout": Key("attention_dropout", 0.0),
        "norm_eps": Key("rms_norm_eps", 1e-5),
    },
    architectures={f"EuroBert{ending}": kind for ending, kind in CLASSES.items() if kind != "answer"},
    only={"attention_bias": (False, None), "mlp_bias": (False, None)},
    more={"tie_word_embeddings": False, "classifier_pooling": "late"},
    harmless=("mask_token_id",),
    unused=(),
    rope="",
    pooler={},
)
