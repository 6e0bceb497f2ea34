"""Several processes of a run, forked from the one that tests, so that nothing is imported again."""

import faulthandler
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

GRACE = 5.0
"""Seconds that processes have to say what they know when one of them failed that should not have."""


def start(ranks: int, run: Callable[[int], Any], said: Path) -> list[int]:
    """Fork `ranks` processes, as torchrun would start them; each calls run(its rank), and what it says on stderr goes
    to `said`/RANK. Their ids."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    said.mkdir(parents=True, exist_ok=True)
    children = []
    for rank in range(ranks):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks of threaded processes
            child = os.fork()
        if child == 0:
            _become(rank, ranks, port, run, said / str(rank))
        children.append(child)
    return children


def _become(rank: int, ranks: int, port: int, run: Callable[[int], Any], said: Path) -> None:
    code = 1
    try:
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)
        }  # fmt: skip
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)  # pytest has another
        faulthandler.enable(2)
        try:
            run(rank)
            code = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def soon(happens: Callable[[], bool], children: list[int], seconds: float = 60.0) -> None:
    """Wait until something happens, a process comes to its end, or so many seconds are over."""
    for _ in range(round(100 * seconds)):
        if happens() or any(os.waitid(os.P_PID, c, os.WEXITED | os.WNOHANG | os.WNOWAIT) for c in children):
            break
        time.sleep(0.01)


def ended(children: list[int], seconds: float = 120.0, *, alone: float = 90.0) -> list[int]:
    """The exit codes of processes, in their order (negative: the signal that killed one). One that still runs after so
    many seconds, or `alone` of them after another one failed (a silent one is given up after `roll.LOST`, 60), is ended
    by SIGABRT, on which it says where it was."""
    codes: dict[int, int] = {}
    left = round(100 * seconds)
    while left > 0 and len(codes) < len(children):  # while all of them are stopped, nobody counts
        for child in children:
            if child not in codes and (found := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(found[1])
                left = left if codes[child] == 0 else min(left, round(100 * alone))
        left -= 1
        time.sleep(0.01)
    for child in children:
        if child not in codes:
            os.kill(child, signal.SIGABRT)
            codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return [codes[child] for child in children]


def together(ranks: int, run: Callable[[int], Any], said: Path) -> None:
    """`run` in so many processes, all of which come to its end. AssertionError with what each has said."""
    codes = ended(start(ranks, run, said), alone=GRACE)
    told = "\n".join(f"rank {rank}: {(said / str(rank)).read_text()}" for rank in range(ranks))
    assert codes == [0] * ranks, told
