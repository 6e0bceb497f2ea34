"""`transformers` as oracle: the same weights in its model and in ours."""

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

WIDTH, VOCAB, LAYERS, HEADS, HEAD_DIM, HIDDEN = 40, 61, 3, 4, 12, 56
"""The width is not heads * head_dim, so that nothing can confuse the two."""

WINDOW = 5


def config(family: str, kv_heads: int, tied: bool) -> PreTrainedConfig:
    """A small config of the family in `transformers`."""
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
    """The same in our words, written by hand; `changes` make a mutant."""
    window = Window.last(WINDOW)
    layered = (Causal(), window, Causal())
    own: dict[str, Any] = {
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
        **own,
    }
    name = family.removesuffix("-biased").removesuffix("-full")
    return ModelSpec.of(name, **{**fields, **changes})


def random_model(cfg: PreTrainedConfig, seed: int = 0) -> Any:
    """Their model with weights of standard deviation about 0.3: at 0.02, wrong rotary angles hide.

    Gains are spread around 1; biases are random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(cfg, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def ours(theirs: Any, spec: ModelSpec) -> Decoder:
    """Our decoder with their weights, under their names; strict."""
    model = build(spec, device="cpu", seed=1)
    state = dict(theirs.state_dict())
    if spec.tied:
        assert torch.equal(state.pop("lm_head.weight"), state["model.embed_tokens.weight"])
    model.load_state_dict(state)
    return model.eval()


def differences(theirs: Any, model: Decoder, ids: Tensor) -> tuple[float, float]:
    """(logits, gradients): the largest difference over the largest value; gradients by parameter, the worst.

    The gradients are those of a fixed random projection of the logits."""
    weights = torch.randn(*ids.shape, VOCAB, generator=torch.Generator().manual_seed(7)) / ids.numel()
    want, got = theirs(ids).logits, model(ids)
    for run, logits in ((theirs, want), (model, got)):
        run.zero_grad()
        (logits * weights).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    worst = 0.0
    for name, p in theirs.named_parameters():
        worst = max(worst, relative(found[name], p.grad))
    return relative(got, want), worst


def relative(got: Tensor | None, want: Tensor | None) -> float:
    """max |got - want| / max |want|."""
    assert got is not None
    assert want is not None
    assert got.shape == want.shape
    return float((got - want).detach().abs().max() / want.detach().abs().max())
