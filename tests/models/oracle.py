"""`transformers` as the oracle: the same weights in its model and in ours."""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from headway.models import Decoder, ModelSpec, build
from headway.patterns import Causal, Window
from headway.positions import Rotary
from tests.checkpoints.hf import off

WIDTH, VOCAB, LAYERS, HEADS, HEAD_DIM, HIDDEN = 40, 61, 3, 4, 12, 56
"""The width differs from heads * head_dim, so that code that confuses the two fails."""

WINDOW = 5


def config(family: str, kv_heads: int, tied: bool) -> PreTrainedConfig:
    """Returns a small config of the family in `transformers`."""
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "attn_implementation": "eager",
    }
    layers = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    if family == "llama":
        return LlamaConfig(**common)
    if family == "llama-biased":
        return LlamaConfig(**common, attention_bias=True, mlp_bias=True)
    if family == "mistral":
        return MistralConfig(**common, sliding_window=WINDOW)
    if family == "mistral-full":
        return MistralConfig(**common, sliding_window=None)
    if family == "ministral":
        return MinistralConfig(**common, sliding_window=WINDOW, **layers)
    if family == "qwen2":
        return Qwen2Config(**common, sliding_window=WINDOW, use_sliding_window=True, **layers)
    if family == "qwen3":
        return Qwen3Config(**common, sliding_window=WINDOW, use_sliding_window=True, **layers)
    raise AssertionError(family)


FAMILY_NAMES = ["llama", "llama-biased", "mistral", "mistral-full", "ministral", "qwen2", "qwen3"]


def spec(family: str, kv_heads: int, tied: bool, **changes: Any) -> ModelSpec:
    """Returns our spec of the same model, written by hand; `changes` make a mutant."""
    window = Window.last(WINDOW)
    layered = (Causal(), window, Causal())
    family_fields: dict[str, Any] = {
        "llama": {"patterns": Causal()},
        "llama-biased": {"patterns": Causal(), "qkv_bias": True, "out_bias": True, "mlp_bias": True},
        "mistral": {"patterns": window},
        "mistral-full": {"patterns": Causal()},
        "ministral": {"patterns": layered},
        "qwen2": {"patterns": layered},
        "qwen3": {"patterns": layered},
    }[family]
    fields = {
        "vocab": VOCAB,
        "width": WIDTH,
        "layers": LAYERS,
        "heads": HEADS,
        "kv_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "hidden": HIDDEN,
        "tied": tied,
        "norm_eps": 1e-5,
        "trained_context": 64,
        "positions": Rotary(1000.0, pairing="halves"),
        **family_fields,
    }
    name = family.removesuffix("-biased").removesuffix("-full")
    return ModelSpec.of(name, **{**fields, **changes})


def random_model(cfg: PreTrainedConfig, seed: int = 0) -> Any:
    """Returns a `transformers` model with weights of standard deviation 0.3: at 0.02, wrong rotary angles hide.

    Gains are spread around 1; biases are random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(cfg, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def ours(reference: Any, spec: ModelSpec) -> Decoder:
    """Returns our decoder with the weights of the reference, loaded strictly under the same names."""
    model = build(spec, device="cpu", seed=1)
    state = dict(reference.state_dict())
    if spec.tied:
        assert torch.equal(state.pop("lm_head.weight"), state["model.embed_tokens.weight"])
    model.load_state_dict(state)
    return model.eval()


def differences(reference: Any, model: Decoder, ids: Tensor) -> tuple[float, float]:
    """Returns the largest relative differences (logits, gradients), for gradients that of the worst parameter.

    The gradients are those of a fixed random projection of the logits."""
    weights = torch.randn(*ids.shape, VOCAB, generator=torch.Generator().manual_seed(7)) / ids.numel()
    expected, actual = reference(ids).logits, model(ids)
    for module, logits in ((reference, expected), (model, actual)):
        module.zero_grad()
        (logits * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    worst = 0.0
    for name, p in reference.named_parameters():
        worst = max(worst, off(gradients[name], p.grad))
    return off(actual, expected), worst
