"""Detection of processes of a run that died, stopped or hang."""

import itertools
import os
import socket
import threading
import time
from contextlib import suppress

import torch.distributed as dist

from headway.errors import RankError

BEAT, SILENCE, LOST = 0.5, 4.0, 60.0
"""Seconds between two heartbeats; without a heartbeat, until a process is reported missing after a message failed;
until the main process is given up while waiting for it, which is longer since the machine may just be busy."""
FOLLOWED = "-"
"""Prefix of the reason of a process that stopped because another one was missing."""
GONE = "absent"
"""The store's key for the description of the missing processes, once a process has noticed."""


class Roll:
    """The register of a run's processes in their shared store: for each its identity, the number of messages it has
    reached, a heartbeat twice a second, and why it left.

    A killed process sends no heartbeat. One that hangs does, but does not reach the messages that the others wait at. A
    process that notices that another one is missing records it for the others: processes that wait for each other in a
    chain notice so late that the store may be gone, too. Raises RankError on creation if a process is missing before
    all have registered.
    """

    def __init__(self, store: dist.distributed_c10d.Store, rank: int, ranks: int) -> None:
        self.store, self.rank, self.ranks, self.number = store, rank, ranks, 0
        self._over, self._gone = threading.Event(), ""
        try:
            self._set("who", f"process {os.getpid()} on host {socket.gethostname()}")
            self._thread = threading.Thread(target=self._beat, args=(store.clone(),), daemon=True)  # type: ignore[attr-defined]
            self._thread.start()
            store.wait([f"who/{other}" for other in range(ranks)])
        except RuntimeError as error:
            raise self.missing(error) from error

    def come(self) -> None:
        """Counts a message that this process has reached; call it before each message among all processes."""
        self.number += 1
        self._set("at", str(self.number))

    def leave(self, why: str | None) -> None:
        """Leaves the run for the reason `why`; None if it succeeded."""
        self._over.set()
        self._thread.join(SILENCE)
        if why is not None:
            with suppress(RuntimeError):  # with its store the run is gone
                self._set("left", why)

    def linger(self) -> None:
        """Waits when connections are closed after a failure: rank 0, which may hold the store, stays until the others
        have left, or for at most 8 seconds."""
        until = time.monotonic() + 2 * SILENCE
        with suppress(RuntimeError):
            if self.rank == 0 and self._get("left", 0):
                while time.monotonic() < until and not all(self._get("left", r) for r in range(self.ranks)):
                    time.sleep(0.05)

    def wait(self, key: str) -> None:
        """Waits until the main process has written `key`, however long that takes. Raises RankError if it is
        missing."""
        last_beat, since = "", time.monotonic()
        try:
            while not self.store.check([key]):
                time.sleep(0.05)
                beat = self._get("beat", 0)
                if beat != last_beat:
                    last_beat, since = beat, time.monotonic()
                if (time.monotonic() - since > LOST or self._get("left", 0)) and (gone := self._absent()):
                    raise RankError("; ".join(gone))
        except RuntimeError as error:
            raise self.missing(error) from error

    def missing(self, error: RuntimeError) -> Exception:
        """Returns the error to raise after a message among all failed with `error`: a RankError that names the missing
        processes, or `error` if none is missing."""
        try:
            reasons = self._absent()
        except RuntimeError:
            reasons = [
                self._gone
                or f"rank 0, or the process that started the run, is gone: its store does not answer rank {self.rank}"
            ]
        return RankError("; ".join(reasons)) if reasons else error

    def _absent(self) -> list[str]:
        """Returns the other processes that are missing, each with the reason."""
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        beats = {rank: self._get("beat", rank) for rank in others}
        for _ in range(round(SILENCE / BEAT)):  # no clock: this process itself may be stopped meanwhile
            if self._gone:
                return [self._gone]
            time.sleep(BEAT)
        gone, late, followed = list[str](), list[str](), list[str]()
        for rank in others:
            why = self._get("left", rank)
            name = f"rank {rank} ({self._get('who', rank) or 'never registered'})"
            if why:
                by_itself = not why.startswith(FOLLOWED)
                (gone if by_itself else followed).append(f"{name} stopped: {why.removeprefix(FOLLOWED)}")
            elif self._get("beat", rank) == beats[rank]:
                gone.append(f"{name} is gone: its heartbeat stopped, so it was killed, or its host is down")
            elif int(self._get("at", rank) or 0) < self.number:
                late.append(
                    f"{name} hangs: it is alive, but did not reach the call in which rank {self.rank} waits"
                )
        if gone and not self._gone:
            self.store.set(GONE, "; ".join(gone))
        return gone or late or followed

    def _beat(self, store: dist.distributed_c10d.Store) -> None:
        for number in itertools.count():
            try:
                store.set(f"beat/{self.rank}", str(number))
                if store.check([GONE]):
                    self._gone = bytes(store.get(GONE)).decode()
            except RuntimeError:
                return  # with its store the run is gone
            if self._over.wait(BEAT):
                return

    def _set(self, what: str, value: str) -> None:
        self.store.set(f"{what}/{self.rank}", value)

    def _get(self, what: str, rank: int) -> str:
        key = f"{what}/{rank}"
        return bytes(self.store.get(key)).decode() if self.store.check([key]) else ""
