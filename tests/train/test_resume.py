"""A run that is killed and resumed ends with the bits of one that never stopped."""

import itertools
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.checkpoints.folder import load_folder
from headway.train import Callback, CallbackContext, Interrupted, TextConfig, train
from headway.train.checkpoint import ADAPTER, MOMENTS, checkpoints, state_tensors
from headway.train.config import TrainConfig
from headway.train.metrics import METRICS, read_metrics
from headway.train.microbatch_pool import MasterWeights
from tests.faults import watch

Make = Callable[..., TextConfig]


def state(checkpoint: Path) -> dict[str, Tensor]:
    """Returns the weights of a checkpoint (beside a frozen model, those of the adapter) and its moments."""
    has_adapter = any(checkpoint.glob("adapter*"))
    trained = state_tensors(checkpoint, ADAPTER) if has_adapter else load_folder(checkpoint).tensors
    both = dict(trained) | dict(state_tensors(checkpoint, MOMENTS))
    return {name: value.clone() for name, value in both.items()}


def weights(out: str | Path) -> dict[str, Tensor]:
    """Returns the last state of a run."""
    return state(checkpoints(Path(out))[-1])


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


def assert_same_bits(out: str, reference: str) -> None:
    assert_equal(weights(out), weights(reference))
    assert lines(out) == lines(reference)


def lines(out: str) -> list[list[Any]]:
    """Returns the values of each step in metrics.jsonl that do not depend on the clock."""
    names = ("step", "loss", "trained_tokens", "lr", "grad_norm")
    records = [r for r in read_metrics(Path(out) / "metrics.jsonl") if "loss" in r]
    return [[record[name] for name in names] for record in records]


def in_a_child(run: Callable[[], Any]) -> int:
    """Calls `run` in a forked process and returns its exit status (negative: the signal that killed it)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks of threaded processes
        child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_when(
    due: Callable[[int], bool], config: TrainConfig, trained: Callable[..., Any]
) -> Callable[[], None]:
    """Returns a function that resumes the run and kills its process after the first micro-batch whose number is due."""

    def run() -> None:
        numbers, collect = itertools.count(1), MasterWeights.collect

        def counted(weights: MasterWeights[Any]) -> None:
            collect(weights)
            if due(next(numbers)):
                kill_me()

        MasterWeights.collect = counted  # type: ignore[method-assign]
        trained(config, resume="auto", quiet=True)

    return run


def killed_at_micro_batch(
    config: TrainConfig, number: int, trained: Callable[..., Any] = train
) -> Callable[[], None]:
    """Returns a function that resumes the run and kills its process after `number` micro-batches."""
    return killed_when(lambda count: count == number, config, trained)


def killed_in_step(config: TrainConfig, step: int) -> Callable[[], None]:
    """Returns a function that resumes the run and kills its process after the first micro-batch of a step."""
    log = Path(config.out) / METRICS
    return killed_when(lambda _: log.exists() and len(lines(config.out)) == step - 1, config, train)


def killed_at_disk_call(
    config: TrainConfig, name: str, number: int, trained: Callable[..., Any] = train
) -> Callable[[], None]:
    """Returns a function that resumes the run and kills its process at disk operation `number` on paths with `name`."""

    def run() -> None:
        count = 0

        def counted(operation: str, path: Path, data: object) -> None:
            nonlocal count
            if name in str(path):
                count += 1
                if count == number:
                    kill_me()

        with watch(counted):
            trained(config, resume="auto", quiet=True)

    return run


def test_killed_inside_windows_and_inside_a_save(settings: Make, tmp_path: Path) -> None:
    """8 rows in micro-batches of 3 are three a step. Killed in the second of step 4, then while checkpoint-4 is
    written, then in the second of step 5."""
    config = settings(save_every=2, optimizer="muon", out=str(tmp_path / "killed"))
    reference = settings(optimizer="muon", out=str(tmp_path / "whole"))
    train(reference, quiet=True)
    assert in_a_child(killed_at_micro_batch(config, 3 * 3 + 2)) == -signal.SIGKILL
    assert [p.name for p in checkpoints(tmp_path / "killed")] == ["checkpoint-0", "checkpoint-2"]
    assert in_a_child(killed_at_disk_call(config, "checkpoint-4", 9)) == -signal.SIGKILL
    assert checkpoints(tmp_path / "killed")[-1].name == "checkpoint-2"
    assert in_a_child(killed_at_micro_batch(config, 3 * 3 - 1)) == -signal.SIGKILL
    assert checkpoints(tmp_path / "killed")[-1].name == "checkpoint-4"
    train(config, resume="auto", quiet=True)
    assert_same_bits(config.out, reference.out)


@pytest.mark.slow
def test_killed_at_twenty_random_moments(settings: Make, tmp_path: Path) -> None:
    config = settings(save_every=1, steps=60, out=str(tmp_path / "killed"))
    reference = settings(steps=60, out=str(tmp_path / "whole"))
    started = time.monotonic()
    train(reference, quiet=True)
    whole_seconds = time.monotonic() - started
    rng, kills = random.Random(0), 0
    for _ in range(200):
        if kills == 20:
            break
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            try:
                train(config, resume="auto", quiet=True)
            finally:
                os._exit(0)
        time.sleep(rng.uniform(0.02, 0.3) * whole_seconds)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 0:  # the run has ended: begin a new one
            import shutil

            assert_same_bits(config.out, reference.out)
            shutil.rmtree(config.out)
        else:
            kills += 1
    assert kills == 20
    train(config, resume="auto", quiet=True)
    assert_same_bits(config.out, reference.out)


def test_a_pattern_that_a_folder_says_in_a_shorter_form_resumes(settings: Make, tmp_path: Path) -> None:
    """As in recipes/small.yaml: a window that only looks back is causal already; config.json has the shorter form."""
    patterns = "Window.last(8) & Causal(); Causal()"
    whole = settings(patterns=patterns, out=str(tmp_path / "whole"), steps=3, save_every=2)
    train(whole, quiet=True)
    again = whole.model_copy(update={"out": str(tmp_path / "again")})
    train(again, resume=f"{whole.out}/checkpoint-2", quiet=True)
    a, b = weights(again.out), weights(whole.out)
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_looking_changes_nothing(settings: Make, tmp_path: Path) -> None:
    """Evaluations, samples, saves and callbacks do not change a run, even if they draw random numbers."""
    plain = settings(out=str(tmp_path / "plain"))
    watched = settings(
        out=str(tmp_path / "watched"), validation_share=0.0, validation=plain.data, eval_every=1, save_every=1,
        sample_prompts=["one two"], sample_every=2, sample_tokens=5,
    )  # fmt: skip
    steps: list[int] = []

    def look(context: CallbackContext) -> None:
        torch.rand(3)
        assert not context.model.training
        steps.append(context.step)

    train(plain, quiet=True)
    train(watched, callbacks=[Callback(look, every_steps=4)], quiet=True)
    assert steps == [4, 6]
    assert_same_bits(watched.out, plain.out)


def test_ctrl_c_saves_and_says_where(settings: Make) -> None:
    config = settings(steps=50)

    def interrupt(context: CallbackContext) -> None:
        if context.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted) as stop:
        train(config, callbacks=[Callback(interrupt, every_steps=1)], quiet=True)
    assert signal.getsignal(signal.SIGINT) is before
    assert stop.value.checkpoint == Path(config.out) / "checkpoint-4"
    assert checkpoints(Path(config.out))[-1] == stop.value.checkpoint
