"""Tries faults one by one, each against the tests that run its line, and records the outcomes."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.mutants.__main__ import copy
from tests.mutants.drawn import cover, kernels
from tests.mutants.drawn.fault import Fault
from tests.mutants.drawn.record import ONE_THREAD

BUDGET = 60.0
"""Largest total of the seconds that the tests of one fault took when the map was made."""
FIRST = 6.0
"""Seconds of the tests that run before the files of the remaining tests are imported."""


def chosen(tests: list[str], seconds: dict[str, float], budget: float) -> list[str]:
    """Returns the tests that fit into a budget of seconds, in order, at least one; longer ones are skipped."""
    selected, spent = [], 0.0
    for test in tests:
        cost = seconds.get(test, 0.1)
        if not selected or spent + cost <= budget:
            selected.append(test)
            spent += cost
    return selected


def stages(tests: list[str], seconds: dict[str, float], first: float = FIRST) -> list[list[str]]:
    """Returns the tests in two lists, the first of about `first` seconds; within each, tests of a file are together."""
    spent, count = 0.0, 0
    while count < len(tests) and (not count or spent + seconds.get(tests[count], 0.1) <= first):
        spent += seconds.get(tests[count], 0.1)
        count += 1
    return [by_file(part) for part in (tests[:count], tests[count:]) if part]


def by_file(tests: list[str]) -> list[str]:
    order = {file: n for n, file in enumerate(dict.fromkeys(test.partition("::")[0] for test in tests))}
    return sorted(tests, key=lambda test: order[test.partition("::")[0]])


class Worker:
    """A copy of the checkout, and a process that runs tests in it."""

    def __init__(self, root: Path, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder = folder
        self.tree = copy(root, folder / "tree")
        self.built: kernels.Builder | None = None
        (folder / "temporary").mkdir()
        environment = {"PYTHONPATH": str(self.tree / "src"), "TMPDIR": str(folder / "temporary")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.drawn.server", str(folder)],
            cwd=self.tree,
            env={**os.environ, **ONE_THREAD, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.times = int(time.time())
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that runs tests in {self.tree} has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(
        self, tests: list[list[str]], limit: float, first: bool = True, **environment: str
    ) -> dict[str, Any]:
        assert self.process.stdin is not None
        job = {"stages": tests, "limit": limit, "first": first, "environment": environment}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        shutil.rmtree(self.folder / "temporary", ignore_errors=True)
        (self.folder / "temporary").mkdir()
        return answer

    def write(self, path: Path, content: bytes) -> None:
        """Writes a file with a new time of change, in whole seconds: compiled Python files are checked against it."""
        path.write_bytes(content)
        self.times += 2
        os.utime(path, (self.times, self.times))

    def python(self, fault: Fault, tests: list[list[str]], limit: float) -> dict[str, Any]:
        path = self.tree / fault.file
        before = path.read_bytes()
        try:
            self.write(path, fault.apply(before))
            return self.ask(tests, limit)
        finally:
            self.write(path, before)

    def cpp(self, fault: Fault, tests: list[list[str]], limit: float) -> dict[str, Any]:
        """Tries a fault of the kernels; further outcomes: `invalid` (does not compile), `same` (same machine code)."""
        self.built = self.built or kernels.Builder(self.tree, self.folder / "built")
        path = self.tree / fault.file
        try:
            text = fault.apply(path.read_bytes()).decode()
            if not self.built.build(path.name, text, self.folder / "faulty"):
                return {"outcome": "same"}
        except kernels.DoesNotCompileError:
            return {"outcome": "invalid"}
        return self.ask(tests, limit, HEADWAY_NATIVE_DIR=str(self.folder / "faulty"))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class Results:
    """A file of results, one JSON line for each fault; a fault's last line counts."""

    path: Path

    def rows(self) -> dict[str, dict[str, Any]]:
        rows = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):  # a line is cut if a run was killed
                row = json.loads(line)
                rows[row["id"]] = row
        return rows

    def add(self, row: dict[str, Any]) -> None:
        cut = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a") as file:
            file.write("\n" * cut + json.dumps(row) + "\n")


