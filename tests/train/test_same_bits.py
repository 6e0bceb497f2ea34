"""The bits of a run of any task depend neither on whether it was killed nor on the processes that share it."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.train import train
from headway.train.checkpoint import checkpoints
from tests.checkpoints.shares import share
from tests.train.runs import RUNS, Make
from tests.train.test_processes import HALVES, as_one
from tests.train.test_resume import assert_same_bits, in_a_child, killed_in_step, weights

pytestmark = pytest.mark.filterwarnings("ignore:train_words")  # the corpora have few words
DROPPING: dict[str, Any] = {"dropout": 0.1, "micro_batch": 8, "width": 16, "steps": 8}
LONG: dict[str, Any] = {"batch_tokens": 24 * 30, "micro_batch": 12, "keep_last": 9}

KILLED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat", {"validation_share": 0.1}),
    "roformer": (
        "masked-lm",
        {**LONG, "family": "roformer", "mixers": "elu+1", "units": "characters", "vocab": 278, "pack": False},
    ),
    "bert": ("masked-lm", {**LONG, "family": "bert"}),
    "longformer": (
        "masked-lm",
        {**LONG, "family": "longformer", "patterns": "Window.around(4) | Global()", "whole_words": True},
    ),
    "classify": ("classify", DROPPING),
    "tag": ("tag", DROPPING),
    "dpo": ("preference", {"loss": "dpo", "dtype": "bf16"}),
    "orpo": ("preference", {"loss": "orpo", "dtype": "bf16"}),
    "of one's own, bf16": ("of one's own", {"dtype": "bf16"}),
    "of one's own, fp32": ("of one's own", {"dtype": "fp32"}),
    "lora": ("adapter", {}),
    "lora in shards": ("adapter", {"dtype": "bf16", "checkpoints": "shards"}),
    "dora on nf4": ("adapter", {"dtype": "bf16", "base": "nf4", "adapter": "dora"}),
    "answer": ("answer", DROPPING),
    "translation, bf16": ("translation", {"dtype": "bf16", "micro_batch": None, "eval_every": 2}),
    "translation, fp32": ("translation", {"micro_batch": None, "eval_every": 2}),
    "causal-lm": ("causal-lm", {"dropout": 0.1}),
    "embed": ("embed", {**DROPPING, "micro_batch": None}),
}


@share("name", KILLED, 0, 2)
def test_killed_and_resumed_it_is_the_run_that_was_not(name: str, settings: Make, tmp_path: Path) -> None:
    """Killed in step 4, after the checkpoint of step 2; random numbers drawn before the run have no effect on it."""
    run, changes = KILLED[name]
    config = RUNS[run](settings, tmp_path, save_every=2, **changes)
    whole, killed = (config.model_copy(update={"out": str(tmp_path / out)}) for out in ("whole", "killed"))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    train(whole, quiet=True)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert in_a_child(killed_in_step(killed, 4)) == -signal.SIGKILL
    assert checkpoints(Path(killed.out))[-1].name == "checkpoint-2"
    train(killed, resume="auto", quiet=True)
    assert_same_bits(killed.out, whole.out)


EPOCHS: dict[str, tuple[str, dict[str, Any]]] = {
    f"causal-lm, {dtype}": (
        "causal-lm",
        {"epochs": 2, "steps": None, "batch_tokens": 24 * 50, "micro_batch": 20, "dtype": dtype},
    )
    for dtype in ("fp32", "bf16")
} | {
    "bert": ("masked-lm", LONG),
    "translation": ("translation", {"steps": 5, "micro_batch": None}),
}


@share("name", EPOCHS, 1, 2)
def test_resumed_from_every_step_it_is_the_run(name: str, settings: Make, tmp_path: Path) -> None:
    """The steps go across the end of an epoch."""
    run, changes = EPOCHS[name]
    whole = RUNS[run](settings, tmp_path, **changes | {"save_every": 1, "keep_last": 99})
    result = train(whole, quiet=True)
    saved = checkpoints(Path(whole.out))
    assert len(saved) == result.steps + 1 > 3
    for checkpoint in saved[:-1]:
        again = whole.model_copy(update={"out": str(tmp_path / f"from-{checkpoint.name}")})
        train(again, resume=str(checkpoint), quiet=True)
        a, b = weights(again.out), weights(whole.out)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[n], b[n]) for n in b), checkpoint.name


HEAD: dict[str, Any] = {"micro_batch": 8, "dropout": 0.1, "clip": 0.3, "eval_every": 3, "workers": 1}
ODD: dict[str, Any] = {
    **HALVES, "steps": 6, "heads": 4, "kv_heads": 2, "hidden": 22, "workers": 1, "validation_share": 0.1,
    "eval_every": 3,
}  # fmt: skip
"""With tp=2 a process has 11 hidden units, which fsdp=2 divides into 6 and 5."""
BOTH = "fsdp=2,tp=2"
Case = tuple[str, dict[str, Any]]
MOMENTS = [(dtype, optimizer) for dtype in ("fp32", "bf16") for optimizer in ("adamw", "muon")]
REPLICAS: dict[str, Case] = {
    **{
        f"{run}-{dtype}-{optimizer}": (
            run,
            {**HALVES, "dtype": dtype, "optimizer": optimizer, "validation_share": 0.2, "eval_every": 9},
        )
        for run in ("causal-lm", "masked-lm")
        for dtype, optimizer in MOMENTS
    },
    **{
        f"chat-{optimizer}": (
            "chat",
            {**HALVES, "micro_batch": 3, "optimizer": optimizer, "backend": "auto", "validation_share": 0.1},
        )
        for optimizer in ("adamw", "muon")
    },
    "translation": ("translation", {"clip": 0.3, "steps": 20, "eval_every": 9}),
}
PARTS: dict[str, Case] = {
    **REPLICAS,
    **{f"{part} again": ("causal-lm", {**HALVES, "gradient_checkpointing": part})
       for part in ("block", "attention", "feed_forward")},
    **{task: (task, {**HEAD, "optimizer": "muon"}) for task in ("classify", "tag", "answer")},
    "embed": ("embed", {**HEAD, "optimizer": "muon", "loss": "margin"}),
    **{loss: ("preference", {"loss": loss, "micro_batch": 3, "eval_every": 3}) for loss in ("dpo", "orpo")},
}  # fmt: skip
PARTS_OF_SHARES: dict[str, Case] = {
    **{f"causal-lm-{dtype}-{optimizer}": ("causal-lm", {**ODD, "dtype": dtype, "optimizer": optimizer})
       for dtype, optimizer in MOMENTS},
    "translation": ("translation", {"steps": 6, "dropout": 0.0, "clip": 0.3, "eval_every": 9}),
    "block again": (
        "causal-lm", {**ODD, "gradient_checkpointing": "block", "average": 2, "save_every": 2, "keep_last": 9}
    ),
    "classify": ("classify", {**HEAD, "hidden": 44, "optimizer": "muon"}),
    "preference": ("preference", {"kv_heads": 2, "micro_batch": 3, "eval_every": 3}),
}  # fmt: skip
MESHES: list[tuple[str, str | None, dict[str, Case]]] = [
    ("dp=2", None, REPLICAS), ("fsdp=2", None, PARTS), (BOTH, "dp=2,tp=2", PARTS_OF_SHARES),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "other", "case"),
    [
        pytest.param(mesh, other, cases[name], id=f"{mesh}-{name}")
        for mesh, other, cases in MESHES
        for name in cases
    ],
)
def test_row_45_any_mesh_trains_alike(
    mesh: str, other: str | None, case: Case, settings: Make, tmp_path: Path
) -> None:
    """Weights, moments and log lines are those of one process or of another mesh, with clipping, dropout, documents of
    all lengths and held-out data. The keys of an encoder's states are made before a decoder's blocks run, and the
    log-probabilities of a reference before weights are sharded."""
    run, changes = case
    as_one(RUNS[run](settings, tmp_path, **changes), tmp_path, mesh=mesh, other=other)
