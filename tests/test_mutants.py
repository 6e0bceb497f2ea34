"""Drawn faults: which are drawn, how they are tried, and how results are kept and counted."""

import ast
import importlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.drawn import __main__ as command
from tests.mutants.drawn import cover, cpp_faults, draw, python_faults, report, score
from tests.mutants.drawn.fault import Fault, fault

ROOT = Path(__file__).parents[1]


def test_all_of_the_sources_can_be_broken_and_no_id_is_there_twice() -> None:
    """Every 20th Python file is enough to see that places are byte offsets."""
    ids = Counter[str]()
    for file in (*draw.python_files(ROOT)[::20], *draw.cpp_files(ROOT)):
        source = (ROOT / file).read_bytes()
        of_file = python_faults.faults if file.endswith(".py") else cpp_faults.faults
        for one_fault in of_file(file, source):
            assert source[one_fault.start : one_fault.end] == one_fault.old.encode()
            ids[one_fault.id] += 1
    assert len(ids) > 10_000
    assert max(ids.values()) == 1


def test_an_id_goes_with_the_line_and_equal_lines_are_told_apart() -> None:
    (original,) = python_faults.faults("a.py", b"x = a < b")
    moved = python_faults.faults("a.py", b"y = f\n\nif True:\n  x = a < b")[-1]
    assert (moved.id, moved.line, original.line) == (original.id, 4, 1)
    twins = python_faults.faults("a.py", b"x = a < b\nx = a < b")
    assert [twin.id for twin in twins] == [original.id, f"{original.id}-2"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Makes a checkout of one package, with kernels."""
    for folder in ("src/headway/native/csrc", "src/headway_lab", "tests/nn"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/headway/a.py").write_text("".join(f"x{i} = {i} + a\n" for i in range(30)))
    (tmp_path / "src/headway/native/csrc/k.h").write_text("".join(f"int x{i} = {i};\n" for i in range(9)))
    return tmp_path


def test_the_seed_decides_the_list_and_a_line_is_drawn_once(tree: Path) -> None:
    drawn = draw.draw(tree, "seed", 20)
    assert drawn == draw.draw(tree, "seed", 20)
    assert drawn != draw.draw(tree, "other", 20)
    assert drawn[:5] == draw.draw(tree, "seed", 5)
    assert len({one_fault.line for one_fault in drawn}) == 20
    assert draw.named(tree, [drawn[3].id]) == [drawn[3]]
    compiled = {("k.h", 2), ("k.h", 5)}
    assert {one_fault.line for one_fault in draw.draw_cpp(tree, "seed", compiled)} == {2, 5}


def test_a_list_that_was_begun_is_gone_on_with_where_the_tree_has_changed(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "ROOT", tree)
    words = ["--seed", "s", "--count", "9", "--cpp", "0", "--cache", str(tree / "cache")]
    before, _ = command.drawn(command.arguments(["run", *words]))
    changed, *unchanged = before
    lines = (tree / "src/headway/a.py").read_text().splitlines()
    lines[changed.line - 1] = "y = b"
    (tree / "src/headway/a.py").write_text("\n".join(["z", *lines, ""]))
    after, _ = command.drawn(command.arguments(["list", *words]))
    assert [(f.id, f.line) for f in after] == [(f.id, f.line + 1) for f in unchanged]
    assert "1 of 9 places are gone" in capsys.readouterr().err


def test_every_line_counts_alike_however_many_places_it_has(tree: Path) -> None:
    (tree / "src/headway/a.py").write_text("x = [1, 2, 3, 4, 5, 6, 7, 8, 9]\ny = a < b\n")
    first = Counter(draw.draw(tree, str(seed), 1)[0].line for seed in range(60))
    assert min(first[1], first[2]) > 15


def test_a_changed_file_runs_as_it_is_though_its_size_and_second_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes a compiled file if the source has the size and the time, in seconds, that it was compiled from."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    worker = object.__new__(score.Worker)
    worker.times = 1_000_000_000
    path = tmp_path / "changed_and_restored.py"

    def imported() -> int:
        sys.modules.pop(path.stem, None)
        importlib.invalidate_caches()
        value: int = importlib.import_module(path.stem).value
        return value

    for value in (1, 2, 1):
        worker.write(path, f"value = {value}\n".encode())
        assert imported() == value
    before = path.stat().st_mtime
    path.write_bytes(b"value = 3\n")
    os.utime(path, (before, before))
    assert imported() == 1  # the stale compiled file


def row(key: str, outcome: str, file: str = "src/headway/nn/a.py", **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": key,
        "file": file,
        "line": 7,
        "operator": "operator",
        "old": "<",
        "new": "<=",
        "by": "",
    }
    return {**fields, "outcome": outcome, "ran": 3, "left_out": 0, **changes}


def test_a_file_of_results_goes_on_after_a_line_that_was_cut(tmp_path: Path) -> None:
    results = score.Results(tmp_path / "r.jsonl")
    assert results.rows() == {}
    results.add(row("a", "lived"))
    results.add(row("a", "killed"))
    with results.path.open("a") as file:
        file.write(json.dumps(row("b", "killed"))[:20])
    assert {key: r["outcome"] for key, r in results.rows().items()} == {"a": "killed"}
    results.add(row("c", "lived"))
    assert [*results.rows()] == ["a", "c"]


def test_what_was_tried_is_not_tried_again_and_kernels_that_are_no_faults_are_replaced() -> None:
    python = [Fault("a.py", n, 0, 1, "", "", "", f"p{n}") for n in range(4)]
    cpp = [Fault("a.h", n, 0, 1, "", "", "", f"c{n}") for n in range(6)]
    rows = {"p0": row("p0", "killed"), "c0": row("c0", "invalid"), "c1": row("c1", "killed")}
    queue = score.Queue(python, cpp, 3, rows)
    taken = []
    while one_fault := queue.take():
        taken.append(one_fault.id)
        queue.done(row(one_fault.id, "same" if one_fault.id == "c2" else "lived"))
    assert [t for t in taken if t[0] == "p"] == ["p1", "p2", "p3"]
    assert [t for t in taken if t[0] == "c"] == ["c2", "c3", "c4"]


def test_tests_beside_the_file_come_first_then_those_that_run_least_and_each_function_once_before_its_cases() -> (
    None
):
    tests = ["tests/nn/test_b.py::t[1]", "tests/nn/test_b.py::t[2]", "tests/api/test_x.py::t",
             "tests/nn/test_a.py::t", "tests/nn/test_b.py::u", "tests/api/test_x.py::small"]  # fmt: skip
    sizes = dict.fromkeys(tests, 100) | {"tests/api/test_x.py::small": 5, "tests/nn/test_b.py::u": 200}
    order = cover.ordered(tests, "src/headway/nn/a.py", sizes, {})
    assert order == [tests[3], tests[0], tests[4], tests[1], tests[5], tests[2]]


def test_a_budget_of_seconds_leaves_out_what_is_too_long_and_takes_at_least_one() -> None:
    seconds = {"a": 5.0, "b": 7.0, "c": 2.0}
    assert score.chosen(["a", "b", "c"], seconds, 8.0) == ["a", "c"]
    assert score.chosen(["b"], seconds, 1.0) == ["b"]
    assert score.stages(["x::a", "y::b", "x::c"], {}, 0.25) == [["x::a", "y::b"], ["x::c"]]
    assert score.stages(["x::a", "y::b", "x::c"], {}, 9.0) == [["x::a", "x::c", "y::b"]]


def test_lines_are_carried_over_to_a_changed_file() -> None:
    before, now = ["a", "b", "c", "d"], ["a", "new", "b", "C", "d"]
    lines = cover.carried(before, now)
    assert (lines[1], lines[3], lines[4], lines[5]) == ([1], [2], [3], [4])
    assert lines[2] == [1, 2]


def test_a_line_of_a_function_is_told_from_one_of_a_class() -> None:
    tree = ast.parse(
        "A = 1\nclass B:\n  c = 2\n  def f(self, x=3):\n    if x:\n      return (\n        4)\n    else: y()"
    )
    places = {line: cover.statement_at(tree, line) for line in range(1, 9)}
    assert [inside for _, inside in places.values()] == [False] * 4 + [True] * 4
    assert [[*cover.of_statement(places[n][0], n)] for n in (5, 7, 8)] == [[5], [6, 7], [8]]
    assert cover.bound(places[1][0]) == ["A"]
    assert cover.bound(places[3][0]) == ["c"]


def test_a_name_of_a_module_is_used_where_it_is_imported_from_it_or_its_package() -> None:
    file = "src/headway/nn/block.py"
    for text in (
        "from headway.nn.block import A",
        "from headway.nn import A",
        "from headway.nn import block",
    ):
        assert cover.imports(text, file, ["A"])
    for text in ("from headway.nn.other import A", "from headway.nn.block import B", "A = 1"):
        assert not cover.imports(text, file, ["A"])


def test_small_packages_are_pooled_by_floor_and_what_changes_nothing_does_not_count() -> None:
    rows = [row(f"k{n}", "killed") for n in range(30)]
    rows += [row(f"s{n}", "lived", "src/headway/cache/a.py") for n in range(2)]
    rows += [
        row("t", "timeout", "src/headway/parallel/a.py"),
        row("c", "killed", "src/headway/native/csrc/a.h"),
    ]
    rows += [
        row("i", "invalid", "src/headway/native/csrc/a.h"),
        row("l", "killed", "src/headway_lab/book/a.py"),
    ]
    counts = report.table([r for r in rows if r["outcome"] != "invalid"], {"s1": "a hint"})
    assert counts["headway/nn"].score == 1.0
    pool = counts["nn, cache, parallel (small)"]
    assert (pool.faults, pool.timeout, pool.lived, pool.equivalent, pool.score) == (3, 1, 1, 1, 0.5)
    assert pool.parts == ["headway/cache 2", "headway/parallel 1"]
    assert "laboratory (small)" in counts
    text = report.text(rows, {"s1": "a hint"})
    assert "1 lived:\ns0         src/headway/cache/a.py:7  operator: < -> <=  (3 tests ran)\n" in text
    assert text.endswith(
        "1 change nothing:\ns1         src/headway/cache/a.py:7  operator: < -> <=  (3 tests ran; a hint)"
    )
    with pytest.raises(ValueError, match="2 of 4 faults are said to change nothing"):
        report.text(rows[29:33], {"s0": "a", "s1": "b"})


def test_every_package_stands_on_a_floor() -> None:
    files = [*draw.python_files(ROOT), *draw.cpp_files(ROOT)]
    assert {report.floor(report.package(file)) for file in files} == {*report.FLOORS, report.LABORATORY}


def test_a_reason_is_needed_for_what_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "equivalent"
    path.write_text("# why\n12345678 only a hint to the compiler\n")
    assert report.reasons(path) == {"12345678": "only a hint to the compiler"}
    path.write_text("12345678 \n")
    with pytest.raises(ValueError, match="12345678 needs a reason"):
        report.reasons(path)


def test_a_fault_says_where_and_what() -> None:
    one_fault = fault("a.py", b"a\n  b = c\n", 4, 5, "d", "kind")
    assert str(one_fault) == "a.py:2  kind: b -> d"
    assert one_fault.apply(b"a\n  b = c\n") == b"a\n  d = c\n"
