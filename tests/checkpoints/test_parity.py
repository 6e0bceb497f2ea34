"""config dict -> spec -> Decoder equals transformers with the same weights: logits 1e-5, gradients 1e-4, relative.

Weights have standard deviation 0.3: at 0.02 attention is nearly uniform and wrong angles or masks hide.
"""

import pytest
import torch

from headway.checkpoints.hf.config import spec_from_config
from headway.checkpoints.restore import fill
from tests.checkpoints.hf import config_dict, off, peer, weights

ROPES = {
    "default v5": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "default old": {"rope_theta": 500.0, "rope_scaling": None},
    "linear old": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "linear new": {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "linear v5": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}},
    "dynamic old, short": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "dynamic old, long": {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16},
    "dynamic v5, long": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0},
        "max_position_embeddings": 16,
    },
    "yarn old": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "yarn implicit original": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "max_position_embeddings": 16,
    },
    "yarn attention_factor": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "attention_factor": 0.7,
        }
    },
    "yarn v5, all keys": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "mscale": 0.8,
            "mscale_all_dim": 0.6,
            "truncate": False,
        }
    },
    "yarn factor null": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": None,
            "original_max_position_embeddings": 16,
        }
    },
    "llama3 new": {
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama3 v5": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "longrope new, short": {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
            "factor": 2.0,
            "original_max_position_embeddings": 32,
        }
    },
    "longrope v5, long": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
            "original_max_position_embeddings": 16,
        }
    },
    "longrope attention_factor": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
            "attention_factor": 1.3,
            "original_max_position_embeddings": 16,
        }
    },
}

FAMILIES = {
    "llama": {"num_key_value_heads": 6},
    "llama grouped, biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama mqa, head_dim": {"num_key_value_heads": 1, "head_dim": 10},
    "mistral window": {"sliding_window": 5, "head_dim": 8},
    "mistral absent window": {"head_dim": 8},
    "mistral null window": {"sliding_window": None, "tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 1},
    "qwen2 late windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen2 tied, layer types": {
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3 biases, windows": {
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 2,
    },
    "ministral": {
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
}
N = 24


def ids(rows: int = 1) -> torch.Tensor:
    return torch.randint(0, 61, (rows, N), generator=torch.Generator().manual_seed(1))


def both(config, rows=1):
    """Returns the relative errors (logits, worst gradient) of headway against transformers."""
    theirs = peer(config)
    state = weights(theirs)
    ours = fill(spec_from_config(config), state)
    tokens = ids(rows)
    logits, their_logits = ours(tokens), theirs(tokens, use_cache=False).logits
    cotangent = torch.randn(their_logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * cotangent).sum().backward()
    (their_logits * cotangent).sum().backward()
    grads = dict(theirs.named_parameters())
    errors = torch.tensor([off(p.grad, grads[name].grad) for name, p in ours.named_parameters()])
    return off(logits, their_logits), float(errors.max())  # NaN if any is


@pytest.mark.parametrize("name", ROPES)
def test_every_rope_schema_and_type(name):
    rope = ROPES[name]
    logits, gradient = both(config_dict("llama", **rope))
    assert logits < 1e-5
    assert gradient < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_and_switch(name):
    logits, gradient = both(config_dict(name.split()[0], **FAMILIES[name]), rows=2)
    assert logits < 1e-5
    assert gradient < 1e-4
