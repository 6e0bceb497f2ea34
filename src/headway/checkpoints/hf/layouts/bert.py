"""BERT, RoBERTa and related encoders as `transformers` stores them (Devlin et al. 2019; Liu et al. 2019).

Megatron's BERT has pre-norms; ERNIE, ELECTRA and DistilBERT have other heads or names (Shoeybi et al. 2019; Sun et al.
2019; Clark et al. 2020; Sanh et al. 2019). RoFormer has rotary positions in adjacent pairs (Su et al. 2021). The
relatives of RoBERTa were trained on other texts (XLM-R: Conneau et al. 2019; CamemBERT: Martin et al. 2019) or with
another objective (data2vec: Baevski et al. 2022), have pre-norms (Wettig et al. 2022), or windows (Longformer: Beltagy
et al. 2020).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.hf.config_keys import ConfigReader, Key, called, without
from headway.checkpoints.hf.harmless import words
from headway.checkpoints.hf.layouts.base import Layout, Part
from headway.checkpoints.hf.layouts.encoders import (
    CLASSES,
    CLS,
    KEYS,
    LM_HEAD,
    MODULES,
    ONLY,
    POOLER,
    encoder_layout,
    head_names,
)
from headway.checkpoints.hf.layouts.parts import learned
from headway.checkpoints.hf.layouts.rules import block
from headway.checkpoints.hf.windows import from_foreign
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.patterns import Global, Pattern, program
from headway.patterns.primitives import Kind
from headway.positions import Learned, Rotary, Sinusoidal

TABLE = learned(512)
PRETRAINED = {**CLASSES, "ForPreTraining": "masked-lm"}
SENTENCES = ("cls.seq_relationship.", "bert.pooler.", "embeddings.position_ids")
"""Tensors of a class for pretraining that are not used."""
BERT = encoder_layout(
    *("bert", "Bert", CLS, head_names("bert.pooler.dense classifier")),
    classes=PRETRAINED,
    parts=(TABLE,),
    also=("wobert",),
    decoder="LMHeadModel",
    unused=SENTENCES,
)
MEGATRON_BERT = encoder_layout(
    *("megatron-bert", "MegatronBert", CLS, head_names("bert.pooler.dense classifier")),
    classes=PRETRAINED,
    parts=(TABLE,),
    base="bert",
    modules={**MODULES, "input_layernorm": "attention.ln", "post_attention_layernorm": "ln"},
    stack={"norm": "encoder.ln"},
    unused=SENTENCES,
    decoder="ForCausalLM",
)
ERNIE = encoder_layout(
    *("ernie", "Ernie", CLS, head_names("ernie.pooler.dense classifier")),
    classes=PRETRAINED,
    parts=(TABLE,),
    only={**ONLY, "use_task_id": (False, None)},
    harmless=(*POOLER, "task_type_vocab_size"),
    unused=(*SENTENCES, "ernie.pooler."),
    decoder="ForCausalLM",
)


def _narrower(usual: int | None) -> Part:
    """Returns the part of an embedding narrower than the states: `embedding_size`, by default `usual`, or the states'
    width if that is None."""

    def read(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        columns = config.whole("embedding_size", fields["width"])
        return {"embedding_width": None if columns == fields["width"] else columns}

    return Part({"embedding_size": usual}, read, lambda spec: {"embedding_size": spec.columns})


ELECTRA = encoder_layout(
    *("electra", "Electra"),
    head_names("generator_predictions.dense generator_predictions.LayerNorm generator_lm_head"),
    head_names("classifier. dense out_proj"),
    # the discriminator, which is the model to fine-tune, without its head that detects replaced tokens
    classes={**CLASSES, "ForPreTraining": "states"},
    activations=("gelu", "gelu"),  # hidden_act does not apply here
    parts=(TABLE, _narrower(128)),
    harmless=(*POOLER, *words("summary_type summary_use_proj summary_activation summary_last_dropout")),
    unused=("discriminator_predictions.", "embeddings.position_ids"),
    decoder="ForCausalLM",
    pooler={},
)
NAMES = {"width": "dim", "layers": "n_layers", "heads": "n_heads", "hidden": "hidden_dim"}
NAMES |= {name: name for name in ("activation", "dropout", "attention_dropout")}
DISTILBERT = encoder_layout(
    *("distilbert", "DistilBert", head_names("vocab_transform vocab_layer_norm vocab_projector")),
    head_names("pre_classifier classifier"),
    activations=("", "relu"),
    layer="transformer.layer.#.",
    modules=block(
        "sa_layer_norm output_layer_norm", "attention. q_lin k_lin v_lin out_lin", "ffn. lin1 lin2"
    ),
    keys=without(called(KEYS, **NAMES), "token_types", "norm_eps"),
    parts=(TABLE,),
    only={"tie_weights_": (True, None)},
    # how the table of positions was initialized; dropout before two heads, where headway uses the model's
    harmless=words("sinusoidal_pos_embds seq_classif_dropout qa_dropout output_past"),
    unused=("embeddings.position_ids",),
    pooler={},
)


def _constants(spec: ModelSpec) -> Mapping[str, Tensor]:
    """Returns the sines and cosines of `max_position_embeddings` positions that transformers stores with its weights,
    and computes if they are absent; none if the table is larger than `LARGEST_TABLE`."""
    if spec.trained_context * spec.head_dim > LARGEST_TABLE:
        return {}
    position = torch.arange(spec.trained_context, device="cpu")
    table = Sinusoidal(pairing="halves").embedding(position, spec.head_dim)
    return {"roformer.encoder.embed_positions.weight": table}


LARGEST_TABLE = 2**26  # number of values
ROFORMER = encoder_layout(
    *("roformer", "RoFormer", CLS, head_names("classifier. dense out_proj")),
    activations=("", ""),
    keys={**KEYS, "trained_context": Key("max_position_embeddings", 1536)},
    parts=(
        _narrower(None),
        Part(
            {"rotary_value": None},
            lambda config, fields: {
                "positions": Rotary(pairing="adjacent", values=config.flag("rotary_value"))
            },
            lambda spec: {"rotary_value": isinstance(spec.positions, Rotary) and spec.positions.values},
        ),
    ),
    unused=("roformer.pooler.",),
    constants=_constants,
    pooler={},
    decoder="ForCausalLM",
    pairing="adjacent",
)


def _behind_padding(family: str) -> Part:
    """Returns the part of positions that begin after the row of the padding id. Raises ConfigError for a padding id
    that leaves no rows."""

    def read(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        rows, pad = config.whole("max_position_embeddings"), config.get("pad_token_id")
        if type(pad) is not int or not 0 <= pad < rows - 1:
            raise ConfigError(
                f'config.json: "pad_token_id" must be in 0..{rows - 2}, because positions of a {family} begin after '
                f"this row of max_position_embeddings {rows}; got {pad!r}"
            )
        size = rows - pad - 1
        return {"positions": Learned(size, offset=pad + 1), "trained_context": size}

    def write(spec: ModelSpec) -> dict[str, Any]:
        table = spec.positions if isinstance(spec.positions, Learned) else Learned(spec.trained_context)
        offset = max(table.offset, 1)
        return {"max_position_embeddings": table.size + offset, "pad_token_id": offset - 1}

    return Part({"max_position_embeddings": 512, "pad_token_id": 1}, read, write)


def _layout(family: str, name: str, parts: tuple[Part, ...] = (), **names: Any) -> Layout:
    """Returns the layout of RoBERTa or a relative; `names` as in `encoder_layout`."""
    parts = (_behind_padding(family), *parts)
    classifier = head_names("classifier. dense out_proj")
    # hidden_act does not apply to the dense layer of the masked-lm head
    return encoder_layout(
        family, name, LM_HEAD, classifier, activations=("gelu", "tanh"), parts=parts, **names
    )


_decoding = partial(_layout, decoder="ForCausalLM")
ROBERTA = _decoding("roberta", "Roberta")
XLM_ROBERTA = _decoding("xlm-roberta", "XLMRoberta", base="roberta")
CAMEMBERT = _decoding("camembert", "Camembert", base="roberta")
DATA2VEC = _decoding("data2vec-text", "Data2VecText", base="data2vec_text")
PRE_NORMS = {"input_layernorm": "attention.LayerNorm", "post_attention_layernorm": "intermediate.LayerNorm"}
PRELAYERNORM = _decoding(
    *("roberta-prelayernorm", "RobertaPreLayerNorm"),
    base="roberta_prelayernorm",
    modules={**MODULES, **PRE_NORMS},
    stack={"norm": "LayerNorm"},
)


def _read_windows(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads one window for all layers, or a list with one for each."""
    windows, layers = config.get("attention_window"), fields["layers"]
    layer_windows = windows if isinstance(windows, list) else [windows] * layers
    if len(layer_windows) != layers:
        raise ConfigError(
            f"config.json: attention_window lists {len(layer_windows)} layers, but num_hidden_layers is {layers}"
        )
    if None in layer_windows:
        raise ConfigError(
            "config.json: attention_window must be a number in every layer of a longformer, got null; for full "
            "attention use twice the longest input"
        )
    return {"patterns": tuple(from_foreign("attention_window", w) | Global() for w in layer_windows)}


def _write_windows(spec: ModelSpec) -> dict[str, Any]:
    windows = [_others(pattern) for pattern in spec.patterns]
    return {"attention_window": windows[0] if len(set(windows)) == 1 else windows}


def _others(pattern: Pattern) -> int:
    """Returns the w of a window of w / 2 on either side; 2 if there is none, which reading it again shows."""
    bounds = program.interval(program.without(pattern, Kind.GLOBAL_KEYS, Kind.GLOBAL_QUERIES))
    return 2 if bounds is None else 2 * (bounds[0] or 1)


LONGFORMER = _layout(
    *("longformer", "Longformer", (Part({"attention_window": 512}, _read_windows, _write_windows),)),
    modules={
        **MODULES,
        **{f"self_attn.{n[0]}_global_proj": f"attention.self.{n}_global" for n in ("query", "key", "value")},
    },
    only={
        **ONLY,
        "attention_mode": ("longformer",),
        "ignore_attention_mask": (False,),
        "onnx_export": (False, True, None),
    },
)
