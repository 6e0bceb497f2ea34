"""Runs whose heads and hidden units several processes share are those of one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import headway
from headway.checkpoints import load_folder, save_folder
from headway.data import Batch
from headway.errors import ConfigError
from headway.models import ModelSpec, build
from headway.nn import Lora
from headway.nn.adapters import Adapter, attach
from headway.parallel import Mesh, Parallel, TensorParallel, joined
from headway.parallel.processes import ALONE
from headway.text import train_bpe
from headway.train import Callback, CallbackContext, TextConfig, train
from headway.train.checkpoint import MOMENTS, state_tensors
from headway.train.metrics import read_metrics
from headway.train.optimizer import Optimizer
from headway.train.sharing import divide, spread
from headway.train.trainer import Trainer
from tests.parallel import steps
from tests.parallel.test_tensor import Rank
from tests.train.conftest import documents
from tests.train.objectives import Given
from tests.train.prepared import prepared
from tests.train.processes import together
from tests.train.test_resume import weights

Make = Callable[..., TextConfig]
SHARED: dict[str, Any] = {
    "heads": 4, "kv_heads": 2, "dropout": 0.1, "clip": 0.3,
    "micro_batch": 4, "workers": 1, "steps": 6, "save_every": 2, "keep_last": 9,
}  # fmt: skip


def stepped(
    name: str, mesh: Mesh, parallel: Parallel = ALONE, lora: Lora | None = None
) -> tuple[list[float | None], list[float], Any]:
    """Losses, norms and weights of three clipped steps in float64, with dropout where rows are whole; of a model or of
    an adapter. 11 hidden units a rank, of which a part of the axis fsdp has 6 or 5."""
    p = 0.0 if mesh.cp > 1 else 0.1
    drops = {"dropout": p, "attention_dropout": p, "activation_dropout": p}
    how: dict[str, Any] = {
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 4,
        "qk_norm": "head",
        "hidden": 11 * mesh.tp,
    }
    net = steps.model_of(name, vocab=32, **how, **drops)
    if lora is not None:
        attach(net, Adapter.fresh(net, replace(lora, dropout=p)), dtype=torch.float64)
    divided = divide(SimpleNamespace(model=net), parallel, torch.float32)  # type: ignore[arg-type]
    ids, targets, tokens = steps.rows(name)
    one = Batch({"ids": ids, "tokens": tokens}, targets)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = Optimizer.single(net, torch.optim.SGD(trained, 0.1 if lora is None else 1.0))
    trainer = Trainer(Given([one] * mesh.batches), net, optimizer, clip=0.5, seed=0, parallel=parallel)
    done = [trainer.step() for _ in range(3)]
    whole: Any = net if divided is None else divided.whole()
    return [stats.loss for stats in done], [stats.grad_norm for stats in done], whole.state_dict()


BOTH = Mesh(fsdp=2, tp=2)
SLOW = [
    pytest.param(mesh, name, marks=pytest.mark.slow, id=f"{mesh}-{name}")
    for mesh in (Mesh(dp=2, tp=2), BOTH, Mesh(cp=2, tp=2), Mesh(tp=4))
    for name in steps.PATTERNS
    if (mesh, name) != (BOTH, "sink")
]


@pytest.mark.parametrize(
    ("mesh", "name"), [(Mesh(tp=2), "sink"), (Mesh(tp=2), "global"), (BOTH, "sink"), *SLOW]
)
def test_row_45_steps_of_shared_heads_are_those_of_one_process(mesh: Mesh, name: str, tmp_path: Path) -> None:
    """Loss, norm of the whole gradient, and weights; dropout is that of one process, of attention weights, too."""
    expected = stepped(name, mesh)

    def rank(number: int) -> None:
        with joined(str(mesh)) as parallel:
            for ours, theirs in zip(stepped(name, mesh, parallel), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)

    together(mesh.ranks, rank, tmp_path)


ADAPTED = [
    (Mesh(tp=2), Lora(rank=3, alpha=30)),
    pytest.param(Mesh(tp=2), Lora(rank=3, alpha=30, magnitude=True), marks=pytest.mark.slow),
    pytest.param(Mesh(dp=2, tp=2), Lora(rank=3, alpha=30), marks=pytest.mark.slow),
    pytest.param(Mesh(cp=2, tp=2), Lora(rank=3, alpha=30, magnitude=True), marks=pytest.mark.slow),
    pytest.param(BOTH, Lora(rank=3, alpha=30), marks=pytest.mark.slow),
    pytest.param(BOTH, Lora(rank=3, alpha=30, magnitude=True), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "lora"), ADAPTED, ids=str)
def test_row_45_steps_of_shared_adapters_are_those_of_one_process(
    mesh: Mesh, lora: Lora, tmp_path: Path
) -> None:
    """With dropout of what adapters are given, too, of which o_proj and down_proj have a part on each rank."""
    expected = stepped("sink", mesh, lora=lora)
    assert expected[0][-1] < expected[0][0] - 1e-3

    def rank(number: int) -> None:
        with joined(str(mesh)) as parallel:
            for ours, theirs in zip(stepped("sink", mesh, parallel, lora), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)

    together(mesh.ranks, rank, tmp_path)


def by(mesh: Mesh, config: TextConfig, folder: Path, resume: str = "never") -> TextConfig:
    """Train by the processes of a mesh, in a folder of the run's own; its settings."""
    own = config.model_copy(update={"mesh": str(mesh), "out": str(folder / "run")})
    together(mesh.ranks, lambda rank: train(own, resume=resume), folder / "said")
    return own


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=2", "cp=2"])
def test_who_resumes_a_run_of_shared_layers_or_rows_is_told_of_other_bits(
    settings: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], mesh: str
) -> None:
    """Whose sums are rounded otherwise; by processes of the same mesh the run goes on to the bit."""
    config = settings(**SHARED | {"dropout": 0.0}, mesh=mesh, out=str(tmp_path / "shared"))
    together(2, lambda rank: train(config), tmp_path / "said")
    there = Path(config.out) / "checkpoint-4"
    alone, alike = (
        config.model_copy(update={"mesh": m, "out": str(tmp_path / name)})
        for name, m in (("alone", None), ("alike", mesh))
    )
    train(alone, resume=str(there))
    assert f"not bit for bit the same run: {mesh[:2]}: 2 then, 1 now" in capsys.readouterr().err
    together(2, lambda rank: train(alike, resume=str(there)), tmp_path / "said")
    assert "not bit for bit" not in (tmp_path / "said" / "0").read_text()
    assert all(torch.equal(t, weights(config.out)[name]) for name, t in weights(alike.out).items())


