"""BERT and its kin as `transformers` stores them (Devlin et al. 2019).

Megatron's BERT has its norms in front, ERNIE, ELECTRA and DistilBERT other heads or names (Shoeybi et al. 2019; Sun et
al. 2019; Clark et al. 2020; Sanh et al. 2019). RoFormer has rotary positions in adjacent pairs (Su et al. 2021).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.hf.config_keys import ConfigReader, Key, called, without
from headway.checkpoints.hf.harmless import words
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.layouts.encoders import (
    CLASSES,
    CLS,
    KEYS,
    MODULES,
    ONLY,
    POOLER,
    encoder_layout,
    head_names,
)
from headway.checkpoints.hf.layouts.parts import learned
from headway.checkpoints.hf.layouts.rules import block
from headway.models import ModelSpec
from headway.positions import Rotary, Sinusoidal

TABLE = learned(512)
PRETRAINED = {**CLASSES, "ForPreTraining": "masked-lm"}
SENTENCES = ("cls.seq_relationship.", "bert.pooler.", "embeddings.position_ids")
"""What a class of pretraining has besides."""
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
    """An embedding of other columns than the states, `usual` or as many unless the config says."""

    def read(given: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        columns = given.whole("embedding_size", fields["width"])
        return {"embedding_width": None if columns == fields["width"] else columns}

    return Part({"embedding_size": usual}, read, lambda spec: {"embedding_size": spec.columns})


ELECTRA = encoder_layout(
    *("electra", "Electra"),
    head_names("generator_predictions.dense generator_predictions.LayerNorm generator_lm_head"),
    head_names("classifier. dense out_proj"),
    # the discriminator, which is what is trained further, without what tells replaced tokens
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
    # how the table of positions began; dropout in front of two heads, which is the model's own here
    harmless=words("sinusoidal_pos_embds seq_classif_dropout qa_dropout output_past"),
    unused=("embeddings.position_ids",),
    pooler={},
)


def _constants(spec: ModelSpec) -> Mapping[str, Tensor]:
    """The sines and cosines of `max_position_embeddings` positions that transformers stores with its weights, and
    makes where they are absent; here, nothing."""
    if spec.trained_context * spec.head_dim > LARGEST_TABLE:
        return {}
    position = torch.arange(spec.trained_context, device="cpu")
    table = Sinusoidal(pairing="halves").embedding(position, spec.head_dim)
    return {"roformer.encoder.embed_positions.weight": table}


LARGEST_TABLE = 2**26  # numbers
ROFORMER = encoder_layout(
    *("roformer", "RoFormer", CLS, head_names("classifier. dense out_proj")),
    activations=("", ""),
    keys={**KEYS, "trained_context": Key("max_position_embeddings", 1536)},
    parts=(
        _narrower(None),
        Part(
            {"rotary_value": None},
            lambda given, fields: {
                "positions": Rotary(pairing="adjacent", values=given.flag("rotary_value"))
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
