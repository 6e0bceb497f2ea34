"""Gemma 3n (text) as `transformers` stores it (Gemma team 2025): like Gemma 4 with layers of one size, whose last ones
attend to keys of others, with several residual streams (AltUp), a low-rank layer beside attention (Laurel), and sparse
gates in the first layers."""

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, Inexpressible, Key
from headway.checkpoints.hf.layouts.base import Layout, Part
from headway.checkpoints.hf.layouts.gemma import (
    BASES,
    CAPS,
    COLUMNS,
    EMBEDDING,
    PLACES,
    UNUSED_KEYS,
    VOCAB,
    gemma_keys,
    softmax_by_layer,
)
from headway.checkpoints.hf.layouts.parts import rope_by_kind, windows
from headway.checkpoints.hf.layouts.tensors import renamed
from headway.checkpoints.hf.windows import UNUSED, every, read_kinds
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.models.mixers import Softmax
from headway.nn.altup import AltUp

KINDS = every(5, -1)
SPARSE, SHARED = "activation_sparsity_pattern", "num_kv_shared_layers"
KEYS: Mapping[str, Any] = {
    COLUMNS: 256, VOCAB: 262144, SPARSE: None, SHARED: 15,
    "intermediate_size": None, "altup_num_inputs": 4, "altup_coef_clip": 120.0,
}  # fmt: skip


def _read(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    layers, columns = fields["layers"], config.whole(COLUMNS)
    kinds = read_kinds(config, layers, KINDS)
    hidden = config.get("intermediate_size")
    each = hidden if isinstance(hidden, list) else [config.whole("intermediate_size", 16384)] * layers
    share = config.get(SPARSE)
    if share is None:
        share = [0.95] * 10 + [0.0] * (layers - 10) if layers > 10 else [0.0] * layers
    for name, values in (("intermediate_size", each), (SPARSE, share)):
        if not isinstance(values, list) or len(values) != layers:
            raise ConfigError(
                f"config.json: {name} must have one value for each of {layers} layers, got {values}"
            )
    if not all(type(size) is int and size > 0 for size in each):
        raise config.wrong("intermediate_size", "whole numbers above 0", each)
    if config.whole(VOCAB) > fields["vocab"]:
        raise ConfigError(
            f"config.json: {VOCAB} {config.get(VOCAB)} is more than vocab_size {fields['vocab']}"
        )
    rows = config.whole(VOCAB)
    return {
        "hidden": each[0],
        "layer_hidden": tuple(each),
        "mlp_sparsity": tuple(share),
        "per_layer_embedding": columns,
        "per_layer_vocab": 0 if rows == fields["vocab"] else rows,
        "altup": AltUp(config.whole("altup_num_inputs", least=2), config.number("altup_coef_clip")),
        "mixers": softmax_by_layer(config, kinds, [{}] * layers, config.whole(SHARED, least=0)),
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    if spec.altup is None or not spec.per_layer_embedding:
        raise Inexpressible("altup" if spec.altup is None else "per_layer_embedding")
    return {
        "intermediate_size": [spec.hidden_of(i) for i in range(spec.layers)],
        SPARSE: [*spec.mlp_sparsity],
        COLUMNS: spec.per_layer_embedding,
        VOCAB: spec.per_layer_vocab or spec.vocab,
        "altup_num_inputs": spec.altup.streams,
        "altup_coef_clip": spec.altup.clip,
        SHARED: sum(isinstance(mixer, Softmax) and mixer.kv_from is not None for mixer in spec.mixers),
    }


GEMMA3N = Layout(
    family="gemma3n_text",
    architectures={"Gemma3nForCausalLM": "lm"},
    keys={
        **{field: key for field, key in gemma_keys("hidden_activation", 2).items() if field != "hidden"},
        "logit_cap": CAPS["logit_cap"],
        "laurel": Key("laurel_rank", 64),
    },
    more={"max_position_embeddings": 32768, "sliding_window": 512},
    only={"altup_active_idx": (0,), "altup_correct_scale": (True,)},
    harmless=("altup_lr_multiplier", "query_pre_attn_scalar"),
    parts=(windows("layer", KINDS, unused=UNUSED), rope_by_kind(BASES), Part(KEYS, _read, _write), EMBEDDING),
    tensors=renamed(
        {
            **PLACES,
            ".altup.prediction_coefs": ".altup.prediction_coefs.weight",
            ".altup.correction_coefs": ".altup.correction_coefs.weight",
            "model.streams.into.": "model.altup_projections.",
            "model.streams.out.": "model.altup_unembed_projections.",
        },
        unused=UNUSED_KEYS,
        linears=(".altup.prediction_coefs", ".altup.correction_coefs"),
    ),
)
