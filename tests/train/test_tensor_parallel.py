"""Runs whose heads and hidden units are sharded over several processes equal the run of one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.data import Batch
from headway.errors import ConfigError
from headway.nn import Lora
from headway.nn.adapters import Adapter, attach
from headway.parallel import Mesh, Parallel, TensorParallel, joined
from headway.parallel.processes import ALONE
from headway.train import Callback, CallbackContext, TextConfig, train
from headway.train.metrics import read_metrics
from headway.train.optimizer import Optimizer
from headway.train.sharing import divide, spread
from headway.train.trainer import Trainer
from tests.parallel import steps
from tests.parallel.test_tensor import Rank
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
    """Returns losses, gradient norms and weights of three clipped steps in float64, of a model or an adapter; with
    dropout if rows are whole (cp = 1). A tp rank has 11 hidden units, of which an fsdp rank has 6 or 5."""
    p = 0.0 if mesh.cp > 1 else 0.1
    drops = {"dropout": p, "attention_dropout": p, "activation_dropout": p}
    fields: dict[str, Any] = {
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 4,
        "qk_norm": "head",
        "hidden": 11 * mesh.tp,
    }
    net = steps.model_of(name, vocab=32, **fields, **drops)
    if lora is not None:
        attach(net, Adapter.fresh(net, replace(lora, dropout=p)), dtype=torch.float64)
    divided = divide(SimpleNamespace(model=net), parallel, torch.float32)  # type: ignore[arg-type]
    ids, targets, tokens = steps.rows(name)
    batch = Batch({"ids": ids, "tokens": tokens}, targets)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = Optimizer.single(net, torch.optim.SGD(trained, 0.1 if lora is None else 1.0))
    trainer = Trainer(Given([batch] * mesh.batches), net, optimizer, clip=0.5, seed=0, parallel=parallel)
    results = [trainer.step() for _ in range(3)]
    whole: Any = net if divided is None else divided.whole()
    return [stats.loss for stats in results], [stats.grad_norm for stats in results], whole.state_dict()


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
    """Losses, global gradient norms and weights are equal; so is dropout, also that of attention weights."""
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
    """Includes dropout of the adapters' inputs, of which o_proj and down_proj have a part on each rank."""
    expected = stepped("sink", mesh, lora=lora)
    assert expected[0][-1] < expected[0][0] - 1e-3

    def rank(number: int) -> None:
        with joined(str(mesh)) as parallel:
            for ours, theirs in zip(stepped("sink", mesh, parallel, lora), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)

    together(mesh.ranks, rank, tmp_path)


def by(mesh: Mesh, config: TextConfig, folder: Path, resume: str = "never") -> TextConfig:
    """Trains with the processes of a mesh in a folder of the run's own; returns the settings of that run."""
    run_config = config.model_copy(update={"mesh": str(mesh), "out": str(folder / "run")})
    together(mesh.ranks, lambda rank: train(run_config, resume=resume), folder / "said")
    return run_config


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=2", "cp=2"])
def test_who_resumes_a_run_of_shared_layers_or_rows_is_told_of_other_bits(
    settings: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], mesh: str
) -> None:
    """Another mesh rounds sums otherwise; with the same mesh the run goes on bit for bit."""
    config = settings(**SHARED | {"dropout": 0.0}, mesh=mesh, out=str(tmp_path / "shared"))
    together(2, lambda rank: train(config), tmp_path / "said")
    checkpoint = Path(config.out) / "checkpoint-4"
    alone, alike = (
        config.model_copy(update={"mesh": m, "out": str(tmp_path / name)})
        for name, m in (("alone", None), ("alike", mesh))
    )
    train(alone, resume=str(checkpoint))
    assert f"not bit for bit the same run: {mesh[:2]}: 2 then, 1 now" in capsys.readouterr().err
    together(2, lambda rank: train(alike, resume=str(checkpoint)), tmp_path / "said")
    assert "not bit for bit" not in (tmp_path / "said" / "0").read_text()
    assert all(torch.equal(t, weights(config.out)[name]) for name, t in weights(alike.out).items())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(tp=2), BOTH], ids=str)
def test_callbacks_are_given_the_whole_model(settings: Make, tmp_path: Path, mesh: Mesh) -> None:
    config = settings(**SHARED, sample_prompts=("one",), sample_tokens=4, sample_every=2)
    run_config = config.model_copy(update={"mesh": str(mesh), "out": str(tmp_path / "run")})

    def seen(context: CallbackContext) -> None:
        model: Any = context.model
        counts = {m.out_features for n, m in model.named_modules() if n.endswith("q_proj")}
        assert counts == {model.spec.heads * model.spec.head_dim}, "of all heads"
        (tmp_path / f"seen-{context.step}").touch()

    together(
        mesh.ranks,
        lambda rank: train(run_config, callbacks=[Callback(seen, every_steps=2)]),
        tmp_path / "said",
    )
    assert len(list(tmp_path.glob("seen-*"))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2), Mesh(cp=2, tp=2)], ids=str)
@pytest.mark.parametrize(("dtype", "optimizer"), [("fp32", "adamw"), ("fp32", "muon"), ("bf16", "adamw")])
def test_row_45_runs_of_four_processes(
    settings: Make, tmp_path: Path, mesh: Mesh, dtype: str, optimizer: str
) -> None:
    changes = {**SHARED, "dtype": dtype, "optimizer": optimizer, "validation_share": 0.1, "eval_every": 3}
    config = settings(**changes | ({"dropout": 0.0} if mesh.cp > 1 else {}))
    train(config, quiet=True)
    shared = by(mesh, config, tmp_path / "shared")
    assert_close(shared.out, config.out, after=0, rtol=1e-4 if dtype == "fp32" else 2e-2)
    by(mesh, config, tmp_path / "again", f"{config.out}/checkpoint-4")


def assert_close(out: str, reference: str, after: int, rtol: float = 1e-4) -> None:
    """Asserts equal losses, norms and held-out losses of each step after `after`, and equal shapes of saved weights."""

    def measured(folder: str) -> list[list[float]]:
        records = [r for r in read_metrics(Path(folder) / "metrics.jsonl") if r.get("step", 0) > after]
        return [[r[name] for name in ("loss", "grad_norm", "val_loss") if name in r] for r in records]

    ours, theirs = measured(out), measured(reference)
    assert [len(line) for line in ours] == [len(line) for line in theirs]
    for actual, expected in zip(ours, theirs, strict=True):
        assert actual == pytest.approx(expected, rel=rtol)
    if not (Path(out) / "final" / "config.json").exists():
        return
    a, b = weights(out), weights(reference)
    assert {name: t.shape for name, t in a.items()} == {name: t.shape for name, t in b.items()}


REFUSED: dict[str, tuple[Mesh, dict[str, Any], str]] = {
    "workers": (Mesh(tp=2), {"workers": 2, "dropout": 0.0, "micro_batch": 2}, "set workers=1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_shared_is_refused(settings: Make, tmp_path: Path, what: str) -> None:
    """The error is raised before any step."""
    mesh, changes, message = REFUSED[what]
    config = settings(**SHARED | changes)
    parallel: Any = SimpleNamespace(mesh=mesh, rank=0, tensor=TensorParallel(Rank(0, 2)))
    task = prepared(config)

    def begin() -> None:
        spread(task, parallel)
        divide(task, parallel, torch.float32)

    with pytest.raises(ConfigError, match=message):
        begin()