class Run:
    """Tries faults on several workers, with the map in `cache`."""

    def __init__(
        self, root: Path, cache: Path, results: Results, hours: float, budget: float = BUDGET
    ) -> None:
        self.root, self.cache, self.results, self.budget = root, cache, results, budget
        self.map = cover.Map(cache, root)
        self.seconds = {
            test: facts["seconds"] for test, facts in self.map.tests.items() if "seconds" in facts
        }
        self.sizes = {test: size for g in self.map.generations for test, size in g.sizes.items()}
        self.failing: set[str] = {*self.map.failing}
        self.verified: set[str] = set()
        self.lock = threading.Lock()
        self.until = time.monotonic() + 3600 * hours

    def tests(self, fault: Fault) -> list[str]:
        with self.lock:
            tests = [t for t in self.map.tests_of(fault.file, fault.line) if t not in self.failing]
        return cover.ordered(tests, fault.file, self.sizes, self.seconds)

    def attempt(self, worker: Worker, fault: Fault) -> dict[str, Any]:
        """Tries a fault. If the test that killed it fails without it too, leaves the test out and tries again."""
        while True:
            tests = self.tests(fault)
            selected = chosen(tests, self.seconds, self.budget)
            limit = 30 + 3 * sum(self.seconds.get(test, 0.1) for test in selected)
            if selected or fault.of_kernels:
                answer = (worker.cpp if fault.of_kernels else worker.python)(
                    fault, stages(selected, self.seconds), limit
                )
            else:
                answer = {"outcome": "lived", "seconds": 0.0}
            killers = [t for t in answer.get("failed", ()) if t in self.map.tests and t not in self.verified]
            if answer["outcome"] != "killed" or not killers or self.verify(worker, killers):
                break
        passed = answer.get("passed", [])
        with self.lock:
            self.verified |= {*passed}
        facts = {key: answer[key] for key in ("outcome", "seconds", "words") if key in answer}
        facts["by"] = (answer.get("failed") or [answer.get("now", "")])[0]
        return {**asdict(fault), **facts, "ran": len(passed), "left_out": len(tests) - len(selected)}

    def verify(self, worker: Worker, killers: list[str]) -> bool:
        """Returns whether tests that failed with a fault pass without it."""
        answer = worker.ask([killers], 60 + 3 * sum(self.seconds.get(t, 1.0) for t in killers), first=False)
        wrong: set[str] = set()
        if answer["outcome"] == "killed":
            wrong = {*killers} & {*answer["failed"]} or {*killers}  # all of them if the process crashed
        with self.lock:
            self.failing |= wrong
            self.verified |= {*killers} - wrong
        return not wrong

    def work(self, number: int, queue: "Queue", say: Callable[[str], None]) -> None:
        worker = Worker(self.root, self.cache / f"worker-{number}-{os.getpid()}")
        try:
            while time.monotonic() < self.until and (fault := queue.take()):
                row = self.attempt(worker, fault)
                with self.lock:
                    self.results.add(row)
                    queue.done(row)
                    say(line(fault, row))
        finally:
            worker.close()

    def go(self, workers: int, queue: "Queue", say: Callable[[str], None]) -> None:
        """Works until the queue is empty or time is over. Ctrl-C ends it; results written so far stay."""
        for folder in self.cache.glob("worker-*"):
            if not Path("/proc", folder.name.rpartition("-")[2]).exists():
                shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
        threads = [
            threading.Thread(target=self.work, args=(n, queue, say), daemon=True) for n in range(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)


class Queue:
    """Faults of Python files, with `count` faults of the kernels spread among them that change the machine code."""

    def __init__(
        self, python: Iterable[Fault], cpp: Iterable[Fault], count: int, rows: dict[str, dict[str, Any]]
    ) -> None:
        self.python = [fault for fault in python if fault.id not in rows]
        spare = list(cpp)
        self.missing = count - sum(counts(rows[fault.id]) for fault in spare if fault.id in rows)
        self.spare = [fault for fault in spare if fault.id not in rows]
        self.every = len(self.python) / max(self.missing, 1)
        self.taken = 0.0
        self.lock = threading.Lock()

    def take(self) -> Fault | None:
        with self.lock:
            if self.missing > 0 and self.spare and (self.taken >= self.every or not self.python):
                self.taken -= self.every
                self.missing -= 1
                return self.spare.pop(0)
            self.taken += 1
            return self.python.pop(0) if self.python else None

    def done(self, row: dict[str, Any]) -> None:
        """Marks a fault as tried; a kernel fault that does not compile or changes nothing is replaced by another."""
        if not counts(row):
            with self.lock:
                self.missing += 1


def counts(row: dict[str, Any]) -> bool:
    return row["outcome"] not in ("invalid", "same")


def line(fault: Fault, row: dict[str, Any]) -> str:
    how = f"{row['outcome']:8} {row.get('seconds', 0.0):6.1f} s"
    if row["outcome"] == "lived":
        left = f", {row['left_out']} left out" if row["left_out"] else ""
        return f"{fault.id:10} {how}  {fault}  ({row.get('ran', 0)} tests ran{left})"
    return f"{fault.id:10} {how}  {fault}  {row['by']}"
