"""ModernBERT equals transformers, there and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from headway.checkpoints import config_from_spec, load_folder, save_folder, spec_from_config
from headway.checkpoints.hf.layouts import LAYOUTS
from headway.checkpoints.hf.layouts.tensors import exported
from headway.checkpoints.restore import build_model
from headway.errors import ConfigError
from headway.models import ModelSpec, cost
from headway.patterns import Full, Window
from headway.positions import PerLayer, Rotary
from headway.tokens import Tokens
from tests.checkpoints.hf import off
from tests.checkpoints.shares import share

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "local_attention": 6,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id"), 60),
}
BIASES = {**dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True)}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "masked-lm": (AutoModelForMaskedLM, {}),
    "masked-lm, biases, untied": (AutoModelForMaskedLM, {**BIASES, "tie_word_embeddings": False}),
    "states, old keys": (AutoModel, {"global_attn_every_n_layers": 2, "global_rope_theta": 500.0}),
}
IDS = torch.randint(0, 60, (2, 19), generator=torch.Generator().manual_seed(1))


def peer(name: str) -> Any:
    kind, settings = CASES[name]
    config = AutoConfig.for_model("modernbert", **SHAPE, **settings)
    model = kind.from_config(config, attn_implementation="eager")
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in model.named_parameters():
            gain = key.endswith("weight") and p.dim() == 1
            p.copy_(torch.randn(p.shape, generator=draw) * 0.3 + gain)
    return model.eval()


def output(model: Any, **given: Tensor) -> Tensor:
    found = model(**given)
    return found.logits if "logits" in found else found.last_hidden_state  # type: ignore[no-any-return]


@share("name", CASES, 0, 2)
def test_it_is_theirs_with_its_gradients_padded_and_packed_and_saved_again(name: str, tmp_path: Path) -> None:
    model = peer(name)
    model.save_pretrained(tmp_path / "theirs")
    ours = build_model(load_folder(tmp_path / "theirs"))
    assert cost.parameter_count(ours.spec) == sum(p.numel() for p in model.parameters())
    tokens = Tokens.from_lengths([19, 12])
    wanted = output(model, input_ids=IDS, attention_mask=tokens.valid.long())[tokens.valid]
    got = ours(IDS, tokens=tokens)[tokens.valid]
    assert off(got.detach(), wanted.detach()) < 1e-5
    packed = ours(IDS[tokens.valid][None], tokens=Tokens.packed([[19, 12]]))[0]
    assert off(packed.detach(), wanted.detach()) < 1e-5

    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    for value in (wanted, got):
        (value * weight).sum().backward()
    grads = {key: p.grad for key, p in ours.named_parameters()}
    found = exported(LAYOUTS["modernbert"].tensors, grads, ours.spec)
    theirs = dict(model.named_parameters())
    assert found.keys() == theirs.keys()
    for key, p in theirs.items():
        assert off(found[key], p.grad) < 1e-4, key

    save_folder(tmp_path / "ours", ours)
    again = type(model).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    with torch.no_grad():
        assert torch.equal(output(again, input_ids=IDS), output(model, input_ids=IDS))
    assert load_folder(tmp_path / "ours").spec == ours.spec


def test_its_published_config_and_what_is_refused() -> None:
    """answerdotai/ModernBERT-base, without what every config has."""
    config = {
        "model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "attention_bias": False,
        "attention_dropout": 0.0, "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
        "classifier_pooling": "mean", "decoder_bias": True, "deterministic_flash_attn": False, "embedding_dropout": 0.0,
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "gradient_checkpointing": False,
        "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0, "initializer_range": 0.02,
        "intermediate_size": 1152, "layer_norm_eps": 1e-05, "local_attention": 128, "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "norm_bias": False, "norm_eps": 1e-05,
        "num_attention_heads": 12, "num_hidden_layers": 22, "position_embedding_type": "absolute",
        "sep_token_id": 50282, "cls_token_id": 50281, "tie_word_embeddings": True, "vocab_size": 50368,
    }  # fmt: skip
    spec = spec_from_config(config)
    assert cost.parameter_count(spec) == 149_655_232  # of its card: 149 million, and the bias of the output
    assert spec.patterns[:4] == (Full(), Window.around(64), Window.around(64), Full())
    assert isinstance(spec.positions, PerLayer)
    assert spec.layer_positions[:2] == (Rotary(1.6e5, pairing="halves"), Rotary(1e4, pairing="halves"))
    assert spec_from_config(config_from_spec(spec)) == spec
    with pytest.raises(ConfigError, match="embedding_dropout"):
        spec_from_config({**config, "embedding_dropout": 0.1})
    own = ModelSpec.of("modernbert", vocab=61, width=48, layers=4, heads=6, hidden=80)
    assert config_from_spec(own)["model_type"] == "modernbert"
