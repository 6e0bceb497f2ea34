"""Starts the processes of a run as forks of the test process, so that nothing is imported again."""

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
"""Seconds that the other processes have to report what they know once one of them has failed unexpectedly."""


def start(ranks: int, run: Callable[[int], Any], logs: Path) -> list[int]:
    """Forks `ranks` processes with the environment of torchrun; each calls run(its rank) and writes its stderr to
    `logs`/RANK. Returns their process ids."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    logs.mkdir(parents=True, exist_ok=True)
    children = []
    for rank in range(ranks):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks of threaded processes
            child = os.fork()
        if child == 0:
            _become(rank, ranks, port, run, logs / str(rank))
        children.append(child)
    return children


def _become(rank: int, ranks: int, port: int, run: Callable[[int], Any], log: Path) -> None:
    code = 1
    try:
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)
        }  # fmt: skip
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
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
    """Waits until `happens()` is true, a process has ended, or `seconds` are over."""
    for _ in range(round(100 * seconds)):
        if happens() or any(
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) for child in children
        ):
            break
        time.sleep(0.01)


def ended(children: list[int], seconds: float = 120.0, *, alone: float = 90.0) -> list[int]:
    """Returns the exit codes of the processes in order (negative: the signal that killed one). A process that still
    runs after `seconds`, or `alone` seconds after another one failed (ranks give up on a silent one after `roll.LOST`,
    60 s), is ended by SIGABRT, on which it prints its stack."""
    codes: dict[int, int] = {}
    rounds = round(100 * seconds)
    while rounds > 0 and len(codes) < len(children):  # rounds, not time: none pass while all are suspended
        for child in children:
            if child not in codes and (waited := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(waited[1])
                rounds = rounds if codes[child] == 0 else min(rounds, round(100 * alone))
        rounds -= 1
        time.sleep(0.01)
    for child in children:
        if child not in codes:
            os.kill(child, signal.SIGABRT)
            codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return [codes[child] for child in children]


def together(ranks: int, run: Callable[[int], Any], logs: Path) -> None:
    """Calls `run` in `ranks` processes and asserts that all exit with 0; the message has the stderr of each."""
    codes = ended(start(ranks, run, logs), alone=GRACE)
    outputs = "\n".join(f"rank {rank}: {(logs / str(rank)).read_text()}" for rank in range(ranks))
    assert codes == [0] * ranks, outputs
