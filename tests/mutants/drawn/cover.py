"""Finds the tests that run a line, and the order in which to try them.

A line of a function is run by the tests that ran it, or that share a fixture which ran it. A line of a module or class
body runs once, in the first test that imports it: its tests are those that run lines which use the name it defines.
For files that have changed since the map was made, lines are matched to the old ones.
"""

import ast
import difflib
import functools
import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from coverage.numbits import numbits_to_nums

from tests.mutants.drawn.record import generations, test_files


class Generation:
    """One folder of a map."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        facts = json.loads((folder / "tests.json").read_text())
        self.files: set[str] = {*facts["files"]}
        self.tests: dict[str, dict[str, Any]] = facts["tests"]
        self.data = sqlite3.connect(folder / "data/lines", check_same_thread=False)
        self.names: dict[int, str] = dict(self.data.execute("select id, context from context").fetchall())
        self.paths = {
            path.rpartition("/tree/")[2]: key for key, path in self.data.execute("select id, path from file")
        }
        self.runs = functools.cache(self._runs)
        self.old_lines = functools.cache(self._old_lines)
        self.sharing: dict[str, list[str]] = defaultdict(list)
        for test, facts in self.tests.items():
            for fixture in facts.get("fixtures", ()):
                self.sharing[fixture].append(test)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The number of lines that each test runs."""
        sizes: dict[str, int] = defaultdict(int)
        for context, bits in self.data.execute("select context_id, numbits from line_bits"):
            for test in self.expand(self.names[context]):
                sizes[test] += int.from_bytes(bits, "little").bit_count()
        return sizes

    def expand(self, context: str) -> list[str]:
        """Returns the tests of a context: the test itself, or those that share a fixture."""
        if context.startswith("fixture "):
            return self.sharing.get(context, [])
        return [name for name in (context, *context.split("|")) if name in self.tests][:1]

    def _runs(self, file: str) -> dict[int, set[str]]:
        """Returns the tests of each line of a Python file, in the version of the map."""
        lines: dict[int, set[str]] = defaultdict(set)
        query = "select context_id, numbits from line_bits where file_id = ?"
        for context, bits in self.data.execute(query, (self.paths.get(file, -1),)):
            for test in self.expand(self.names[context]):
                for line in numbits_to_nums(bits):
                    lines[line].add(test)
        return lines

    @functools.cached_property
    def kernels(self) -> dict[str, dict[int, set[str]]]:
        text = json.loads((self.folder / "kernels.json").read_text())
        names, lines = text["tests"], text["lines"]
        return {
            file: {int(n): {names[i] for i in tests} for n, tests in own_lines.items()}
            for file, own_lines in lines.items()
        }

    def _old_lines(self, file: str, now: str) -> dict[int, list[int]]:
        """Returns, for each line of a file whose text is `now`, its lines in the map's version."""
        path = self.folder / file
        before = path.read_text().splitlines() if path.exists() else []
        return carried(before, now.splitlines())


def carried(before: list[str], now: list[str]) -> dict[int, list[int]]:
    """Returns, for each line of `now` (from 1), the lines of `before` that it comes from: for a changed line those that
    it replaces, for a new line its neighbours."""
    if before == now:
        return {n: [n] for n in range(1, len(now) + 1)}
    lines: dict[int, list[int]] = {}
    for tag, i, j, k, m in difflib.SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
        for n in range(k, m):
            lines[n + 1] = [i + n - k + 1] if tag == "equal" else [*range(i + 1, j + 1)] or [max(i, 1), i + 1]
    return lines


