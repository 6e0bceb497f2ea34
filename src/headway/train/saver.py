"""Saving checkpoints: by one process as a Hugging Face folder or by all in shards, now or in the background.

with Saver(state, parallel, divided, in_shards=True) as saver:
    saver.save(background=True)                          # a thread writes a copy in memory
    saver.settle(parallel.gather(saver.outcome))         # between steps: publishes the folder if all have written
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
"""Niceness of a thread that writes in the background: threads of a step wait for each other, so that a step is delayed
by anything that takes one of the cores."""


class Saver:
    """Saves a run's state as `checkpoint-N`, one at a time, and removes all but the last `keep_last` ones, and the best
    one if the settings keep it.

    A Hugging Face folder is written by the main process. Of a checkpoint in shards, every process writes its part in a
    thread; the folder gets its name when all processes have reported that they are done, between two steps (`settle`)
    or in `wait`. A save in flight when the run fails is discarded.
    """

    def __init__(
        self, state: State, parallel: Parallel, divided: Divided[Any] | None, *, in_shards: bool
    ) -> None:
        self.state, self.parallel, self.divided, self.in_shards = state, parallel, divided, in_shards
        self._path: Path | None = None  # final path of the save in flight
        self._writer: Writer | None = None
        self._folder = ExitStack()  # in the main process: the temporary folder of the save in flight

    def save(self, *, background: bool = False) -> Path:
        """Waits for the save before, and saves the current state; in the `background`, it is copied now and may be
        written later (only in shards). Returns the path.

        Raises CheckpointError if this save or the one before could not be written."""
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
        """Returns the model with whole weights or, for a frozen model, its `Adapter`. If processes have parts of them,
        they are gathered in the main one; all processes must call this."""
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
        """Outcome of this process's part of the save in flight: None while it is written, else the error or ""."""
        return "" if self._writer is None else self._writer.outcome

    def settle(self, outcomes: Sequence[str | None]) -> None:
        """Publishes the folder of the save in flight under its name if all processes have written, given the `outcome`
        of each.

        Raises CheckpointError, in all processes, if one could not write."""
        if self._path is None or any(outcome is None for outcome in outcomes):
            return
        path, self._path, self._writer = self._path, None, None
        if failed := [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes) if outcome]:
            raise CheckpointError(f"could not save {path}: {'; '.join(failed)}")
        if self.parallel.is_main:
            self._folder.close()
            self._drop_old()

    def wait(self) -> None:
        """Waits until no save is in flight. Polls with short messages: a save may take longer than `patience`."""
        while self._path is not None:
            self.settle(self.parallel.gather(self.outcome))
            time.sleep(0.0 if self._path is None else POLL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None and isinstance(error, Exception):
            self._writer.join()  # before the folder that it writes to is removed
        self._folder.__exit__(kind, error, trace)

    def _begin(self, path: Path, *, copied: bool) -> None:
        names = (self.state.trained, MOMENTS)
        local = self._folder.enter_context(_complete(path, names)) if self.parallel.is_main else None
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
    """A thread that calls `write`, with low priority if in the `background`, and keeps the outcome."""

    def __init__(self, write: Callable[[], None], *, background: bool) -> None:
        super().__init__(daemon=True)  # daemon: a run that is killed at once does not wait for the disk
        self._write, self._background = write, background
        self._error: Exception | None = None

    def run(self) -> None:
        """Writes; called by `start` in the new thread."""
        try:
            if self._background and sys.platform == "linux":  # elsewhere priorities are per process
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            self._write()
        except Exception as error:  # reported by `outcome`, which ends the run
            self._error = error

    @property
    def outcome(self) -> str | None:
        """None while it is writing, else the error, "" if there was none."""
        if self.is_alive():
            return None
        return "" if self._error is None else f"{type(self._error).__name__}: {self._error}"


@contextmanager
def _complete(path: Path, names: Sequence[str]) -> Iterator[Path]:
    """Opens an `atomic_folder`. Raises CheckpointError on closing if shards of a process are missing in it."""
    with atomic_folder(path) as folder:
        yield folder
        if any(open_shards(folder, what) is None for what in names):
            raise CheckpointError(f"could not save {path}: no process has written shards into {folder}")
