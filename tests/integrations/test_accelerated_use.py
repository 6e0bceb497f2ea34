"""An accelerated model of `transformers` still trains with Trainer, saves, generates and copies as before."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.errors import ConfigError

pytestmark = pytest.mark.slow

VOCAB, STEPS = 61, 20


def made(**fields: Any) -> Any:
    """Returns a small LLaMA with random weights, whose attention is far from uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config: Any = LlamaConfig(
        **{"vocab_size": VOCAB, "num_hidden_layers": 2, "initializer_range": 0.2, **sizes, **ids, **fields}
    )
    return LlamaForCausalLM(config).eval()


def trained(model: Any, folder: Path, **how: Any) -> list[float]:
    """Returns the losses of `STEPS` steps of `Trainer` on text that repeats itself; some labels are ignored."""
    from transformers import Trainer, TrainingArguments

    noise = torch.Generator().manual_seed(0)
    rows = torch.randint(3, VOCAB, (2 * STEPS, 6), generator=noise).repeat(1, 5)
    labels = torch.where(torch.rand(rows.shape, generator=noise) < 0.3, -100, rows)
    data: Any = [{"input_ids": a, "labels": b} for a, b in zip(rows, labels, strict=True)]
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, report_to="none", use_cpu=True,
        learning_rate=1e-2, disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False, **how,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def objects(model: Any) -> list[Any]:
    """Returns the name and identity of every module, parameter and buffer."""
    named = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
    return [(name, id(value)) for name, value in named]


def standing(model: Any) -> list[Any]:
    """Returns the names of each module's own attributes, and the attention implementation."""
    attributes: list[Any] = [(name, sorted(module.__dict__)) for name, module in model.named_modules()]
    return [*attributes, model.config._attn_implementation]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_has_the_same_losses_and_restore_the_same_objects(
    tmp_path: Path, checkpointing: bool
) -> None:
    from headway.integrations.transformers import accelerate, restore

    plain, model = made(), made()
    expected = trained(plain, tmp_path, activation_checkpointing=checkpointing)
    before, start = objects(model), model.model.layers[0].mlp.up_proj.weight.detach().clone()
    accelerate(model)
    losses = trained(model, tmp_path, activation_checkpointing=checkpointing)
    assert len(losses) == STEPS
    assert losses[-1] < 0.9 * losses[0]
    assert losses == pytest.approx(expected, rel=1e-4)
    model.eval()
    ids = torch.randint(3, VOCAB, (1, 8))
    text = model.generate(ids, max_new_tokens=20, do_sample=False)
    restore(model)
    assert objects(model) == before
    assert standing(model) == standing(plain)  # Trainer leaves attributes, too
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, start)
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), text)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_save_pretrained_writes_the_same_folder(tmp_path: Path, weights: str | None) -> None:
    from headway.integrations.transformers import accelerate

    model = made()
    model.save_pretrained(tmp_path / "plain")
    accelerate(model, weights)
    model.save_pretrained(tmp_path / "ours")
    files = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("plain", "ours")]
    assert files[0] == files[1]
    assert "model.safetensors" in files[0]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"do_sample": True, "temperature": 0.8, "top_k": 7},
        {"prompt_lookup_num_tokens": 3},
        {"repetition_penalty": 1.3, "return_dict_in_generate": True, "output_scores": True},
    ],
    ids=lambda how: next(iter(how)),
)
def test_generated_text_is_as_before(how: dict[str, Any], padded: bool) -> None:
    from headway.integrations.transformers import accelerate, restore

    model = made()
    rows = 1 if "prompt_lookup_num_tokens" in how else 2  # prompt lookup takes one row
    ids = torch.randint(3, VOCAB, (rows, 5)).repeat(1, 2)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4], ids[0, :4] = 0, 0

    def text() -> Tensor:
        torch.manual_seed(1)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=30, **{"do_sample": False, **how})
        ids_out: Tensor = output if isinstance(output, Tensor) else output.sequences
        return ids_out

    expected = text()
    accelerate(model)
    assert torch.equal(text(), expected)
    restore(model)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounded_weights_err_as_much_as_a_plain_model_that_has_them(weights: str) -> None:
    """Inputs are also rounded to 8 bits, independently and by less, so the error is within twice that of weights."""
    from headway.integrations.transformers import accelerate, restore
    from headway.integrations.transformers.products import beside

    model = made()
    ids = torch.randint(3, VOCAB, (4, 40))
    with torch.no_grad():
        exact = model(ids).logits
        taken = accelerate(model, weights).taken
        assert taken[f"product of {weights} weights"] == 14
        ours = model(ids).logits
        rounded = {n: kept.dequantize() for n, m in model.named_modules() if (kept := beside(m)) is not None}
        restore(model)
        plain = copy.deepcopy(model)
        for name, matrix in rounded.items():
            plain.get_submodule(name).weight.copy_(matrix)
        theirs = plain(ids).logits
        assert torch.equal(model(ids).logits, exact)
    error, allowed = ((t - exact).square().mean().sqrt() for t in (ours, theirs))
    assert 0 < error <= 2 * allowed


