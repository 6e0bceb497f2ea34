"""Measuring in another process: with another environment, or with a memory of its own.

`python -m headway_lab.bench.subprocess_runner` reads requests, one JSON object a line, and answers each with one line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from headway.errors import BackendError, HeadwayError
from headway.hardware import gemm_peak
from headway_lab.bench import peak_memory
from headway_lab.bench.cases import Case, named
from headway_lab.bench.peers import Unfit
from headway_lab.bench.rows import Row, measure
from headway_lab.bench.timing import Effort


class Child:
    """A process like this one but for its environment. Ctrl-C is not handed on to it: the parent ends it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headway_lab.bench.subprocess_runner"],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ask(self, **request: Any) -> Any:
        """The answer to one request. Raises BackendError with what the other process says, or how it ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise BackendError(f"the process that measures apart ended with code {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise BackendError(answer["error"])
        return answer["value"]

    def measure(self, case: Case, dtype: str, direction: str, backend: str, effort: Effort) -> Row:
        """`rows.measure` over there, at this process's thread count."""
        value = self.ask(
            what="row",
            case=case.name,
            tokens=case.tokens,
            peers=list(case.peers),
            dtype=dtype,
            direction=direction,
            backend=backend,
            effort=asdict(effort),
            threads=torch.get_num_threads(),
        )
        return Row(**value)

    def close(self) -> None:
        """End it, whatever it is doing."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answer(request: dict[str, Any]) -> Any:
    """What a request asks for: a row, what a step holds, or the rate of torch's float32 product."""
    torch.set_num_threads(request["threads"])
    if request["what"] == "product":
        return gemm_peak(torch.float32)
    if request["what"] == "held":
        return asdict(peak_memory.step(peak_memory.Ask(**request["ask"])))
    assert request["what"] == "row", request["what"]
    case = resized(named(request["case"]), request["tokens"], request["peers"])
    effort = Effort(**request["effort"])
    return asdict(measure(case, request["dtype"], request["direction"], request["backend"], effort))


def resized(case: Case, tokens: int, peers: list[str]) -> Case:
    """The case as it was asked for elsewhere."""
    return (case if tokens == case.tokens else case.at(tokens)).beside(peers)


def serve() -> None:
    """Answer requests until the input ends; what libraries print goes to stderr."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = {"value": answer(json.loads(line))}
        except (HeadwayError, Unfit) as error:
            reply = {"error": str(error)}
        channel.write(json.dumps(reply) + "\n")
        channel.flush()


if __name__ == "__main__":
    serve()
