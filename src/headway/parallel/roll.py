"""Which process of a run is missing, and since when."""

import itertools
import os
import socket
import threading
import time
from contextlib import suppress

import torch.distributed as dist

from headway.errors import RankError

BEAT, SILENCE, LOST = 0.5, 4.0, 60.0
"""Seconds between two signs of life; without one, until a process is named when a message failed; until the main one
is given up where none did, which may be a busy machine."""
FOLLOWED = "-"
"""Before the reason of a process that stopped because another one was missing."""
TOLD = "absent"
"""The key under which it stands who is gone, once a process has found out."""


class Roll:
    """The list of a run's processes in the store that they share: who each is, how many messages it has come to, a sign
    of life twice a second, and why it left.

    A killed process sends no heartbeat. One that hangs does, but does not come to the messages that the
    others wait at. Who finds that one is gone tells the others: those that wait for each other in turn find out so late
    that the store may be gone, too. Raises RankError, at the beginning, where one of them is gone before all have
    signed.
    """

    def __init__(self, store: dist.distributed_c10d.Store, rank: int, ranks: int) -> None:
        self.store, self.rank, self.ranks, self.number = store, rank, ranks, 0
        self._over, self._told = threading.Event(), ""
        try:
            self._set("who", f"process {os.getpid()} on host {socket.gethostname()}")
            self._thread = threading.Thread(target=self._beat, args=(store.clone(),), daemon=True)  # type: ignore[attr-defined]
            self._thread.start()
            store.wait([f"who/{other}" for other in range(ranks)])
        except RuntimeError as error:
            raise self.missing(error) from error

    def come(self) -> None:
        """Before each message among all: this process has come to it."""
        self.number += 1
        self._set("at", str(self.number))

    def leave(self, why: str | None) -> None:
        """The end, for what reason: None for a whole run."""
        self._over.set()
        self._thread.join(SILENCE)
        if why is not None:
            with suppress(RuntimeError):  # with its store the run is gone
                self._set("left", why)

    def linger(self) -> None:
        """Behind the connections of a process that left for a reason: rank 0, which may hold the store, stays until the
        others have read it, or are gone."""
        until = time.monotonic() + 2 * SILENCE
        with suppress(RuntimeError):
            if self.rank == 0 and self._get("left", 0):
                while time.monotonic() < until and not all(self._get("left", r) for r in range(self.ranks)):
                    time.sleep(0.05)

    def wait(self, key: str) -> None:
        """Until the main process has written `key`, however long that takes. Raises RankError when it is gone."""
        before, since = "", time.monotonic()
        try:
            while not self.store.check([key]):
                time.sleep(0.05)
                now = self._get("beat", 0)
                if now != before:
                    before, since = now, time.monotonic()
                if (time.monotonic() - since > LOST or self._get("left", 0)) and (gone := self._absent()):
                    raise RankError("; ".join(gone))
        except RuntimeError as error:
            raise self.missing(error) from error

    def missing(self, error: RuntimeError) -> Exception:
        """What to raise when a message among all failed with `error`: who is missing, or else `error`."""
        try:
            absent = self._absent()
        except RuntimeError:
            absent = [
                self._told
                or f"rank 0, or who started the run, is gone: its store does not answer (asked by rank {self.rank})"
            ]
        return RankError("; ".join(absent)) if absent else error

    def _absent(self) -> list[str]:
        """Of each other process that is missing, why."""
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        before = {rank: self._get("beat", rank) for rank in others}
        for _ in range(round(SILENCE / BEAT)):  # time in which this process itself was stopped does not count
            if self._told:
                return [self._told]
            time.sleep(BEAT)
        found, late, followed = list[str](), list[str](), list[str]()
        for rank in others:
            why = self._get("left", rank)
            named = f"rank {rank} ({self._get('who', rank) or 'which never came'})"
            if why:
                by_itself = not why.startswith(FOLLOWED)
                (found if by_itself else followed).append(f"{named} stopped: {why.removeprefix(FOLLOWED)}")
            elif self._get("beat", rank) == before[rank]:
                found.append(f"{named} is gone: it was killed, or its host is; its heartbeat stopped")
            elif int(self._get("at", rank) or 0) < self.number:
                late.append(
                    f"{named} hangs: it lives, but did not come to where rank {self.rank} waited for it"
                )
        if found and not self._told:
            self.store.set(TOLD, "; ".join(found))
        return found or late or followed

    def _beat(self, store: dist.distributed_c10d.Store) -> None:
        for number in itertools.count():
            try:
                store.set(f"beat/{self.rank}", str(number))
                if store.check([TOLD]):
                    self._told = bytes(store.get(TOLD)).decode()
            except RuntimeError:
                return  # with its store the run is gone
            if self._over.wait(BEAT):
                return

    def _set(self, what: str, value: str) -> None:
        self.store.set(f"{what}/{self.rank}", value)

    def _get(self, what: str, rank: int) -> str:
        key = f"{what}/{rank}"
        return bytes(self.store.get(key)).decode() if self.store.check([key]) else ""
