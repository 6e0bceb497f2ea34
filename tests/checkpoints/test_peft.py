"""Adapters against PEFT itself: it reads our folders, we read its folders, and both train alike."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headway
from headway.checkpoints import build_model, load_adapter, load_folder, save_adapter, save_folder
from headway.checkpoints.bases import Base
from headway.data import Batch
from headway.nn import Adapter, Lora, adapted, attach, named_adapter_parameters
from headway.text import train_bpe
from headway.train import TextConfig, train
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.optimizer import Optimizer
from headway.train.tasks.base import Objective
from headway.train.trainer import fit
from tests.checkpoints.adapters import IDS, KINDS, small, trained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # PEFT asks for it
]
FAMILIES = ("llama", "qwen3", "phi", "gpt2", "falcon", "gpt_neox", "gpt_bigcode", "mpt", "bloom", "roformer")


class Rows(Objective[Any]):
    """An objective with one given batch of ids for each step."""

    def __init__(self, ids: list[torch.Tensor]) -> None:
        self.ids = ids

    def batches(self, step: int) -> list[Batch]:
        return [Batch({"ids": self.ids[step][:, :-1]}, self.ids[step][:, 1:])]


def peft_of(base: Path, adapter: Path, **options: Any) -> Any:
    """Returns PEFT's model of both folders; a warning of PEFT (of a missing key) is an error."""
    from peft import PeftModel

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    return PeftModel.from_pretrained(model, str(adapter), **options).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_folders_of_ours_are_read_by_peft_and_its_folders_by_us(
    family: str, kind: str, tmp_path: Path
) -> None:
    model = small(family)
    save_folder(tmp_path / "base", model)
    base_logits, adapter = model(IDS), trained(Adapter.fresh(model, KINDS[kind]))
    attach(model, adapter)
    save_adapter(tmp_path / "ours", adapter, model.spec, base=Base.of(tmp_path / "base"))
    peer = peft_of(tmp_path / "base", tmp_path / "ours")
    torch.testing.assert_close(peer(IDS).logits, model(IDS), rtol=0, atol=1e-5)
    assert (peer(IDS).logits - base_logits).abs().max() > 5e-3  # both have applied it
    peer.save_pretrained(tmp_path / "theirs")
    reloaded = build_model(load_folder(tmp_path / "base"))
    attach(reloaded, load_adapter(tmp_path / "theirs", reloaded.spec))
    torch.testing.assert_close(reloaded(IDS), model(IDS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_leaves_is_read_by_peft(kind: str, tmp_path: Path) -> None:
    """The base model is stored in its family's pairing; we and PEFT load the run's adapter and compute the same."""
    texts = [" ".join(f"word{i % 7} and {i % 5}" for i in range(start, start + 30)) for start in range(40)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = train_bpe(texts, 265)
    model = small("llama", vocab=tokenizer.vocab_size, kv_heads=2)
    save_folder(tmp_path / "base", model, tokenizer=tokenizer)
    settings = {
        "data": str(tmp_path / "text.jsonl"),
        "model": str(tmp_path / "base"),
        "adapter": kind,
        "rank": 3,
    }
    run_settings = {
        "context": 32,
        "batch_tokens": 128,
        "steps": 5,
        "dtype": "fp32",
        "out": str(tmp_path / "run"),
    }
    result = train(TextConfig.of(settings | run_settings), quiet=True)
    peer, ours = peft_of(tmp_path / "base", result.model), headway.load(result.model).model
    torch.testing.assert_close(peer(IDS).logits, ours(IDS), rtol=0, atol=1e-5)
    assert (ours(IDS) - model(IDS)).abs().max() > 5e-3


def test_transformers_loads_base_and_adapter_from_the_adapters_folder(tmp_path: Path) -> None:
    model = small("llama")
    save_folder(tmp_path / "base", model)
    adapter = trained(Adapter.fresh(model, KINDS["lora"]))
    save_adapter(tmp_path / "a", adapter, model.spec, base=Base.of(tmp_path / "base"))
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    attach(model, adapter)
    torch.testing.assert_close(peer(IDS).logits, model(IDS), rtol=0, atol=1e-5)


def test_ranks_and_alphas_by_pattern(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = small("llama")
    save_folder(tmp_path / "base", model)
    config = LoraConfig(
        r=4,
        lora_alpha=7,
        target_modules=["q_proj", "down_proj"],
        rank_pattern={"down_proj": 6, r"layers\.1\.self_attn\.q_proj": 2},
        alpha_pattern={"q_proj": 5},
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(0)
    peer = get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config).eval()
    peer.save_pretrained(tmp_path / "theirs")
    adapter = load_adapter(tmp_path / "theirs", model.spec)
    assert adapter.layers["model.layers.1.self_attn.q_proj"] == Lora(rank=2, alpha=5)
    assert adapter.layers["model.layers.0.self_attn.q_proj"] == Lora(rank=4, alpha=5)
    assert adapter.layers["model.layers.0.mlp.down_proj"] == Lora(rank=6, alpha=7)
    attach(model, adapter)
    torch.testing.assert_close(peer(IDS).logits, model(IDS), rtol=0, atol=1e-5)
    save_adapter(tmp_path / "ours", adapter, model.spec)
    reread = peft_of(tmp_path / "base", tmp_path / "ours")
    torch.testing.assert_close(reread(IDS).logits, model(IDS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_after_20_steps_both_trainers_hold_the_same_adapter(kind: str, tmp_path: Path) -> None:
    """PEFT's model is trained by a loop with torch's AdamW, ours by `fit`."""
    model = small("llama", kv_heads=2)
    save_folder(tmp_path / "base", model)
    adapter = Adapter.fresh(model, KINDS[kind])
    save_adapter(tmp_path / "a", adapter, model.spec)
    peer = peft_of(tmp_path / "base", tmp_path / "a", is_trainable=True).train()
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    peer_optimizer = torch.optim.AdamW([p for p in peer.parameters() if p.requires_grad], **options)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(64, (4, 17), generator=generator) for _ in range(20)]
    for ids in batches:
        logits = peer(ids[:, :-1]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        peer_optimizer.step()
        peer_optimizer.zero_grad()
    attach(model, adapter)
    parameters = dict(named_adapter_parameters(model))
    optimizer = Optimizer(
        parameters, [(1e-3, torch.optim.AdamW(parameters.values(), **options))], MicrobatchPool(1)
    )
    fit(Rows(batches), model, optimizer, steps=20)
    peer.save_pretrained(tmp_path / "theirs")
    actual, expected = Adapter.of(model, "default"), load_adapter(tmp_path / "theirs", model.spec)
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        torch.testing.assert_close(actual.tensors[name], value, rtol=0, atol=1e-5)
        assert (value - adapter.tensors[name]).abs().max() > 5e-3  # it was trained
    assert len(dict(adapted(model))) == 14
