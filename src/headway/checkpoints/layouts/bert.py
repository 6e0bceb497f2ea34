"""BERT as `transformers` stores it (Devlin et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.checkpoints.given import Given
from headway.checkpoints.layouts.base import Layout, Rule, label_keys, labels, layered, same, sublayers
from headway.models import Head, ModelSpec
from headway.positions import Learned

ACTS = {"gelu": "gelu", "gelu_new": "gelu_pytorch_tanh", "relu": "relu", "silu": "silu", "swish": "silu",
        "gelu_pytorch_tanh": "gelu_pytorch_tanh"}  # fmt: skip
WB = ("weight", "bias")
MODULES = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.o_proj": "attention.output.dense",
    "input_layernorm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "post_attention_layernorm": "output.LayerNorm",
}
TRANSLATED = (
    *(
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "hidden_act",
    ),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings", "type_vocab_size"),
    *("initializer_range", "layer_norm_eps", "tie_word_embeddings"),
)
ONLY = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "classifier_dropout": (None,),
    "gradient_checkpointing": (False, None),
    "pruned_heads": ({}, None),
    "is_encoder_decoder": (False, None),
}
POOLER = (
    "directionality",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
)
"""Keys of published Chinese checkpoints, which transformers reads in no class."""
RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Names of norms in files that were made from TensorFlow's."""
DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
}


def read_encoder(
    given: Given, kind: str, *, dense: str = "tanh", masked: str | None = None
) -> dict[str, Any]:
    """The fields that all encoders of BERT's kind share; `dense` is the activation in front of a classifier, `masked`
    that of the masked-lm head, hidden_act unless given."""
    act = ACTS.get(given.text("hidden_act"), given.text("hidden_act"))
    tied = kind == "masked-lm" and given.flag("tie_word_embeddings")
    heads = {
        "masked-lm": lambda: Head("masked-lm", dense=masked or act),
        "classify": lambda: Head("classify", labels=labels(given), dense=dense),
        "tag": lambda: Head("tag", labels=labels(given)),
        "answer": lambda: Head("answer"),
        "states": lambda: Head("states"),
    }
    return {
        "vocab": given.whole("vocab_size"),
        "width": given.whole("hidden_size"),
        "layers": given.whole("num_hidden_layers"),
        "heads": given.whole("num_attention_heads"),
        "kv_heads": given.whole("num_attention_heads"),
        "hidden": given.whole("intermediate_size"),
        "activation": act,
        "dropout": given.number("hidden_dropout_prob"),
        "attention_dropout": given.number("attention_probs_dropout_prob"),
        "token_types": given.whole("type_vocab_size"),
        "norm_eps": given.number("layer_norm_eps"),
        "init_std": given.number("initializer_range"),
        "tied": tied,
        "output_bias": kind == "masked-lm",
        "head": heads[kind](),
    }


def write_encoder(spec: ModelSpec) -> dict[str, Any]:
    """The keys that `read_encoder` reads."""
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "intermediate_size": spec.hidden,
        "hidden_act": {v: k for k, v in reversed(ACTS.items())}.get(spec.activation, spec.activation),
        "hidden_dropout_prob": spec.dropout,
        "attention_probs_dropout_prob": spec.attention_dropout,
        "type_vocab_size": spec.token_types,
        "layer_norm_eps": spec.norm_eps,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied or spec.head.task != "masked-lm",
        **label_keys(spec.head),
    }


def _read(given: Given, kind: str) -> dict[str, Any]:
    size = given.whole("max_position_embeddings")
    return {**read_encoder(given, kind), "positions": Learned(size), "trained_context": size}


def _write(spec: ModelSpec) -> dict[str, Any]:
    size = spec.positions.size if isinstance(spec.positions, Learned) else spec.trained_context
    return {**write_encoder(spec), "max_position_embeddings": size}


def stack_rules(spec: ModelSpec, prefix: str, more: dict[str, str] | None = None) -> list[Rule]:
    """Embeddings and layers, named alike in BERT, RoBERTa, RoFormer and Longformer."""
    rules = [
        same("model.embed_tokens.weight", f"{prefix}embeddings.word_embeddings.weight"),
        same("model.embed_types.weight", f"{prefix}embeddings.token_type_embeddings.weight"),
        *sublayers("model.", f"{prefix}embeddings.", {"embed_norm": "LayerNorm"}, WB),
        *sublayers("model.layers.#.", f"{prefix}encoder.layer.#.", {**MODULES, **(more or {})}, WB),
    ]
    if isinstance(spec.positions, Learned):
        rules.append(same("model.embed_positions.weight", f"{prefix}embeddings.position_embeddings.weight"))
    return layered(rules, spec.layers)


def masked_rules(spec: ModelSpec, names: dict[str, str]) -> list[Rule]:
    """The masked-lm head: `names` says where dense, norm, bias and out stand."""
    rules = sublayers("head.", "", {"dense": names["dense"], "norm": names["norm"]}, WB)
    if spec.tied:
        return [*rules, same("head.out.bias", names["bias"])]
    # transformers then has two biases, and adds the one of the matrix
    return [*rules, *sublayers("head.", "", {"out": names["out"].removesuffix(".weight")}, WB)]


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    rules = stack_rules(spec, "bert.")
    if spec.head.task == "masked-lm":
        top = "cls.predictions."
        names = {"dense": f"{top}transform.dense", "norm": f"{top}transform.LayerNorm", "bias": f"{top}bias"}
        return [*rules, *masked_rules(spec, {**names, "out": f"{top}decoder.weight"})]
    if spec.head.dense is not None:
        rules += sublayers("head.", "", {"dense": "bert.pooler.dense"}, WB)
    out = "qa_outputs" if spec.head.task == "answer" else "classifier"
    return rules + (sublayers("head.", "", {"out": out}, WB) if spec.head.outputs else [])


BERT = Layout(
    family="bert",
    architectures={
        "BertForMaskedLM": "masked-lm",
        "BertForPreTraining": "masked-lm",
        "BertForSequenceClassification": "classify",
        "BertForTokenClassification": "tag",
        "BertForQuestionAnswering": "answer",
        "BertModel": "states",
    },
    translated=TRANSLATED,
    only=ONLY,
    harmless=POOLER,
    defaults=DEFAULTS,
    read=_read,
    write=_write,
    rules=_rules,
    prefix="bert.",
    aliases={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    renamed=RENAMED,
    unused=("cls.seq_relationship.", "bert.pooler.", "embeddings.position_ids"),
    heads=("cls.", "classifier.", "qa_outputs."),
)
