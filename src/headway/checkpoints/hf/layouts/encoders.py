"""What encoders of BERT's kind share, as `transformers` stores them: the stack, and five heads on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from headway.checkpoints.hf.config_keys import SIZES, FieldMap, activation, gelu_new
from headway.checkpoints.hf.config_reader import ConfigReader
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.rules import WB, Rule, TensorNames, same, sublayers
from headway.errors import ConfigError
from headway.models import Head, ModelSpec
from headway.positions import Learned

KEYS: FieldMap = {
    **SIZES,
    "kv_heads": "num_attention_heads",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "token_types": "type_vocab_size",
    "norm_eps": "layer_norm_eps",
}
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
ONLY = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "classifier_dropout": (None,),
    "gradient_checkpointing": (False, None),
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
CLASSES = {
    "ForMaskedLM": "masked-lm",
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "tag",
    "ForQuestionAnswering": "answer",
    "Model": "states",
}
"""How the names of classes end -> the head."""
CLS = {
    "dense": "cls.predictions.transform.dense",
    "norm": "cls.predictions.transform.LayerNorm",
    "out": "cls.predictions.decoder",
    "bias": "cls.predictions.bias",
}
LM_HEAD = {
    "dense": "lm_head.dense",
    "norm": "lm_head.layer_norm",
    "out": "lm_head.decoder",
    "bias": "lm_head.bias",
}
"""Names of the parts of the masked-lm head: in BERT, and in RoBERTa."""


def encoder_layout(
    family: str,
    name: str,
    read: Callable[[ConfigReader, str], dict[str, Any]],
    write: Callable[[ModelSpec], dict[str, Any]],
    rules: Callable[[ModelSpec], Sequence[Rule]],
    masked: Mapping[str, str],
    *,
    unused: Sequence[str] | None = None,
    constants: Callable[[ModelSpec], Mapping[str, Tensor]] = lambda spec: {},
    **own: Any,
) -> Layout:
    """The layout of one of them: `name` is what its classes begin with, `masked` names the parts of its masked-lm head,
    `own` are the fields of `Layout` that differ."""
    usual: dict[str, Any] = {
        "architectures": {f"{name}{ending}": kind for ending, kind in CLASSES.items()},
        "only": ONLY,
        "harmless": POOLER,
        "defaults": DEFAULTS,
    }
    top = masked["bias"].partition(".")[0]
    tensors = TensorNames(
        rules=rules,
        prefix=f"{family}.",
        aliases={
            f"{masked['out']}.weight": f"{family}.embeddings.word_embeddings.weight",
            f"{masked['out']}.bias": masked["bias"],
        },
        renamed=RENAMED,
        unused=(f"{family}.pooler.", "embeddings.position_ids") if unused is None else unused,
        heads=(f"{top}.", "classifier.", "qa_outputs."),
        constants=constants,
    )
    return Layout(family=family, keys=KEYS, read=read, write=write, tensors=tensors, **{**usual, **own})


def read_encoder(
    given: ConfigReader, kind: str, *, dense: str = "tanh", masked: str | None = None
) -> dict[str, Any]:
    """The head of a kind, and what goes with it; `dense` is the activation in front of a classifier, `masked` that of
    the masked-lm head, hidden_act unless given."""
    heads = {
        "masked-lm": lambda: Head("masked-lm", dense=masked or activation(given, "hidden_act")),
        "classify": lambda: Head("classify", labels=labels(given), dense=dense),
        "tag": lambda: Head("tag", labels=labels(given)),
        "answer": lambda: Head("answer"),
        "states": lambda: Head("states"),
    }
    words = kind == "masked-lm"
    return {
        "tied": words and given.flag("tie_word_embeddings"),
        "output_bias": words,
        "head": heads[kind](),
    }


def write_encoder(spec: ModelSpec) -> dict[str, Any]:
    """The keys that `read_encoder` reads."""
    return {
        "hidden_act": gelu_new(spec.activation),
        "tie_word_embeddings": spec.tied or spec.head.task != "masked-lm",
        **label_keys(spec.head),
    }


def read_table(given: ConfigReader, family: str) -> dict[str, Any]:
    """Learned positions that begin behind the row of padding, and the context.

    Raises ConfigError for a padding id that leaves no rows."""
    rows, pad = given.whole("max_position_embeddings"), given.get("pad_token_id")
    if type(pad) is not int or not 0 <= pad < rows - 1:
        raise ConfigError(
            f'config.json: positions of a {family} begin behind row "pad_token_id" of a table of {rows} rows '
            f"(max_position_embeddings), so it must be in 0..{rows - 2}; got {pad!r}"
        )
    size = rows - pad - 1
    return {"positions": Learned(size, offset=pad + 1), "trained_context": size}


def write_table(spec: ModelSpec) -> dict[str, Any]:
    """The keys that `read_table` reads."""
    table = spec.positions if isinstance(spec.positions, Learned) else Learned(spec.trained_context)
    offset = max(table.offset, 1)
    return {"max_position_embeddings": table.size + offset, "pad_token_id": offset - 1}


def labels(given: ConfigReader) -> tuple[str, ...]:
    """Names of the classes by `id2label`, or LABEL_0, ... for `num_labels` (2 unless given), as in transformers."""
    names = given.get("id2label")
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(given.whole("num_labels", 2)))
    if not isinstance(names, Mapping) or {str(k) for k in names} != {str(i) for i in range(len(names))}:
        raise ConfigError(f'config.json: "id2label" must name the classes 0, 1, ..., got {names!r}')
    by_number = {str(key): value for key, value in names.items()}
    return tuple(str(by_number[str(i)]) for i in range(len(names)))


def label_keys(head: Head) -> dict[str, Any]:
    """The config keys of a head's labels."""
    if not head.labels:
        return {}
    return {
        "id2label": {str(i): name for i, name in enumerate(head.labels)},
        "label2id": {name: i for i, name in enumerate(head.labels)},
    }


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
    return rules


def head_rules(spec: ModelSpec, masked: Mapping[str, str], dense: str, *, deep: bool = False) -> list[Rule]:
    """The head: `masked` are the parts of the masked-lm head, `dense` is the layer in front of another; a `deep`
    classifier has that layer itself."""
    head = spec.head
    if head.task == "masked-lm":
        return _masked_rules(spec, masked)
    out = "qa_outputs" if head.task == "answer" else "classifier"
    if deep and head.task == "classify" and head.dense is not None:
        dense, out = "classifier.dense", "classifier.out_proj"
    places = {"dense": dense} if head.dense is not None else {}
    return sublayers("head.", "", {**places, "out": out} if head.outputs else places, WB)


def _masked_rules(spec: ModelSpec, names: Mapping[str, str]) -> list[Rule]:
    rules = sublayers("head.", "", {"dense": names["dense"], "norm": names["norm"]}, WB)
    if spec.tied:
        return [*rules, same("head.out.bias", names["bias"])]
    # transformers then has two biases, and adds the one of the matrix
    return [*rules, *sublayers("head.", "", {"out": names["out"]}, WB)]
