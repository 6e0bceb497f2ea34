"""`quantization_config` names layers as transformers names its modules, in every family that transformers has."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from headway.checkpoints import save_folder
from headway.checkpoints.hf.config import spec_from_config
from headway.checkpoints.hf.layouts import LAYOUTS
from headway.errors import CheckpointError
from headway.models import ModelSpec, build
from headway.models.quantize import quantize_model, quantized_layers
from headway.storage.tensors import open_tensors
from tests.checkpoints import (
    decoder_rows,
    decoders,
    encoders,
    expert_rows,
    gemma3n_rows,
    gemma4_rows,
    hf,
    seq2seq,
)
from tests.checkpoints.shares import share
from tests.families import THERE

LONGFORMER = {**encoders.SHAPE, "attention_window": 8, "position_embedding_type": "absolute"}
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3"), hf.SHAPE),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), decoders.GPT2),
    "falcon": decoders.FALCON,
    "starcoder2": decoders.STARCODER2,
    "gpt_neox": decoders.NEOX,
    "phi": decoders.NEOX,
    "bloom": decoders.BLOOM,
    "mpt": decoders.MPT,
    **dict.fromkeys(("granite", "olmo2", "olmo3"), decoders.NO_HEAD_DIM),
    "gemma": decoders.NORMED,
    **dict.fromkeys(("gemma2", "gemma3_text"), decoders.GEMMA2),
    **dict(
        reversed(
            [
                *decoder_rows.CASES.values(),
                *expert_rows.CASES.values(),
                *gemma3n_rows.CASES.values(),
                *gemma4_rows.CASES.values(),
            ]
        )
    ),
    "modernbert-decoder": {**encoders.shape("modernbert"), "pad_token_id": 0},
    "marian": seq2seq.MARIAN,
    **dict.fromkeys(("bart", "mbart", "plbart", "mvp", "blenderbot", "pegasus"), seq2seq.PAIR),
    "m2m_100": seq2seq.M2M,
    **dict.fromkeys(("t5", "mt5"), seq2seq.T5),
    **{family: encoders.shape(family) for family in encoders.CLASSES},
    "longformer": LONGFORMER,
}
REFUSED = (
    *("gpt2", "openai-gpt", "jina_embeddings_v3", "nomic_bert"),
    *("gpt_oss", "granitemoe", "granitemoeshared", "granitemoe_swa", "granitemoehybrid"),
)
CLASSES = [
    (family, name)
    for family in THERE
    for name in {kind: name for name, kind in reversed(LAYOUTS[family].architectures.items())}.values()
]
"""Every class that headway writes, with its family."""


def specs(family: str, name: str) -> list[ModelSpec]:
    """Returns the specs of a class: with a tied output layer, and with one of its own if the class has any."""
    layout = LAYOUTS[family]
    labels = encoders.LABELS if layout.architectures[name] in ("classify", "tag") else {}
    config = {"model_type": family, "architectures": [name], **SETTINGS[family], **labels}
    if "is_decoder" in layout.more:
        config["is_decoder"] = layout.architectures[name] == "lm"
    ties = (True, False) if layout.architectures[name] in ("lm", "masked-lm") else (True,)
    ties = (False,) if True not in layout.only.get("tie_word_embeddings", (True,)) else ties
    return [spec_from_config({**config, "tie_word_embeddings": tied}) for tied in ties]


def modules(folder: Path) -> tuple[set[str], set[str], set[str]]:
    """Returns the linear layers of the class that a folder names, those that its file packs, and `ignore`."""
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    (group,) = quantization["config_groups"].values()
    assert group["targets"] == ["Linear"]
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model_class = getattr(transformers, config["architectures"][0])
        model = model_class(transformers.AutoConfig.from_pretrained(folder))
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    moves = get_model_conversion_mapping(model)
    kinds = (
        [entry for entry in moves if isinstance(entry, kind)] for kind in (WeightRenaming, WeightConverter)
    )
    renamed = (*kinds, model.base_model_prefix, dict.fromkeys(f"{entry}.weight_scale" for entry in linears))
    stored = [name for name in open_tensors(folder) if name.endswith(".weight_scale")]
    packed = {rename_source_key(name, *renamed)[0].removesuffix(".weight_scale") for name in stored}
    return linears, packed, set(quantization["ignore"])


@pytest.mark.parametrize("weights", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
@share("family, name", CLASSES, 0, 5)
def test_a_linear_layer_of_transformers_is_packed_or_ignored(
    family: str, name: str, weights: str, tmp_path: Path
) -> None:
    """`apply_quantization_config` expects packed tensors for every Linear that `ignore` does not name."""
    for index, spec in enumerate(specs(family, name)):
        model = build(spec, seed=0)
        untied = hasattr(model, "lm_head") and not spec.tied
        quantize_model(
            model, weights, group=-1 if weights == "int8" else None, output=untied and weights == "int4"
        )
        folder = tmp_path / str(index)
        if family in REFUSED:
            with pytest.raises(
                CheckpointError, match=r"as \[in, out\]|splits it|in one tensor with other experts"
            ):
                save_folder(folder, model)
            continue
        save_folder(folder, model, generation={"pad_token_id": 0} if "modernbert" in family else None)
        linears, packed, ignored = modules(folder)
        experts = {name for name in packed if ".experts." in name}  # one parameter for all in transformers
        assert packed - experts | ignored == linears
        assert not packed & ignored
        assert len(packed) <= len(quantized_layers(model))
