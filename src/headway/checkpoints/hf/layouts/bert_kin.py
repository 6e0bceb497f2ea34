"""Megatron's BERT, ERNIE, ELECTRA and DistilBERT as `transformers` stores them: BERT with its norms in front, under
another name, with other heads (Shoeybi et al. 2019; Sun et al. 2019; Clark et al. 2020; Sanh et al. 2019)."""

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import OLD_GELU, ConfigReader, FieldMap, Key
from headway.checkpoints.hf.layouts.bert import read_bert, read_table, write_bert
from headway.checkpoints.hf.layouts.encoders import (
    CLASSES,
    CLS,
    MODULES,
    MORE,
    ONLY,
    POOLER,
    encoder_layout,
    read_encoder,
)
from headway.models import ModelSpec

PRETRAINED = {**CLASSES, "ForPreTraining": "masked-lm"}
SENTENCES = ("cls.seq_relationship.", "bert.pooler.", "embeddings.position_ids")
"""What a class of pretraining has besides."""

MEGATRON_BERT = encoder_layout(
    *("megatron-bert", "MegatronBert", read_bert, write_bert, CLS),
    classifier={"dense": "bert.pooler.dense", "out": "classifier"},
    base="bert",
    modules={**MODULES, "input_layernorm": "attention.ln", "post_attention_layernorm": "ln"},
    stack={"norm": "encoder.ln"},
    architectures={f"MegatronBert{ending}": kind for ending, kind in PRETRAINED.items()},
    unused=SENTENCES,
    decoder="ForCausalLM",
)
ERNIE = encoder_layout(
    *("ernie", "Ernie", read_bert, write_bert, CLS),
    classifier={"dense": "ernie.pooler.dense", "out": "classifier"},
    architectures={f"Ernie{ending}": kind for ending, kind in PRETRAINED.items()},
    only={**ONLY, "use_task_id": (False, None)},
    harmless=(*POOLER, "task_type_vocab_size"),
    unused=(*SENTENCES, "ernie.pooler."),
    decoder="ForCausalLM",
)


def _read_electra(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    width = fields["width"]
    columns = given.whole("embedding_size", width)
    return {
        **read_table(given),
        **read_encoder(given, kind, dense="gelu", masked="gelu"),  # hidden_act does not apply here
        "embedding_width": None if columns == width else columns,
    }


def _write_electra(spec: ModelSpec) -> dict[str, Any]:
    return {**write_bert(spec), "embedding_size": spec.columns}


ELECTRA = encoder_layout(
    *("electra", "Electra", _read_electra, _write_electra),
    {
        "dense": "generator_predictions.dense",
        "norm": "generator_predictions.LayerNorm",
        "out": "generator_lm_head",
    },
    classifier={"dense": "classifier.dense", "out": "classifier.out_proj"},
    # the discriminator, which is what is trained further, without what tells replaced tokens
    architectures={
        f"Electra{ending}": kind for ending, kind in {**CLASSES, "ForPreTraining": "states"}.items()
    },
    more={**MORE, "embedding_size": 128},
    harmless=(*POOLER, "summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout"),
    unused=("discriminator_predictions.", "embeddings.position_ids"),
    decoder="ForCausalLM",
    pooler={},
)

DISTILBERT_KEYS: FieldMap = {
    "vocab": Key("vocab_size"),
    "width": Key("dim"),
    "layers": Key("n_layers"),
    "heads": Key("n_heads"),
    "kv_heads": Key("n_heads"),
    "hidden": Key("hidden_dim"),
    "activation": Key("activation", "gelu", OLD_GELU),
    "dropout": Key("dropout", 0.1),
    "attention_dropout": Key("attention_dropout", 0.1),
    "init_std": Key("initializer_range", 0.02),
}


def _read_distilbert(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **read_table(given),
        **read_encoder(given, kind, dense="relu", masked=fields["activation"]),
    }


DISTILBERT = encoder_layout(
    *("distilbert", "DistilBert", _read_distilbert, write_bert),
    {"dense": "vocab_transform", "norm": "vocab_layer_norm", "out": "vocab_projector"},
    classifier={"dense": "pre_classifier", "out": "classifier"},
    layer="transformer.layer.#.",
    modules={
        **{f"self_attn.{letter}_proj": f"attention.{letter}_lin" for letter in "qkv"},
        "self_attn.o_proj": "attention.out_lin",
        "input_layernorm": "sa_layer_norm",
        "mlp.up_proj": "ffn.lin1",
        "mlp.down_proj": "ffn.lin2",
        "post_attention_layernorm": "output_layer_norm",
    },
    keys=DISTILBERT_KEYS,
    only={"tie_weights_": (True, None)},
    # how the table of positions began; dropout in front of two heads, which is the model's own here
    harmless=("sinusoidal_pos_embds", "seq_classif_dropout", "qa_dropout", "output_past"),
    unused=("embeddings.position_ids",),
    pooler={},
)