def test_row_45_a_run_goes_on_at_any_mesh(settings: Make, tmp_path: Path) -> None:
    """Folders are those of one process, with whole weights and moments; parts of them are read again to the bit."""
    config = settings(**SHARED, optimizer="muon", validation_share=0.1, eval_every=3)
    train(config, quiet=True)
    shared = by(Mesh(tp=2), config, tmp_path / "shared")
    assert_close(shared.out, config.out, after=0)
    again = by(Mesh(tp=2), config, tmp_path / "again", f"{shared.out}/checkpoint-2")
    assert weights(again.out).keys() == weights(config.out).keys()
    assert all(torch.equal(t, weights(shared.out)[name]) for name, t in weights(again.out).items())
    shards = by(Mesh(tp=2), config.model_copy(update={"checkpoints": "shards"}), tmp_path / "shards")
    parts = f"{shards.out}/checkpoint-4"
    assert len(list(Path(parts).glob("model-shard-*"))) == 2
    files = [open_state(Path(out) / "checkpoint-4") for out in (shards.out, shared.out)]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0].keys() | files[1].keys())
    last = by(Mesh(tp=2), config, tmp_path / "last", parts)
    assert all(torch.equal(t, weights(shared.out)[name]) for name, t in weights(last.out).items())
    alone = config.model_copy(update={"out": str(tmp_path / "alone")})
    train(alone, resume=f"{shared.out}/checkpoint-2", quiet=True)
    assert_close(alone.out, config.out, after=2)


