"""When a run's checkpoints are written, by whom, and when they have their names.

with Saver(state, parallel, in_shards=True) as saver:
    saver.save(background=True)                          # a thread writes the copy in memory
    saver.settle(parallel.gather(saver.outcome))         # between two steps: all have written, or not yet
    saver.wait()
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headway.errors import CheckpointError
from headway.parallel import Parallel
from headway.parallel.sharded import Divided, whole
from headway.storage.files import atomic_folder, remove_folder
from headway.storage.tensors import open_shards
from headway.train.checkpoint import MOMENTS, State, checkpoints, step_of
from headway.train.inputs import trained_adapter

POLL = 0.02
NICE = 10
"""Niceness of a thread in the background: steps whose threads wait for each other are held up by whatever takes a
core."""


class Saver:
    """Saves a run's state as `checkpoint-N`, one at a time, and drops all but `keep_last`, and the best if it is kept.

    A Hugging Face folder is written by the main process. Of a checkpoint in shards every process writes its part, in a
    thread. The folder takes its name when all have reported that they have written (`settle`), which they do between
    two steps or in `wait`; a save in flight when a run fails is dropped.
    """

    def __init__(
        self, state: State, parallel: Parallel, divided: Divided[Any] | None, *, in_shards: bool
    ) -> None:
        self.state, self.parallel, self.divided, self.in_shards = state, parallel, divided, in_shards
        self._path: Path | None = None  # of the save in flight
        self._writer: Writer | None = None
        self._folder = ExitStack()  # the main process's, which has no name yet

    def save(self, *, background: bool = False) -> Path:
        """Save the state as it is now, when the save before is done, in the background perhaps later; returns the path.

        Raises CheckpointError for what could not be written, of this save or the one before."""
        self.wait()
        path = Path(self.state.config.out) / f"checkpoint-{self.state.progress.step}"
        if self.in_shards:
            self._begin(path, copied=background)
            if not background:
                self.wait()
            return path
        trained, moments = self.trained(), self.state.optimizer.state_tensors()
        if self.divided is not None:
            with self.parallel.named():
                moments = whole(moments, self.state.task.model, here=self.parallel.is_main)
        if self.parallel.is_main:
            self.state.save(path, trained, moments)
            self._drop_old()
        return path

    def trained(self) -> Any:
        """The model with whole weights, or of a frozen one the `Adapter`; where processes have parts of them, in the
        main one."""
        state, here = self.state, self.parallel.is_main
        adapter = None if state.task.base is None else trained_adapter(state.task.model)
        if self.divided is None:
            return state.task.model if adapter is None else adapter
        with self.parallel.named():
            if adapter is None:
                return self.divided.whole(here=here)
            return replace(adapter, tensors=whole(adapter.tensors, state.task.model, here=here))

    @property
    def outcome(self) -> str | None:
        """The outcome of this process's part of the save in flight: None while it is written, else its error or ""."""
        return "" if self._writer is None else self._writer.outcome

    def settle(self, outcomes: Sequence[str | None]) -> None:
        """Given the `outcome` of every process: when all have written, the folder takes its name.

        Raises CheckpointError, in all of them, where one could not write."""
        if self._path is None or any(outcome is None for outcome in outcomes):
            return
        path, self._path, self._writer = self._path, None, None
        if failed := [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes) if outcome]:
            raise CheckpointError(f"could not save {path}: {'; '.join(failed)}")
        if self.parallel.is_main:
            self._folder.close()
            self._drop_old()

    def wait(self) -> None:
        """Waits until no save is in flight. Processes ask each other repeatedly: it may take longer than `patience`."""
        while self._path is not None:
            self.settle(self.parallel.gather(self.outcome))
            time.sleep(0.0 if self._path is None else POLL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None and isinstance(error, Exception):
            self._writer.join()  # before what it writes is removed
        self._folder.__exit__(kind, error, trace)

    def _begin(self, path: Path, *, copied: bool) -> None:
        what = (self.state.trained, MOMENTS)
        local = self._folder.enter_context(_complete(path, what)) if self.parallel.is_main else None
        folder = self.parallel.agree(local)
        assert folder is not None, "the main process has made it"
        write = self.state.shard(self.parallel, copied=copied)
        self._path, self._writer = path, Writer(lambda: write(folder), background=copied)
        self._writer.start()

    def _drop_old(self) -> None:
        config, progress = self.state.config, self.state.progress
        for old in checkpoints(Path(config.out))[: -config.keep_last]:
            if not (config.keep_best and step_of(old) == progress.best_step):
                remove_folder(old)


class Writer(threading.Thread):
    """A thread that writes, behind the threads that compute where it is in the `background`, and the outcome."""

    def __init__(self, write: Callable[[], None], *, background: bool) -> None:
        super().__init__(daemon=True)  # a run that is ended at once waits for no disk
        self._write, self._background = write, background
        self._error: Exception | None = None

    def run(self) -> None:
        """Called by `start`."""
        try:
            if self._background and sys.platform == "linux":  # elsewhere a process has one priority
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            self._write()
        except Exception as error:  # whatever it is ends the run
            self._error = error

    @property
    def outcome(self) -> str | None:
        """None while it writes; else the error, "" for none."""
        if self.is_alive():
            return None
        return "" if self._error is None else f"{type(self._error).__name__}: {self._error}"


@contextmanager
def _complete(path: Path, names: Sequence[str]) -> Iterator[Path]:
    """`atomic_folder`, of which the shards of all processes must be there."""
    with atomic_folder(path) as folder:
        yield folder
        if any(open_shards(folder, what) is None for what in names):
            raise CheckpointError(f"could not save {path}: no process has written shards into {folder}")
