"""Jina's third embedder, NomicBERT and EuroBERT as `transformers` stores them: encoders with rotary positions in halves
(Sturua et al. 2024; Nussbaum et al. 2024; Boizard et al. 2025)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.checkpoints.hf.config_keys import SIZES, ConfigReader, Key, per_head, same_heads
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
from headway.errors import ConfigError
from headway.models import Head, ModelSpec

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
    """The base of the rotation, the family's usual one where no key gives another."""

    def read(given: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        places = [given.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
        stated = given.get("rope_theta") is not None or any("rope_theta" in place for place in places)
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
    parts=(_base(1000.0), Part(write=lambda spec: {"pad_token_id": 0})),  # transformers insists on one
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
    *("eurobert", "EuroBert", head_names("lm_head"), head_names("dense classifier")),
    classes=WITHOUT_ANSWERS,
    read=_read_eurobert,
    write=_write_eurobert,
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
    more={"tie_word_embeddings": False, "classifier_pooling": "late"},
    harmless=("mask_token_id",),
    unused=(),
    rope="",
    pooler={},
)