def open_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights and moments."""
    return {**load_folder(checkpoint).tensors, **state_tensors(checkpoint, MOMENTS)}


BESIDE: dict[str, dict[str, Any]] = {
    "lora": {"adapter": "lora", "adapter_dropout": 0.2},
    "dora": {"adapter": "dora", "optimizer": "muon", "matrix_lr": 0.002},
    "qlora": {"adapter": "lora", "base": "nf4"},
    "bf16": {"adapter": "dora", "base": "nf4", "dtype": "bf16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("which", BESIDE)
def test_row_45_adapters_of_shared_layers_go_on_at_any_mesh(corpus: Path, tmp_path: Path, which: str) -> None:
    """Checkpoints and what is left are an adapter's folders, of whole tensors; prompts are sampled by all layers."""
    tokenizer = train_bpe(documents(0, 60), 300)
    size = {"layers": 2, "width": 128, "heads": 4, "kv_heads": 2, "hidden": 128, "trained_context": 24}
    spec = ModelSpec.of("llama", vocab=tokenizer.vocab_size, **size, init_std=0.1)
    save_folder(tmp_path / "base", build(spec, seed=0).eval(), tokenizer=tokenizer)
    config = TextConfig.of({
        "data": str(corpus), "model": str(tmp_path / "base"), "rank": 4, "context": 24, "batch_tokens": 24 * 8,
        "micro_batch": 4, "steps": 6, "dtype": "fp32", "lr": 0.01, "clip": 0.3, "save_every": 2, "keep_last": 9,
        "sample_prompts": ("one",), "sample_tokens": 4, "sample_every": 2, "validation_share": 0.1,
        "out": str(tmp_path / "run"),
    } | BESIDE[which])  # fmt: skip
    rtol = 2e-2 if which == "bf16" else 1e-4
    train(config, quiet=True)
    shared = by(Mesh(tp=2), config, tmp_path / "shared")
    assert_close(shared.out, config.out, after=0, rtol=rtol)
    again = by(Mesh(tp=2), config, tmp_path / "again", f"{shared.out}/checkpoint-2")
    for name in ("checkpoint-6/adapter.safetensors", "checkpoint-6/optimizer.safetensors"):
        ours, theirs, one = (load_file(f"{run}/{name}") for run in (again.out, shared.out, config.out))
        assert {n: t.shape for n, t in one.items()} == {n: t.shape for n, t in ours.items()}
        assert all(torch.equal(ours[n], theirs[n]) for n in one)
    for run, start, mesh in (("alone", shared.out, None), ("both", config.out, Mesh(tp=2))):
        if mesh is None:
            other = config.model_copy(update={"out": str(tmp_path / run)})
            train(other, resume=f"{start}/checkpoint-2", quiet=True)
        else:
            other = by(mesh, config, tmp_path / run, f"{start}/checkpoint-2")
        assert_close(other.out, config.out, after=2, rtol=rtol)
    assert headway.load(Path(shared.out) / "final").generate("one two", max_new_tokens=3).ids


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(tp=2), BOTH], ids=str)
def test_callbacks_are_given_the_whole_model(settings: Make, tmp_path: Path, mesh: Mesh) -> None:
    config = settings(**SHARED, sample_prompts=("one",), sample_tokens=4, sample_every=2)
    own = config.model_copy(update={"mesh": str(mesh), "out": str(tmp_path / "run")})

    def seen(context: CallbackContext) -> None:
        model: Any = context.model
        counts = {m.out_features for n, m in model.named_modules() if n.endswith("q_proj")}
        assert counts == {model.spec.heads * model.spec.head_dim}, "of all heads"
        (tmp_path / f"seen-{context.step}").touch()

    together(
        mesh.ranks, lambda rank: train(own, callbacks=[Callback(seen, every_steps=2)]), tmp_path / "said"
    )
    assert len(list(tmp_path.glob("seen-*"))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2), Mesh(cp=2, tp=2)], ids=str)
@pytest.mark.parametrize(("dtype", "optimizer"), [("fp32", "adamw"), ("fp32", "muon"), ("bf16", "adamw")])
def test_row_45_runs_of_four_processes(
    settings: Make, tmp_path: Path, mesh: Mesh, dtype: str, optimizer: str
) -> None:
    how = {**SHARED, "dtype": dtype, "optimizer": optimizer, "validation_share": 0.1, "eval_every": 3}
    config = settings(**how | ({"dropout": 0.0} if mesh.cp > 1 else {}))
    train(config, quiet=True)
    shared = by(mesh, config, tmp_path / "shared")
    assert_close(shared.out, config.out, after=0, rtol=1e-4 if dtype == "fp32" else 2e-2)
    by(mesh, config, tmp_path / "again", f"{config.out}/checkpoint-4")


def assert_close(out: str, reference: str, after: int, rtol: float = 1e-4) -> None:
    """Loss, norm and held-out loss of each step behind `after`, and the shapes of what is saved."""

    def measured(folder: str) -> list[list[float]]:
        records = [r for r in read_metrics(Path(folder) / "metrics.jsonl") if r.get("step", 0) > after]
        return [[r[name] for name in ("loss", "grad_norm", "val_loss") if name in r] for r in records]

    ours, theirs = measured(out), measured(reference)
    assert [len(line) for line in ours] == [len(line) for line in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=rtol)
    if not (Path(out) / "final" / "config.json").exists():
        return
    a, b = weights(out), weights(reference)
    assert {name: t.shape for name, t in a.items()} == {name: t.shape for name, t in b.items()}


REFUSED: dict[str, tuple[Mesh, dict[str, Any], str]] = {
    "workers": (Mesh(tp=2), {"workers": 2, "dropout": 0.0, "micro_batch": 2}, "set workers=1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_shared_is_refused(settings: Make, tmp_path: Path, what: str) -> None:
    """Before any step."""
    mesh, changes, words = REFUSED[what]
    config = settings(**SHARED | changes)
    parallel: Any = SimpleNamespace(mesh=mesh, rank=0, tensor=TensorParallel(Rank(0, 2)))
    task = prepared(config)

    def begin() -> None:
        spread(task, parallel)
        divide(task, parallel, torch.float32)

    with pytest.raises(ConfigError, match=words):
        begin()
