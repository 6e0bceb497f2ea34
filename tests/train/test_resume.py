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
    """Weights, or the adapter of a frozen model, and moments."""
    beside = any(checkpoint.glob("adapter*"))
    trained = state_tensors(checkpoint, ADAPTER) if beside else load_folder(checkpoint).tensors
    both = dict(trained) | dict(state_tensors(checkpoint, MOMENTS))
    return {name: value.clone() for name, value in both.items()}


def weights(out: str | Path) -> dict[str, Tensor]:
    """The last state of a run."""
    return state(checkpoints(Path(out))[-1])


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


def assert_same_bits(out: str, reference: str) -> None:
    assert_equal(weights(out), weights(reference))
    assert lines(out) == lines(reference)


def lines(out: str) -> list[list[Any]]:
    """Of metrics.jsonl, what does not depend on the clock."""
    names = ("step", "loss", "trained_tokens", "lr", "grad_norm")
    records = [r for r in read_metrics(Path(out) / "metrics.jsonl") if "loss" in r]
    return [[record[name] for name in names] for record in records]


def in_a_child(run: Callable[[], Any]) -> int:
    """Run in a forked process; returns its exit status (negative: the signal that killed it)."""
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
    """Behind the first micro batch whose number in this process is due."""

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
    return killed_when(lambda count: count == number, config, trained)


def killed_in_step(config: TrainConfig, step: int) -> Callable[[], None]:
    """Behind the first micro batch of a step."""
    log = Path(config.out) / METRICS
    return killed_when(lambda _: log.exists() and len(lines(config.out)) == step - 1, config, train)


def killed_at_disk_call(
    config: TrainConfig, name: str, number: int, trained: Callable[..., Any] = train
) -> Callable[[], None]:
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
    """8 rows in micro batches of 3: three per window. Killed in the second of step 4, then in the last of step 5,
    then in the midst of writing checkpoint-4."""
    usual = settings(save_every=2, optimizer="muon", out=str(tmp_path / "killed"))
    reference = settings(optimizer="muon", out=str(tmp_path / "whole"))
    train(reference, quiet=True)
    assert in_a_child(killed_at_micro_batch(usual, 3 * 3 + 2)) == -signal.SIGKILL
    assert [p.name for p in checkpoints(tmp_path / "killed")] == ["checkpoint-0", "checkpoint-2"]
    assert in_a_child(killed_at_disk_call(usual, "checkpoint-4", 9)) == -signal.SIGKILL
    assert checkpoints(tmp_path / "killed")[-1].name == "checkpoint-2"
    assert in_a_child(killed_at_micro_batch(usual, 3 * 3 - 1)) == -signal.SIGKILL
    assert checkpoints(tmp_path / "killed")[-1].name == "checkpoint-4"
    train(usual, resume="auto", quiet=True)
    assert_same_bits(usual.out, reference.out)


@pytest.mark.slow
def test_killed_at_twenty_random_moments(settings: Make, tmp_path: Path) -> None:
    usual = settings(save_every=1, steps=60, out=str(tmp_path / "killed"))
    reference = settings(steps=60, out=str(tmp_path / "whole"))
    begin = time.monotonic()
    train(reference, quiet=True)
    whole = time.monotonic() - begin
    rng, kills = random.Random(0), 0
    for _ in range(200):
        if kills == 20:
            break
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            try:
                train(usual, resume="auto", quiet=True)
            finally:
                os._exit(0)
        time.sleep(rng.uniform(0.02, 0.3) * whole)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 0:  # it came to its end: begin again
            import shutil

            assert_same_bits(usual.out, reference.out)
            shutil.rmtree(usual.out)
        else:
            kills += 1
    assert kills == 20
    train(usual, resume="auto", quiet=True)
    assert_same_bits(usual.out, reference.out)


def test_a_pattern_that_a_folder_says_in_a_shorter_form_resumes(settings: Make, tmp_path: Path) -> None:
    """As recipes/small.yaml writes it: a window that looks back only is causal already, and config.json says it so."""
    patterns = "Window.last(8) & Causal(); Causal()"
    whole = settings(patterns=patterns, out=str(tmp_path / "whole"), steps=3, save_every=2)
    train(whole, quiet=True)
    again = whole.model_copy(update={"out": str(tmp_path / "again")})
    train(again, resume=f"{whole.out}/checkpoint-2", quiet=True)
    a, b = weights(again.out), weights(whole.out)
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_looking_changes_nothing(settings: Make, tmp_path: Path) -> None:
    """Evaluations, samples, saves and callbacks, even ones that draw random numbers."""
    plain = settings(out=str(tmp_path / "plain"))
    watched = settings(
        out=str(tmp_path / "watched"), validation_share=0.0, validation=plain.data, eval_every=1, save_every=1,
        sample_prompts=["one two"], sample_every=2, sample_tokens=5,
    )  # fmt: skip
    seen: list[int] = []

    def look(context: CallbackContext) -> None:
        torch.rand(3)
        assert not context.model.training
        seen.append(context.step)

    train(plain, quiet=True)
    train(watched, callbacks=[Callback(look, every_steps=4)], quiet=True)
    assert seen == [4, 6]
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
