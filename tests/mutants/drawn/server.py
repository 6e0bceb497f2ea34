"""A process that has imported third-party packages once, and forks a child for each job of tests.

It reads one JSON line for each job: {"stages": [[test, ...], ...], "limit": seconds, "first": whether to stop at the
first failure}, and answers with one. It imports neither headway nor tests: each child imports them as they are now.
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
"""Limit of a child's data segment in bytes."""


NOTHING = {"failed": [], "passed": [], "now": "", "words": ""}


class Chosen:
    """A pytest plugin that runs listed tests in order and records their outcomes in `said` and in the file `note`."""

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
    """Runs the stages of a job one after the other in this process."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with (scratch / "output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ |= {name: str(value) for name, value in job.get("environment", {}).items()}
    result: dict[str, Any] = {**NOTHING, "failed": [], "passed": []}
    for tests in job["stages"]:
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        stop = ["-x"] if job["first"] else []
        code = pytest.main(
            [*FLAGS, *stop, f"--basetemp={scratch / 'tmp'}", *files], plugins=[Chosen(tests, result, note)]
        )
        if code not in (0, 1, 5) and not result["failed"]:
            result["failed"].append(f"pytest ended with {int(code)}")
        if result["failed"] and job["first"]:
            break
    result["done"] = True
    note.write_text(json.dumps(result))


def run(job: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Forks a child for a job, kills its process group at the end or when time is over, and returns the outcome."""
    note = scratch / "note"
    note.write_text("{}")
    began = time.monotonic()
    pid = os.fork()
    if not pid:
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
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        time.sleep(0.02)
    else:
        status = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    text = note.read_text()
    result: dict[str, Any] = {**NOTHING, **(json.loads(text) if text else {})}
    if status is None:
        result["outcome"] = "timeout"
    elif result["failed"]:
        result["outcome"] = "killed"
    elif "done" not in result:
        result |= {
            "outcome": "killed",
            "failed": [f"crash ({os.waitstatus_to_exitcode(status)}) in {result['now']}"],
        }
    else:
        result["outcome"] = "lived"
    return {**result, "seconds": round(time.monotonic() - began, 2)}


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
