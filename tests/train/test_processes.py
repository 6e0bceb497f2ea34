"""Several processes that share the micro batches of each step train as one does, bit for bit."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.parallel import Mesh
from headway.train import TextConfig, train
from headway.train.checkpoint import checkpoints
from headway.train.config import TrainConfig
from headway.train.microbatch_pool import MasterWeights
from headway.train.tasks.translation import TranslationConfig
from tests.train.conftest import documents
from tests.train.processes import ended, start, together
from tests.train.test_chat import config as chat
from tests.train.test_masked import ENCODER
from tests.train.test_resume import assert_same_bits, in_a_child, killed_at_disk_call, killed_at_micro_batch
from tests.train.test_translation import TINY, corpus

Make = Callable[..., TextConfig]
HALVES: dict[str, Any] = {"micro_batch": 4, "steps": 20, "clip": 0.3, "dropout": 0.1}
"""Of 8 rows a step."""


def as_one(config: TrainConfig, folder: Path, ranks: int = 2) -> None:
    """The run of these settings in one process and in several: weights, moments and every line of the log."""
    alone, shared = (config.model_copy(update={"out": str(folder / name)}) for name in ("alone", "shared"))
    train(alone, quiet=True)
    together(ranks, lambda rank: train(shared), folder / "said")
    assert_same_bits(shared.out, alone.out)


def test_row_45_two_processes_are_one(settings: Make, tmp_path: Path) -> None:
    """Muon and AdamW, clipping, dropout, documents of all lengths, held-out text; the last step has one micro batch."""
    as_one(settings(**HALVES, optimizer="muon", validation_share=0.1, eval_every=9), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_row_45_next_tokens_and_masked_ones(
    settings: Make, tmp_path: Path, corpus: Path, optimizer: str, dtype: str
) -> None:
    how = {**HALVES, "optimizer": optimizer, "dtype": dtype, "validation": str(corpus), "eval_every": 9}
    for name, changes in {"causal": {}, "masked": ENCODER}.items():
        (tmp_path / name).mkdir()
        as_one(settings(**how, **changes), tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_row_45_conversations(tmp_path: Path, optimizer: str) -> None:
    as_one(
        chat(tmp_path, **{**HALVES, "micro_batch": 3}, optimizer=optimizer, validation_share=0.1), tmp_path
    )


@pytest.mark.slow
def test_row_45_translation(tmp_path: Path) -> None:
    files = corpus(tmp_path)
    held = {f"validation_{side}": path for side, path in files.items()}
    pairs = {
        **TINY,
        **files,
        **held,
        "dropout": 0.1,
        "steps": 20,
        "micro_batch": 5,
        "clip": 0.3,
        "eval_every": 9,
    }
    as_one(TranslationConfig.of(pairs), tmp_path)


# --- processes that come and go


def test_killed_and_resumed_by_one_and_by_two(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is killed in a step, then rank 0 in the midst of a checkpoint; the other says which, and how to go on."""
    monkeypatch.setattr("headway.parallel.roll.SILENCE", 1.5)
    whole = settings(**HALVES | {"steps": 6}, optimizer="muon", out=str(tmp_path / "whole"))
    usual = whole.model_copy(update={"out": str(tmp_path / "killed"), "save_every": 2})
    train(whole, quiet=True)

    def one_dies(rank: int) -> None:
        (killed_at_micro_batch(usual, 4) if rank == 1 else lambda: train(usual, resume="auto"))()

    def main_dies(rank: int) -> None:
        (
            killed_at_disk_call(usual, "checkpoint-4", 9)
            if rank == 0
            else lambda: train(usual, resume="auto")
        )()

    one, two = tmp_path / "one", tmp_path / "two"
    children = start(2, one_dies, one)
    assert ended(children) == [1, -signal.SIGKILL]
    said = (one / "0").read_text()
    assert f"RankError: rank 1 (process {children[1]} on host" in said
    assert "is gone: it was killed" in said
    assert "go on from" in said
    assert checkpoints(Path(usual.out))[-1].name == "checkpoint-2"
    assert ended(start(2, main_dies, two)) == [-signal.SIGKILL, 1]
    assert "RankError: rank 0, or who started the run, is gone" in (two / "1").read_text()
    assert checkpoints(Path(usual.out))[-1].name == "checkpoint-2"
    assert in_a_child(killed_at_micro_batch(usual, 5)) == -signal.SIGKILL  # alone, for two steps
    assert checkpoints(Path(usual.out))[-1].name == "checkpoint-4"
    together(2, lambda rank: train(usual, resume="auto"), tmp_path / "three")
    assert "not bit for bit" not in (tmp_path / "three" / "0").read_text()
    assert_same_bits(usual.out, whole.out)


@pytest.mark.slow
def test_a_process_that_hangs_is_named(settings: Make, tmp_path: Path) -> None:
    config = settings(micro_batch=4, patience=10.0)

    def hangs(rank: int) -> None:
        if rank == 1:
            monkeypatched = MasterWeights.collect

            def collect(weights: MasterWeights[Any]) -> None:
                monkeypatched(weights)
                time.sleep(600)

            MasterWeights.collect = collect  # type: ignore[method-assign]
        train(config)

    children = start(2, hangs, tmp_path / "said")
    until = time.monotonic() + 60
    while os.waitpid(children[0], os.WNOHANG)[0] == 0 and time.monotonic() < until:
        time.sleep(0.1)
    os.kill(children[1], signal.SIGKILL)
    os.waitpid(children[1], 0)
    said = (tmp_path / "said" / "0").read_text()
    assert f"RankError: rank 1 (process {children[1]} on host" in said
    assert "hangs: it lives, but did not come" in said


def test_what_cannot_be_shared_is_refused(settings: Make, tmp_path: Path) -> None:
    """A step of one micro batch, other data than rank 0 has, an error of the main process: both processes end."""
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(1, 60)))

    def refused(config: TextConfig, more: TextConfig | None = None) -> list[str]:
        said = tmp_path / "said"
        assert ended(start(2, lambda rank: train(more if more and rank else config), said)) == [1, 1]
        return [(said / str(rank)).read_text() for rank in (0, 1)]

    for said in refused(settings(micro_batch=8)):
        assert "ConfigError: 2 processes were to share the micro batches of a step, and a step has 1" in said
    for said in refused(settings(), settings(data=str(other), out=str(tmp_path / "b"))):
        assert "ConfigError: the processes have not read the same data: rank 0 has" in said
    main, one = refused(settings(data=str(tmp_path / "none.jsonl")))
    assert "none.jsonl: no such file" in main
    assert "RankError: rank 0" in one
    assert "none.jsonl: no such file" in one
    for said in refused(settings(mesh="dp=3")):
        assert "ConfigError: mesh 'dp=3' is of 3 processes, and the run has 2" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=2,pd=2", r"'pd=2' is no axis; write dp and cp"),
        ("dp=2,dp=2", "'dp=2' is no axis"),
        ("dp=0", "'dp=0' is no axis"),
        ("dp", "'dp' is no axis"),
        ("dp=2,cp=3", "is of 6 processes, and the run has 4; start as many"),
    ],
)
def test_a_mesh_is_of_as_many_processes_as_there_are(text: str, message: str) -> None:
    assert Mesh.of("cp=2, dp=2", 4) == Mesh(2, 2)
    assert Mesh.of(None, 4) == Mesh(4)
    assert str(Mesh(2, 3)) == "dp=2,cp=3"
    with pytest.raises(ConfigError, match=message):
        Mesh.of(text, 4)
