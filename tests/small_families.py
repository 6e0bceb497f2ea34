"""Small models of families of every kind, with weights of standard deviation 0.2."""

from collections.abc import Mapping
from typing import Any

import torch

from headway.models import ModelSpec, build
from headway.nn.experts import Experts
from headway.patterns import Causal, Window
from headway.positions import NoPositions, PerLayer, Rotary
from tests.text.conftest import byte_level

TOKENIZER = byte_level().with_chat_template("chatml")
VOCAB = 2 * -(-max(330, TOKENIZER.vocab_size) // 2)
SIZES: dict[str, Any] = {
    "vocab": VOCAB, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 96, "trained_context": 512,
}  # fmt: skip
SEES = {"patterns": (Window.last(20), Causal())}
BASES = PerLayer((Rotary(1e4, pairing="halves"), Rotary(1e6, pairing="halves")))
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gemma2": ("gemma2", SEES),
    "gemma3": ("gemma3_text", {**SEES, "positions": BASES}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"residual_scale": 0.22, "embedding_scale": 12.0, "logit_scale": 0.3}),
    "gpt-oss": ("gpt_oss", SEES),
    "qwen3-moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {"patterns": Window.last(20)}),
    "qwen2-moe": ("qwen2_moe", {}),
    "glm-4.5": ("glm4_moe", {"experts": (None, Experts(count=4, top=2, score="sigmoid", choice_bias=True))}),
    "qwen3.5": ("qwen3_5_text", {"layers": 4, "head_dim": 32}),
    "lfm2": ("lfm2", {"layers": 3}),
    "falcon-h1": ("falcon_h1", {"mlp_scale": 0.5, "mlp_gate_scale": 1.5}),
    "nemotron-h": ("nemotron_h", {"layers": 3, "layer_hidden": (0, None, 0)}),
    "falcon": ("falcon", {"kv_heads": 2, "order": "parallel"}),
    "gpt-j": ("gptj", {"kv_heads": 4}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "smollm3": ("smollm3", {"positions": PerLayer((Rotary(1e4, pairing="halves"), NoPositions()))}),
    "exaone4": ("exaone4", SEES),
    "modernbert": ("modernbert", {"kv_heads": 4, "patterns": (Window.around(10), Window.around(20))}),
}
"""Name -> family, and fields that differ from `SIZES` and the family's defaults."""
ENCODERS = ("modernbert",)


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    family, fields = FAMILIES[name]
    model = build(ModelSpec.of(family, **{**SIZES, **fields}), seed=0).eval()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=draw) * 0.2
            parameter.copy_(drawn if parameter.dim() > 1 else parameter + drawn)
    return model.to(dtype)
