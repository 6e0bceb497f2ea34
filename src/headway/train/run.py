"""What a run does around its steps, whatever it trains: checkpoints, log, evaluations, interruption.

Legend of types: M the model, R what the run leaves behind.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from headway.checkpoints.storage.files import atomic_write
from headway.models import Decoder, Encoder, EncoderDecoder
from headway.text import Tokenizer
from headway.train.callbacks import Interrupted, StopRequest
from headway.train.config_io import config_yaml
from headway.train.master_weights import MasterWeights
from headway.train.metrics import METRICS, MetricsLog
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.optimizer import Optimizer
from headway.train.progress import Reporter
from headway.train.settings import Settings
from headway.train.state import CONFIG, Machine, Progress, State, load_checkpoint, save_checkpoint

FINAL = "final"
M = TypeVar("M", bound=Decoder | Encoder | EncoderDecoder)
R = TypeVar("R")


@contextmanager
def seeded(seed: int, threads: int | None) -> Iterator[None]:
    """While open, torch draws from `seed` (dropout; a checkpoint brings its own state) on `threads` CPU threads."""
    before, generator = torch.get_num_threads(), torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_rng_state(generator)


class Run(ABC, Generic[M, R]):
    """A run in its folder `config.out`. A kind of run says what a step is, how the model is measured and what is left.

    Args:
        config: the settings.
        model: fp32 weights, which `optimizer` steps.
        dtype: of the module that computes (`MasterWeights`).
        machine: what bits depend on besides.
        tokenizer, generation: saved with every checkpoint.
        data: what tells the training data from another.
        steps: length of the run; None where the clock alone decides.
        workers: threads that steps and evaluations are shared among; one unless given.
        quiet: no progress on stderr.
    """

    def __init__(
        self,
        config: Settings,
        model: M,
        optimizer: Optimizer,
        *,
        dtype: torch.dtype,
        machine: Machine,
        tokenizer: Tokenizer,
        data: Mapping[str, Any],
        steps: int | None,
        workers: MicrobatchPool | None = None,
        generation: Mapping[str, Any] | None = None,
        quiet: bool = False,
    ) -> None:
        self.model, self.dtype, self.steps = model, dtype, steps
        self.tokenizer, self.generation = tokenizer, generation
        self.state = State(model, optimizer, Progress())
        self.workers = workers or MicrobatchPool(1)
        self.out = Path(config.out)
        self._settings, self._machine, self._data = config, machine, data
        self.reporter = Reporter(steps, config.log_every, quiet=quiet)
        self.stop = StopRequest(self.say)

    @abstractmethod
    def step(self) -> dict[str, Any]:
        """One optimizer step; its line of metrics.jsonl."""

    @abstractmethod
    def measure(self, *, last: bool) -> None:
        """Evaluate on held-out text, if there is any; `last` after the last step."""

    @abstractmethod
    def result(self, record: dict[str, Any]) -> R:
        """Save the model; `record` is the last step's, empty where none was left to do."""

    def say(self, text: str) -> None:
        """A remark on stderr."""
        self.reporter.note(text)

    def go(self, start: Path | None) -> R:
        """From the checkpoint `start`, or from the beginning, to the end.

        Raises what `load_checkpoint` does; Interrupted after a signal, when the running step is done and saved."""
        progress = self._restore(start)
        self.twin = MasterWeights(self.model, self.dtype)
        self.twin.compute.train()
        self.out.mkdir(parents=True, exist_ok=True)
        atomic_write(self.out / CONFIG, config_yaml(self._settings))
        self.log = MetricsLog(self.out / METRICS, after=progress.step if start is not None else None)
        self.began = time.monotonic() - progress.seconds
        record: dict[str, Any] = {}
        try:
            if start is None:
                self.save()  # shows, before any work is done, that saving works
            with self.workers:
                with self.stop:
                    last = self._done()
                    while not last:
                        record = self.step()
                        self.log.write(record)
                        self.reporter.step(record)
                        last = self._done()
                        self.after(record, last)
                self.measure(last=True)
                self.save()
                return self.result(record)
        finally:
            self.log.close()
            self.reporter.close()

    def save(self) -> Path:
        """A checkpoint of where the run is."""
        self.state.progress.seconds = self.elapsed
        return save_checkpoint(
            self.state,
            config=self._settings,
            tokenizer=self.tokenizer,
            data=self._data,
            machine=self._machine,
            generation=self.generation,
        )

    def after(self, record: dict[str, Any], last: bool) -> None:
        """What is due between two steps."""
        config, number = self._settings, self.state.progress.step
        if config.eval_every and number % config.eval_every == 0 and not last:
            self.measure(last=False)
        if config.save_every and number % config.save_every == 0 and not last:
            self.save()
        if self.stop.asked and not last:
            raise Interrupted(self.save())

    @property
    def elapsed(self) -> float:
        """Seconds in the loop, over all processes of the run."""
        return time.monotonic() - self.began

    def eta(self, seconds: float) -> float:
        """Seconds that are left when a step takes `seconds`."""
        limits = []
        if self.steps is not None:
            limits.append((self.steps - self.state.progress.step) * seconds)
        if self._settings.max_seconds is not None:
            limits.append(max(0.0, self._settings.max_seconds - self.elapsed))
        return min(limits)

    def _restore(self, start: Path | None) -> Progress:
        if start is not None:
            found = load_checkpoint(
                start, self.state, config=self._settings, data=self._data, machine=self._machine
            )
            for remark in found:
                self.say(f"not bit for bit the same run: {remark}")
            self.say(f"going on from {start}: step {self.state.progress.step}")
        return self.state.progress

    def _done(self) -> bool:
        longest = self._settings.max_seconds
        return (self.steps is not None and self.state.progress.step >= self.steps) or (
            longest is not None and self.elapsed >= longest
        )