def test_a_model_with_rounded_weights_is_not_trained_nor_changed() -> None:
    from headway.integrations.transformers import accelerate, restore

    model, ids = made(), torch.randint(3, VOCAB, (1, 8))
    accelerate(model, "int4")
    assert not any(p.requires_grad for p in model.parameters())
    with pytest.raises(ConfigError, match=r"cannot be trained; restore\(model\), train"):
        model.train()(ids)
    model.eval()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(2)
        with pytest.raises(ConfigError, match="weights have changed after they were quantized"):
            model(ids)
    restore(model)
    assert all(p.requires_grad for p in model.parameters())


def test_compressed_weights_change_no_bit() -> None:
    from headway.integrations.transformers import accelerate, restore

    model, ids = made().to(torch.bfloat16), torch.randint(3, VOCAB, (2, 80))
    before = standing(model)
    accelerate(model)
    with torch.no_grad():
        expected_logits = [model(ids).logits, model(ids[:, :3]).logits]
    text = model.generate(ids[:, :9], max_new_tokens=20, do_sample=False)
    restore(model)
    report = accelerate(model, "compressed")
    assert report.taken["product of compressed weights"] == 7 * len(model.model.layers) + 1
    with torch.no_grad():
        for expected, rows in zip(expected_logits, (ids, ids[:, :3]), strict=True):
            assert torch.equal(model(rows).logits, expected)
    assert torch.equal(model.generate(ids[:, :9], max_new_tokens=20, do_sample=False), text)
    model.train()
    with pytest.raises(ConfigError, match="cannot be trained; restore"):
        model(ids)
    restore(model.eval())
    assert standing(model) == before
    with pytest.raises(ConfigError, match=r"needs weights in bfloat16 on the CPU, got torch\.float32"):
        accelerate(made(), "compressed")


@pytest.mark.parametrize("weights", ["int5", "INT8", ""])
def test_other_weights_are_refused_and_leave_the_model(weights: str) -> None:
    from headway.integrations.transformers import accelerate

    model = made()
    before = standing(model)
    with pytest.raises(ConfigError, match=r"unknown weights .*; there are int8, int4, compressed"):
        accelerate(model, weights)
    assert standing(model) == before


def test_a_model_is_accelerated_once() -> None:
    from headway.integrations.transformers import accelerate, restore

    model = made()
    accelerate(model)
    before = standing(model)
    with pytest.raises(ConfigError, match=r"accelerated already; call restore\(model\) first"):
        accelerate(model, "int8")
    assert standing(model) == before
    restore(model)
    accelerate(model, "int8")


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_copy_is_accelerated_by_itself(weights: str | None) -> None:
    from headway.integrations.transformers import accelerate, restore

    model, ids = made(), torch.randint(3, VOCAB, (1, 8))
    accelerate(model, weights)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    clone = copy.deepcopy(model)
    restore(model)
    assert "forward" in clone.model.layers[0].mlp.__dict__
    assert clone.model.layers[0].mlp.forward.__self__ is clone.model.layers[0].mlp
    assert torch.equal(clone.generate(ids, max_new_tokens=12, do_sample=False), expected)
    restore(clone)
    assert all(p.requires_grad for p in clone.parameters())
    with torch.no_grad():
        assert torch.equal(clone(ids).logits, model(ids).logits)


def test_an_accelerated_model_is_not_pickled() -> None:
    from headway.integrations.transformers import accelerate, restore

    model = made()
    accelerate(model)
    for save in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(ConfigError, match=r"cannot be pickled; save it with save_pretrained"):
            save(model)
    restore(model)
    assert pickle.dumps(model)