class Map:
    """The tests that run each line of a checkout."""

    def __init__(self, cache: Path, root: Path) -> None:
        self.root = root
        paths = (path for suffix in (".py", ".h", ".cpp") for path in sorted(root.glob(f"src/**/*{suffix}")))
        self.sources = {path.relative_to(root).as_posix(): path.read_text() for path in paths}
        self.generations = [Generation(folder) for folder in generations(cache)]
        self.newest = {file: g for g in self.generations for file in g.files}
        here = test_files(root).keys()
        self.tests = {
            test: facts
            for g in self.generations
            for test, facts in g.tests.items()
            if self.newest.get(file := test.partition("::")[0]) is g and file in here
        }

    def usable(self, test: str) -> bool:
        return test in self.tests and self.tests[test]["outcome"] == "passed"

    @property
    def failing(self) -> list[str]:
        """Tests that fail without any fault."""
        return sorted(test for test, facts in self.tests.items() if facts["outcome"] == "failed")

    def stale(self) -> list[str]:
        """Returns the files that have changed since the first generation was made."""
        first = self.generations[0].folder
        files = (path.relative_to(first).as_posix() for path in sorted(first.glob("src/**/*.*")))
        return [
            f
            for f in files
            if not (self.root / f).exists() or (self.root / f).read_bytes() != (first / f).read_bytes()
        ]

    def _running(self, file: str, lines: Iterable[int]) -> set[str]:
        tests: set[str] = set()
        for g in self.generations:
            table = g.runs(file) if file.endswith(".py") else g.kernels.get(Path(file).name, {})
            old = g.old_lines(file, self.sources[file])
            for line in lines:
                for before in old.get(line, ()):
                    tests |= {t for t in table.get(before, ()) if self.newest.get(t.partition("::")[0]) is g}
        return {test for test in tests if self.usable(test)}

    def compiled(self) -> set[tuple[str, int]]:
        """Returns the kernel lines (file name, number) that have code according to the map."""
        lines = set()
        for path in (self.root / "src/headway/native/csrc").iterdir():
            file = path.relative_to(self.root).as_posix()
            table = self.generations[0].kernels.get(path.name, {})
            old = self.generations[0].old_lines(file, self.sources[file])
            lines |= {(path.name, line) for line, before in old.items() if any(n in table for n in before)}
        return lines

    def tests_of(self, file: str, line: int) -> list[str]:
        """Returns the tests that run a line, unordered."""
        if not file.endswith(".py"):
            return [*self._running(file, [line])]
        statement, inside = statement_at(parsed(self.sources[file]), line)
        if inside:
            return [*self._running(file, of_statement(statement, line))]
        tests = self._users(file, statement, depth=3)
        if not tests:
            tests = self._running(file, function_lines(self.sources[file]))
        return [*tests]

    def _users(self, file: str, statement: ast.stmt, depth: int) -> set[str]:
        """Returns the tests that run a line which uses a name bound by this statement of a module or class."""
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return self._running(file, range(statement.body[0].lineno, (statement.end_lineno or 0) + 1))
        names = bound(statement)
        tests: set[str] = set()
        if not names or not depth:
            return tests
        word = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
        of_module = statement in parsed(self.sources[file]).body
        for user_file, text in self.sources.items():
            if not user_file.endswith(".py") or not word.search(text):
                continue
            if of_module and user_file != file and not imports(text, file, names):
                continue
            lines = {n for n, line in enumerate(text.splitlines(), 1) if word.search(line)}
            tests |= self._running(user_file, lines & function_lines(text))
            for line in sorted(lines - function_lines(text)):
                user, _ = statement_at(parsed(text), line)
                if (
                    user_file == file
                    and user is not statement
                    and not isinstance(user, (ast.Import, ast.ImportFrom))
                ):
                    tests |= self._users(user_file, user, depth - 1)
        return tests


@functools.cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


@functools.cache
def function_lines(text: str) -> frozenset[int]:
    """Returns the lines of the bodies of a file's functions."""
    return frozenset(
        line
        for node in ast.walk(parsed(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
    )


@functools.cache
def imported(text: str) -> frozenset[tuple[str, str]]:
    """Returns the (module, name) pairs of a file's `from` imports."""
    nodes = (node for node in ast.walk(parsed(text)) if isinstance(node, ast.ImportFrom))
    return frozenset((node.module or "", alias.name) for node in nodes for alias in node.names)


def imports(text: str, file: str, names: list[str]) -> bool:
    """Returns whether a source imports the module `file`, or any of `names` from it or from a parent package."""
    module = ".".join(Path(file).with_suffix("").parts[1:]).removesuffix(".__init__")
    wanted = {*names, module.rpartition(".")[2]}
    return any(name in wanted and f"{module}.".startswith(f"{place}.") for place, name in imported(text))


def bound(statement: ast.stmt) -> list[str]:
    """Returns the names that a statement binds."""
    match statement:
        case ast.Assign(targets=targets):
            return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.ClassDef(name=name):
            return [name]
    return []


def statement_at(tree: ast.Module, line: int) -> tuple[ast.stmt, bool]:
    """Returns the smallest statement that contains a line, and whether it is in the body of a function."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    around = around or tree.body[:1]  # the line is a comment
    statement = min(reversed(around), key=lambda node: (node.end_lineno or node.lineno) - node.lineno)
    functions = (node for node in around if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return statement, any(node.body[0].lineno <= line and node is not statement for node in functions)


def of_statement(statement: ast.stmt, line: int) -> range:
    """Returns the lines that run together with a line: all of a simple statement, or the head of a compound one; the
    line alone if it is between two bodies."""
    body = getattr(statement, "body", None) or getattr(statement, "cases", None)
    if not body:
        return range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    first = getattr(body[0], "lineno", None) or body[0].pattern.lineno
    head = range(statement.lineno, max(first, statement.lineno + 1))
    return head if line in head else range(line, line + 1)


def ordered(tests: Iterable[str], file: str, sizes: dict[str, int], seconds: dict[str, float]) -> list[str]:
    """Returns the tests of a line in the order to try them: the nearest by path first, then those that run the fewest
    lines, then the fastest; a test function's second case comes after the first case of every other."""
    beside = mirror(file)

    def key(test: str) -> tuple[int, int, float, str]:
        path = test.partition("::")[0]
        tier = next((n for n, prefix in enumerate(beside) if path.startswith(prefix)), len(beside))
        return tier, sizes.get(test, 0), seconds.get(test, 0.0), test

    cases: dict[str, int] = defaultdict(int)
    ranked = []
    for test in sorted(tests, key=key):
        name = test.partition("[")[0]
        cases[name] += 1
        ranked.append((key(test)[0], cases[name], key(test), test))
    return [test for *_, test in sorted(ranked)]


def mirror(file: str) -> list[str]:
    """Returns path prefixes of the tests nearest to a file of `src`: its own test file, then its package's folder."""
    parts = Path(file).with_suffix("").parts[2:]
    if not file.endswith(".py"):
        return ["tests/native/"]
    folders = [f"tests/{part}/" for part in parts[:-1]]
    stem = parts[-1].strip("_")
    own_files = [f"{folder}test_{stem}" for folder in (*folders, "tests/")]
    return [*own_files, *reversed(folders)]
