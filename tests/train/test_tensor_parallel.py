"""Runs whose heads and hidden units several processes share are those of one process."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.checkpoints.folder import load_folder
from headway.data import Batch
from headway.errors import ConfigError
from headway.parallel import Mesh, Parallel, TensorParallel, joined
from headway.parallel.processes import ALONE
from headway.train import Callback, CallbackContext, TextConfig, train
from headway.train.checkpoint import optimizer_tensors
from headway.train.metrics import read_metrics
from headway.train.optimizer import Optimizer
from headway.train.sharing import divide, spread
from headway.train.tasks import find_task
from headway.train.trainer import Trainer
from tests.parallel import steps
from tests.parallel.test_tensor import Rank
from tests.train.objectives import Given
from tests.train.processes import together
from tests.train.test_resume import weights

Make = Callable[..., TextConfig]
SHARED: dict[str, Any] = {
    "heads": 4, "kv_heads": 2, "dropout": 0.1, "clip": 0.3,
    "micro_batch": 4, "workers": 1, "steps": 6, "save_every": 2, "keep_last": 9,
}  # fmt: skip


def stepped(name: str, mesh: Mesh, parallel: Parallel = ALONE) -> tuple[list[float | None], list[float], Any]:
    """Losses, norms and weights of three clipped steps in float64, with dropout where rows are whole; 11 hidden units a
    rank, of which a part of the axis fsdp has 6 or 5."""
    p = 0.0 if mesh.cp > 1 else 0.1
    how: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_dim": 4, "qk_norm": True, "hidden": 11 * mesh.tp}
    net = steps.model_of(name, **how, dropout=p, attention_dropout=p)
    divided = divide(SimpleNamespace(model=net), parallel, torch.float32)  # type: ignore[arg-type]
    ids, targets, tokens = steps.rows(name)
    one = Batch({"ids": ids, "tokens": tokens}, targets)
    optimizer = Optimizer.single(net, torch.optim.SGD(net.parameters(), 0.1))
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


def by(mesh: Mesh, config: TextConfig, folder: Path, resume: str = "never") -> TextConfig:
    """Train by the processes of a mesh, in a folder of the run's own; its settings."""
    own = config.model_copy(update={"mesh": str(mesh), "out": str(folder / "run")})
    together(mesh.ranks, lambda rank: train(own, resume=resume), folder / "said")
    return own


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
    return {**load_folder(checkpoint).tensors, **optimizer_tensors(checkpoint)}


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
    task = find_task("causal-lm")(config, tmp_path, None, torch.float32)

    def begin() -> None:
        spread(task, parallel)
        divide(task, parallel, torch.float32)

    with pytest.raises(ConfigError, match=words):
        begin()
