"""A process that has imported what tests need from others, and forks a child for each list of tests.

It reads a line of JSON for each: {"stages": [[test, ...], ...], "limit": seconds, "first": whether to stop at the first
failure}, and answers with one. Neither headway nor the tests are imported here: each child imports them as they are.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

HEAVY = ("numpy", "torch", "torch._dynamo", "hypothesis", "transformers.modeling_utils", "tokenizers", "pydantic",
         "typer", "rich.console", "yaml", "jinja2", "safetensors.torch", "matplotlib.pyplot")  # fmt: skip
FLAGS = (
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "--no-header",
    "--assert=plain",
    "--hypothesis-profile=fast",
)
MEMORY = 8 << 30
"""Bytes that a child may have for its data."""


NOTHING = {"failed": [], "passed": [], "now": "", "words": ""}


class Chosen:
    """A plugin: runs the tests of a list in its order, and writes down what became of each."""

    def __init__(self, tests: list[str], said: dict[str, Any], note: Path) -> None:
        self.order = {test: number for number, test in enumerate(tests)}
        self.said, self.note = said, note

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda i: self.order[i.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.said["failed"].append(f"import of {report.nodeid}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.said["now"] = nodeid
        self.note.write_text(json.dumps(self.said))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.said["failed"]:
            self.said["failed"].append(report.nodeid)
            self.said["words"] = str(report.longrepr)[-300:]
        if report.when == "call" and report.passed:
            self.said["passed"].append(report.nodeid)


def child(job: dict[str, Any], note: Path, scratch: Path) -> None:
    """Runs the stages one after the other, in this process."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with (scratch / "output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ |= {name: str(value) for name, value in job.get("environment", {}).items()}
    said: dict[str, Any] = {**NOTHING, "failed": [], "passed": []}
    for tests in job["stages"]:
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        stop = ["-x"] if job["first"] else []
        code = pytest.main(
            [*FLAGS, *stop, f"--basetemp={scratch / 'tmp'}", *files], plugins=[Chosen(tests, said, note)]
        )
        if code not in (0, 1, 5) and not said["failed"]:
            said["failed"].append(f"pytest ended with {int(code)}")
        if said["failed"] and job["first"]:
            break
    said["done"] = True
    note.write_text(json.dumps(said))


def run(job: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Forks a child for a job, and ends it and what it started when its time is over."""
    note = scratch / "note"
    note.write_text("{}")
    began = time.monotonic()
    number = os.fork()
    if not number:
        code = 1
        try:
            child(job, note, scratch)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    status, parent = None, os.getppid()
    while time.monotonic() - began < job["limit"] and os.getppid() == parent:
        ended, status = os.waitpid(number, os.WNOHANG)
        if ended:
            break
        time.sleep(0.02)
    else:
        status = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)
    if status is None:
        os.waitpid(number, 0)
    text = note.read_text()
    said: dict[str, Any] = {**NOTHING, **(json.loads(text) if text else {})}
    if status is None:
        said["outcome"] = "timeout"
    elif said["failed"]:
        said["outcome"] = "killed"
    elif "done" not in said:
        said |= {
            "outcome": "killed",
            "failed": [f"crash ({os.waitstatus_to_exitcode(status)}) in {said['now']}"],
        }
    else:
        said["outcome"] = "lived"
    return {**said, "seconds": round(time.monotonic() - began, 2)}


def main() -> None:
    scratch = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for name in HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    answers.write("{}\n")
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line), scratch)) + "\n")


if __name__ == "__main__":
    main()
