"""Decoders that are not of LLaMA's form equal transformers, both ways: GPT-2, GPTBigCode, Falcon, StarCoder2.

Weights have standard deviation 0.3: at 0.02 attention is nearly uniform and wrong angles, heads or masks hide.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headway.checkpoints.folder import load_folder, save_folder
from headway.checkpoints.layouts import LAYOUTS
from headway.checkpoints.layouts.tensors import exported
from headway.checkpoints.restore import load_model
from headway.tokens import Tokens
from tests.checkpoints.hf import off

GPT2 = {"vocab_size": 61, "n_positions": 32, "n_embd": 48, "n_layer": 3, "n_head": 6}
FALCON = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 32,
}
OLD = {**FALCON, "multi_query": False, "bias": True}
NEW = {**FALCON, "new_decoder_architecture": True}
STARCODER2 = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2, gelu, n_inner, untied": (
        "gpt2",
        {**GPT2, "n_inner": 80, "activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "gpt2, scores not scaled": (
        "gpt2",
        {**GPT2, "scale_attn_weights": False, "reorder_and_upcast_attn": True},
    ),
    "santacoder (one kv head)": ("gpt_bigcode", GPT2),
    "starcoder (gelu)": ("gpt_bigcode", {**GPT2, "activation_function": "gelu", "n_inner": 96}),
    "gpt_bigcode, a key per head": ("gpt_bigcode", {**GPT2, "multi_query": False}),
    "falcon 7b": ("falcon", {**FALCON, "num_kv_heads": 6}),
    "falcon 7b, biases, linear scaling": (
        "falcon",
        {
            **FALCON,
            "bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        },
    ),
    "falcon, a key per head, side by side": ("falcon", OLD),
    "falcon, a key per head, one after the other": ("falcon", {**OLD, "parallel_attn": False}),
    "falcon, one key, one after the other": ("falcon", {**FALCON, "parallel_attn": False}),
    "falcon 40b": ("falcon", {**NEW, "num_kv_heads": 2}),
    "falcon 40b, a key per head": ("falcon", {**NEW, "bias": True}),
    "falcon 40b, one key": ("falcon", {**NEW, "num_kv_heads": 1, "tie_word_embeddings": False}),
    "falcon 11b (grouped, one norm)": ("falcon", {**NEW, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "falcon-rw (alibi)": (
        "falcon",
        {**OLD, "num_attention_heads": 8, "alibi": True, "parallel_attn": False},
    ),
    "falcon (alibi, one key, side by side)": ("falcon", {**FALCON, "num_attention_heads": 4, "alibi": True}),
    "starcoder2": ("starcoder2", STARCODER2),
    "starcoder2, window, theta": (
        "starcoder2",
        {**STARCODER2, "sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "starcoder2, no biases, untied": (
        "starcoder2",
        {**STARCODER2, "use_bias": False, "tie_word_embeddings": False, "hidden_act": "gelu"},
    ),
}
IDS = torch.randint(0, 61, (2, 19), generator=torch.Generator().manual_seed(1))


def kernel(config: Any) -> str:
    """The attention of transformers to compare with: its "eager" of Falcon adds ALiBi twice."""
    return "sdpa" if getattr(config, "alibi", False) else "eager"


def theirs(name: str, std: float = 0.3) -> Any:
    """A transformers model of a case: every parameter normal (norm gains around 1), no dropout in effect."""
    family, settings = CASES[name]
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel(config))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in model.named_parameters():
            gain = key.endswith("weight") and p.dim() == 1
            p.copy_(torch.randn(p.shape, generator=g) * std + gain)
    return model.eval()


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """(transformers' model, ours, loaded from the folder that theirs was saved to, that folder)."""
    model = theirs(request.param)
    path = tmp_path_factory.mktemp("theirs")
    model.save_pretrained(path)
    return model, load_model(path), path


def test_row_39_logits_are_theirs(pair: tuple[Any, Any, Path]) -> None:
    model, ours, _ = pair
    with torch.no_grad():
        assert off(ours(IDS), model(IDS).logits) < 1e-5


def test_gradients_are_theirs(pair: tuple[Any, Any, Path]) -> None:
    """Under their names, where a key's bias, whose gradient is 0 without rotary positions, is part of a larger one."""
    model, ours, _ = pair
    weight = torch.randn(2, 19, 61, generator=torch.Generator().manual_seed(2))
    for one, logits in ((model, model(IDS).logits), (ours, ours(IDS))):
        one.zero_grad()
        (logits * weight).sum().backward()
    grads = {key: p.grad for key, p in ours.named_parameters()}
    found = exported(LAYOUTS[ours.spec.family], grads, ours.spec)
    wanted = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for key, p in wanted.items():
        assert off(found[key], p.grad) < 1e-4, key


def test_padded_is_unpadded_and_cached_is_uncached(pair: tuple[Any, Any, Path]) -> None:
    _, ours, _ = pair
    with torch.no_grad():
        whole = ours(IDS)
        for side in ("left", "right"):
            tokens = Tokens.from_lengths([19, 12], side=side)
            at = tokens.valid[1]
            ids = IDS.clone()
            ids[1] = 60
            ids[1, at] = IDS[1, :12]
            assert off(ours(ids, tokens=tokens)[1, at], whole[1, :12]) < 1e-5
        cache = ours.make_cache(2)
        steps = [ours(IDS[:, :7], cache=cache), *(ours(IDS[:, i : i + 1], cache=cache) for i in range(7, 19))]
    assert off(torch.cat(steps, 1), whole) < 1e-5


def test_we_save_and_they_load(pair: tuple[Any, Any, Path], tmp_path: Path) -> None:
    model, ours, path = pair
    save_folder(tmp_path / "ours", ours)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation=kernel(model.config)
    ).eval()
    assert type(again) is type(model)
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    back = load_folder(tmp_path / "ours")
    assert back.spec == load_folder(path).spec == ours.spec
