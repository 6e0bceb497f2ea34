"""The oracle: transformers models with random weights, from the same config dict that headway reads."""

import copy

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

transformers.logging.set_verbosity_error()

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def config_dict(family: str, **changes) -> dict:
    return {"model_type": family, **SHAPE, **changes}


def peer(config: dict, std: float = 0.3, seed: int = 0):
    """Returns a transformers model: every parameter is normal with this standard deviation (norm gains around 1)."""
    settings = copy.deepcopy({key: value for key, value in config.items() if key != "headway"})
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(settings.pop("model_type"), **settings), attn_implementation="eager"
    )
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=g) * std + (1.0 if "norm" in name else 0.0))
    return model.eval()


def weights(model) -> dict[str, torch.Tensor]:
    """Returns the model's state dict under headway's names: without the second name of tied weights."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    return state


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Returns the largest difference, relative to the largest value of `theirs`."""
    return float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())
