"""Training an adapter beside a frozen model: what is trained, saved and held in memory, and how runs resume."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import headway
from headway.checkpoints import load_folder, save_folder
from headway.checkpoints.bases import fingerprint
from headway.errors import CheckpointError, ConfigError
from headway.models import ModelSpec, build, cost
from headway.nn import Lora, adapted, named_adapter_parameters
from headway.storage.safetensors import write_safetensors
from headway.text import train_bpe
from headway.train import TextConfig, train
from headway.train.checkpoint import checkpoints
from headway.train.dry_run import describe_run
from headway.train.inputs import Inputs
from headway.train.metrics import read_metrics
from headway.train.microbatch_pool import MasterWeights, MicrobatchPool
from tests.train import runs
from tests.train.conftest import documents
from tests.train.prepared import prepared
from tests.train.runs import SIZE, llama

Make = Callable[..., TextConfig]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return llama(tmp_path / "base")


@pytest.fixture
def beside(settings: Make, tmp_path: Path, base: Path) -> Make:
    """Returns a function that makes the settings of an adapter run beside `base`."""
    return partial(runs.beside, settings, tmp_path)


@pytest.mark.parametrize(("kind", "dtype"), [("lora", "fp32"), ("rslora", "bf16"), ("dora", "bf16")])
def test_a_run_learns_and_leaves_an_adapter_and_the_model_as_it_was(
    kind: str, dtype: str, beside: Make, base: Path
) -> None:
    before = fingerprint(load_folder(base))
    config = beside(adapter=kind, dtype=dtype, steps=12)
    result = train(config, quiet=True)
    losses = [record["loss"] for record in read_metrics(result.metrics)]
    assert losses[-1] < losses[0] - 0.1
    assert fingerprint(load_folder(base)) == before
    assert {p.name for p in result.model.iterdir()} >= {
        *("adapter_config.json", "adapter_model.safetensors", "tokenizer.json")
    }
    settings = json.loads((result.model / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    assert (settings["use_rslora"], settings["use_dora"]) == (kind == "rslora", kind == "dora")
    stored = load_file(result.model / "adapter_model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.float32}
    lm = headway.load(result.model)
    assert lm.tokenizer is not None
    assert lm.generate("one two", max_new_tokens=3).ids
    kept = checkpoints(Path(config.out))[-1]
    assert sorted(p.name for p in kept.glob("*.safetensors")) == [
        "adapter.safetensors",
        "optimizer.safetensors",
    ]
    numbers = sum(value.numel() for value in load_file(kept / "adapter.safetensors").values())
    lora = Lora(rank=4, magnitude=kind == "dora")
    assert numbers == cost.adapter_parameters(load_folder(base).spec, lora)


@pytest.mark.parametrize("how", [{"gradient_checkpointing": "block"}, {"workers": 2, "threads": 2}])
def test_blocks_computed_again_and_workers_side_by_side_give_the_same_adapter(
    how: dict[str, Any], beside: Make, tmp_path: Path
) -> None:
    adapters = []
    for number, changes in enumerate(({}, how)):
        result = train(
            beside(steps=3, adapter="dora", out=str(tmp_path / str(number)), **changes), quiet=True
        )
        adapters.append(load_file(result.model / "adapter_model.safetensors"))
    for name, value in adapters[0].items():
        torch.testing.assert_close(adapters[1][name], value, rtol=1e-4, atol=1e-5)


def test_an_encoder_is_adapted_to_masked_tokens(corpus: Path, tmp_path: Path) -> None:
    texts = documents(0, 60)
    tokenizer = train_bpe(texts, 300, special_tokens=["[MASK]", "[PAD]"])
    size = {**SIZE, "kv_heads": 2, "vocab": tokenizer.vocab_size}
    save_folder(
        tmp_path / "base", build(ModelSpec.of("roformer", **size), seed=0).eval(), tokenizer=tokenizer
    )
    config = TextConfig.of({
        "task": "masked-lm", "data": str(corpus), "model": str(tmp_path / "base"), "adapter": "lora", "rank": 2,
        "context": 24, "batch_tokens": 96, "steps": 2, "dtype": "fp32", "out": str(tmp_path / "run"),
    })  # fmt: skip
    result = train(config, quiet=True)
    names = load_file(result.model / "adapter_model.safetensors").keys()
    assert all(name.startswith("base_model.model.roformer.encoder.layer.") for name in names)
    assert len(names) == 2 * 2 * 6
    model = headway.load(result.model).model
    assert len(dict(adapted(model))) == 12
    vectors = [
        headway.load(folder, task="embed").embed(["one two"]) for folder in (tmp_path / "base", result.model)
    ]
    assert (vectors[0] - vectors[1]).abs().max() > 1e-4


def test_another_model_under_the_adapter_is_refused(beside: Make, base: Path) -> None:
    train(beside(steps=2, save_every=1), quiet=True)
    spec = load_folder(base).spec
    tokenizer = headway.load(base).tokenizer
    save_folder(base, build(spec, seed=1).eval(), tokenizer=tokenizer, overwrite=True)
    with pytest.raises(
        ConfigError, match=r"trained on another model than the one now in .*base \(fingerprints"
    ):
        train(beside(steps=4, save_every=1), resume="auto", quiet=True)


def test_an_adapter_of_a_run_is_refused_by_another_model(beside: Make, base: Path, tmp_path: Path) -> None:
    """An adapter has the fingerprint of the model that the run froze, even if the folder has another model now."""
    result = train(beside(steps=1), quiet=True)
    frozen, folder = fingerprint(load_folder(base)), load_folder(base)
    assert headway.load(result.model).generate("one", max_new_tokens=1).ids
    tokenizer = headway.load(base).tokenizer
    save_folder(base, build(folder.spec, seed=1).eval(), tokenizer=tokenizer, overwrite=True)
    with pytest.raises(CheckpointError, match=rf"{frozen}, but {base} has {fingerprint(load_folder(base))}"):
        headway.load(result.model)


def test_another_adapter_in_the_checkpoint_is_refused(beside: Make, tmp_path: Path) -> None:
    train(beside(steps=1), quiet=True)
    with pytest.raises(ConfigError, match=r"rank was 4, is 5"):
        train(beside(steps=2, rank=5), resume="auto", quiet=True)
    file = checkpoints(tmp_path / "run")[-1] / "adapter.safetensors"
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    file.unlink()
    write_safetensors(file, tensors)
    with pytest.raises(CheckpointError, match="its adapter differs from that of the settings"):
        train(beside(steps=2), resume="auto", quiet=True)


def test_an_adapter_is_no_model_to_begin_with(beside: Make) -> None:
    result = train(beside(steps=1), quiet=True)
    with pytest.raises(CheckpointError, match=r"is an adapter, not a model; .*headway surgery merge"):
        train(beside(model=str(result.model), out=str(result.out) + "2"), quiet=True)


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_frozen_is_in_memory_once_and_has_no_gradient(
    dtype: torch.dtype, nf4: bool, base: Path, beside: Make
) -> None:
    config = beside(dtype="bf16" if dtype == torch.bfloat16 else "fp32", base="nf4" if nf4 else None)
    task = prepared(config)
    weights = MasterWeights(task.model, dtype, replicas=3)
    names = {name for name, _ in named_adapter_parameters(task.model)}
    states = [dict(m.named_parameters()) | dict(m.named_buffers()) for m in (task.model, *weights.replicas)]
    for name, value in states[0].items():
        frozen = name not in names
        assert {id_of(state[name]) for state in states[1:]} == {id_of(states[1][name])}  # replicas share
        assert (id_of(states[1][name]) == id_of(value)) == (frozen or dtype == torch.float32), name
        if value.is_floating_point():
            assert value.dtype == (dtype if frozen else torch.float32), name
    for replica, batch in zip(weights.replicas, task.batches(0), strict=False):
        task.loss(replica, batch).total.backward()
    weights.collect()
    assert {name for name, p in task.model.named_parameters() if p.grad is not None} == names
    optimizer = task.optimizer(MicrobatchPool(1))
    optimizer.step(1.0)
    moments = sum(v.numel() for key, v in optimizer.state_tensors().items() if "exp" in key)
    assert moments == 2 * cost.adapter_parameters(task.model.spec, Lora(rank=4))
    assert all((layer.kept.name == "nf4") == nf4 for _, layer in adapted(task.model))


def id_of(value: torch.Tensor) -> int:
    return value.data_ptr()


def test_a_dry_run_counts_what_is_trained(beside: Make, base: Path) -> None:
    spec = load_folder(base).spec
    trained = cost.adapter_parameters(spec, Lora(rank=4))
    plan = describe_run(beside(dtype="bf16"))
    assert sum(plan.groups.values()) == plan.groups["matrices (decay)"] == trained
    assert plan.memory["frozen weights"] == 2 * cost.parameter_count(spec)
    assert plan.memory["optimizer"] == 8 * trained
    assert plan.memory["gradients"] <= 2 * (cost.trained_bytes(trained) - 8 * trained)
    quantized = describe_run(beside(dtype="bf16", base="nf4"))
    assert quantized.memory["frozen weights"] < plan.memory["frozen weights"]


def test_frozen_bytes_are_those_of_the_model(base: Path, beside: Make) -> None:
    for nf4 in (False, True):
        model = build(load_folder(base).spec, seed=0)
        Inputs.of(beside(base="nf4" if nf4 else None, dtype="bf16")).adapt(model)
        names = {name for name, _ in named_adapter_parameters(model)}
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        frozen = sum(v.numel() * v.itemsize for name, v in tensors.items() if name not in names)
        kept = cost.Kept(torch.bfloat16, "nf4" if nf4 else None)
        assert frozen == sum(cost.kept_bytes(model.spec, kept).values())


def sizes(layers: int, width: int, heads: int, hidden: int, vocab: int) -> ModelSpec:
    return ModelSpec.of(
        "llama", vocab=vocab, layers=layers, width=width, heads=heads, kv_heads=4, hidden=hidden
    )


@pytest.mark.parametrize(
    ("spec", "share"),
    [(sizes(22, 2048, 32, 5632, 32000), 0.02), (sizes(8, 512, 8, 1408, 8192), 0.04)],
)
def test_a_small_share_of_gradients_and_moments_is_needed(spec: ModelSpec, share: float) -> None:
    """Rank 16 on every linear layer, at 1.1 B (TinyLlama's sizes) and at 32 M parameters."""
    adapter_bytes = cost.trained_bytes(cost.adapter_parameters(spec, Lora(rank=16)))
    assert adapter_bytes / cost.trained_bytes(cost.parameter_count(spec)) < share
