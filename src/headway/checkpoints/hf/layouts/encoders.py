"""Shared by the layouts of BERT-like encoders in `transformers`: the stack, and five heads on it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from headway.checkpoints.hf.config_keys import OLD_GELU, SIZES, ConfigReader, FieldMap, Key
from headway.checkpoints.hf.harmless import words
from headway.checkpoints.hf.layouts.base import Layout, Part
from headway.checkpoints.hf.layouts.rules import Modules, Rule, TensorNames, block, module_rules, within
from headway.errors import ConfigError
from headway.models import Head, ModelSpec
from headway.patterns import Causal

KEYS: FieldMap = {
    **SIZES,
    "activation": Key("hidden_act", "gelu", OLD_GELU),
    "dropout": Key("hidden_dropout_prob", 0.1),
    "attention_dropout": Key("attention_probs_dropout_prob", 0.1),
    "token_types": Key("type_vocab_size", 2),
    "norm_eps": Key("layer_norm_eps", 1e-12),
}
STACK = {
    "embed_tokens": "embeddings.word_embeddings",
    "embed_types": "embeddings.token_type_embeddings",
    "embed_positions": "embeddings.position_embeddings",
    "embed_norm": "embeddings.LayerNorm",
    "embed_proj": "embeddings_project",
}
"""Modules outside of the layers."""
MODULES = block(
    "attention.output.LayerNorm output.LayerNorm",
    "attention. self.query self.key self.value output.dense",
    "intermediate.dense output.dense",
)
ONLY = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "classifier_dropout": (None,),
}
POOLER = words(
    "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type"
)
"""Keys of published Chinese checkpoints, which no class of transformers reads."""
RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Names of norms in files that were converted from TensorFlow's."""
CLASSES = {
    "ForMaskedLM": "masked-lm",
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "tag",
    "ForQuestionAnswering": "answer",
    "Model": "states",
}
"""Suffix of a class name -> the task of its head."""


def head_names(names: str) -> dict[str, str]:
    """Returns our modules of a head -> their names in transformers, listed as `words`: a dense layer, its norm and the
    output matrix; or without the norm; or only the matrix."""
    theirs = words(names)
    ours = {1: ("out",), 2: ("dense", "out"), 3: ("dense", "norm", "out")}[len(theirs)]
    return dict(zip(ours, theirs, strict=True))


CLS = head_names("cls.predictions. transform.dense transform.LayerNorm decoder")
LM_HEAD = head_names("lm_head. dense layer_norm decoder")
"""The masked-lm head, in BERT and in RoBERTa. If tied, its bias is a parameter of the module before ".decoder"."""


def encoder_layout(
    family: str,
    name: str,
    masked: Modules,
    classifier: Modules,
    *,
    classes: Mapping[str, str] = CLASSES,
    activations: tuple[str, str] = ("", "tanh"),
    base: str | None = None,
    layer: str = "encoder.layer.#.",
    modules: Modules = MODULES,
    stack: Modules = MappingProxyType({}),
    unused: Sequence[str] | None = None,
    constants: Callable[[ModelSpec], Mapping[str, Tensor]] = lambda spec: {},
    pooler: Mapping[str, str] = MappingProxyType({"states": "pooler.dense"}),
    split: bool = False,
    decoder: str = "",
    head: Part | None = None,
    parts: Sequence[Part] = (),
    **overrides: Any,
) -> Layout:
    """Returns the layout of a BERT-like family.

    name: prefix of its class names.
    classes: suffixes of its class names -> the task of the head.
    masked, classifier: names of the modules of the masked-lm head and of a classifier of texts.
    activations: of the dense layers of these two; "" is the activation of the stack.
    base: name of the stack in a class with a head, by default the family.
    layer: prefix of a layer's names within the stack.
    modules: modules of a layer.
    stack: modules outside of the layers that are additional or have other names than the usual ones.
    unused, constants, split: as in `TensorNames`.
    pooler: the additional linear layer of the bare class, which files may leave out.
    decoder: suffix of the class that is a decoder with the same layers and the masked-lm head; "" if there is none.
    head: a part that reads and writes the head, if the usual one does not apply.
    parts: other parts.
    overrides: fields of `Layout` that differ."""
    base = family if base is None else base
    top = {**STACK, **stack}
    module_names = {
        **within("model.", f"{base}.", top),
        **within("model.layers.#.", f"{base}.{layer}", modules),
    }
    heads = {
        **dict.fromkeys(("lm", "masked-lm"), masked),
        "classify": classifier,
        "tag": {"out": "classifier"},
        "answer": {"out": "qa_outputs"},
        "embed": {"dense": f"{base}.pooler.dense"},
        "states": {},
    }

    def rules(spec: ModelSpec) -> list[Rule]:
        # if the output is not tied, transformers has two biases, and adds that of the matrix
        out = masked["out"].removesuffix(".decoder") if spec.tied else masked["out"]
        head_modules = {**heads[spec.head.task], **({"out": out} if spec.head.needs_vocab else {})}
        return module_rules(spec, {**module_names, **within("head.", "", head_modules), "lm_head": out})

    out = f"{masked['out']}.weight", f"{masked['out']}.bias"
    firsts = {part.partition(".")[0] for names in heads.values() for part in names.values()} - {base}

    def aliases(spec: ModelSpec) -> Mapping[str, str]:
        """Returns second names of tied tensors; none without an output layer: a file may then have an untied matrix."""
        pairs = {out[0]: f"{base}.{top['embed_tokens']}.weight", out[1]: out[1].replace(".decoder", "")}
        return pairs if spec.head.needs_vocab else {}

    tensors = TensorNames(
        rules=rules,
        prefix=f"{base}.",
        aliases=aliases,
        renamed=RENAMED,
        unused=(f"{base}.pooler.", "embeddings.position_ids") if unused is None else unused,
        heads=tuple(f"{first}." for first in sorted(firsts)),
        constants=constants,
        outputs={**dict.fromkeys(("lm", "masked-lm"), masked["out"]), **pooler},
        split=split,
    )
    fields: dict[str, Any] = {
        "keys": KEYS,
        "only": ONLY,
        "harmless": POOLER,
        "parts": (
            head or Part({"tie_word_embeddings": True}, partial(_read, activations), write_encoder),
            *parts,
        ),
        **overrides,
    }
    if decoder:
        classes = {**classes, decoder: "lm"}
        fields["more"] = {"is_decoder": None}
        fields["only"] = {key: values for key, values in fields["only"].items() if key != "is_decoder"}
    architectures = {f"{name}{ending}": kind for ending, kind in classes.items()}
    return Layout(family=family, architectures=architectures, tensors=tensors, **fields)


def _read(activations: tuple[str, str], config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the head for the class's task, and the fields that follow from it. Raises ConfigError if `is_decoder`
    contradicts the class."""
    kind = config.task
    if config.flag("is_decoder") != (kind == "lm"):
        raise ConfigError(
            f"config.json: is_decoder is {config.get('is_decoder')}, but the class in architectures is "
            f"{'a decoder' if kind == 'lm' else 'an encoder'}; correct one of them"
        )
    vocab = kind in ("lm", "masked-lm")
    masked, dense = (name or fields["activation"] for name in activations)
    head: dict[str, Any] = {"task": kind, "dense": masked if vocab else dense if kind == "classify" else None}
    if kind in ("classify", "tag"):
        head["labels"] = labels(config)
    causal: dict[str, Any] = {"causal": True, "patterns": Causal()} if kind == "lm" else {}
    tied = vocab and config.flag("tie_word_embeddings")
    return {**causal, "tied": tied, "output_bias": vocab, "head": Head(**head)}


def write_encoder(spec: ModelSpec) -> dict[str, Any]:
    """Returns the keys of the head and of the fields that follow from it."""
    keys: dict[str, Any] = {"tie_word_embeddings": spec.tied or not spec.head.needs_vocab}
    if spec.causal:
        keys["is_decoder"] = True
    if spec.head.labels:
        numbered = dict(enumerate(spec.head.labels))
        keys["id2label"] = {str(i): name for i, name in numbered.items()}
        keys["label2id"] = {name: i for i, name in numbered.items()}
    return keys


def labels(config: ConfigReader) -> tuple[str, ...]:
    """Returns the names of the classes from `id2label`, or LABEL_0, ... for `num_labels` (2 by default)."""
    names = config.get("id2label")
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(config.whole("num_labels", 2)))
    if not isinstance(names, Mapping) or {str(k) for k in names} != {str(i) for i in range(len(names))}:
        raise ConfigError(f'config.json: "id2label" must name the classes 0, 1, ..., got {names!r}')
    by_number = {str(key): value for key, value in names.items()}
    return tuple(str(by_number[str(i)]) for i in range(len(names)))
