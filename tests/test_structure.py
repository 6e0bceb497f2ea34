"""No code outside its own file, its table or the one lowering asks which backend or which leaf of a pattern it is."""

import ast
from collections.abc import Iterator
from pathlib import Path

from headway.attention import BACKENDS
from headway.patterns import leaves
from headway.patterns.base import Pattern

SOURCE = Path(__file__).parents[1] / "src"
FILES = sorted(SOURCE.rglob("*.py"))
LEAVES = {
    name for name, value in vars(leaves).items() if isinstance(value, type) and issubclass(value, Pattern)
}
LEAVES -= {"Pattern"}
OF_LEAVES = {"headway/patterns/leaves.py", "headway/patterns/text.py", "headway/patterns/program.py"}
OF_BACKENDS = {"headway/attention/select.py"}


def place(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def names(node: ast.AST) -> set[str]:
    """Every name and attribute below a node."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def texts(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def leaf_matches(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """Where a value is asked for its class, and which leaves are among those asked for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and names(node.func) & {"isinstance", "issubclass"}:
            yield node.lineno, names(node.args[1]) & LEAVES
        elif isinstance(node, ast.MatchClass):
            yield node.cls.lineno, names(node.cls) & LEAVES
        elif isinstance(node, ast.Compare) and any(
            "type" in names(n) for n in (node.left, *node.comparators)
        ):
            yield node.lineno, names(node) & LEAVES


def compared_texts(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """The texts that something is compared with: by == and in, in a match, and as keys of what is looked up."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield node.lineno, texts(node)
        elif isinstance(node, ast.MatchValue):
            yield node.value.lineno, texts(node)


def test_there_is_something_to_look_for() -> None:
    assert {"Full", "Causal", "Window", "Sink", "GlobalKeys", "GlobalQueries"} == LEAVES
    assert {"dense", "native"} <= set(BACKENDS)
    seen = ast.parse("isinstance(p, Or | leaves.Window)\nmatch p:\n  case Sink(n): pass\nx = type(p) is Full")
    assert [found for _, found in leaf_matches(seen)] == [{"Window"}, {"Full"}, {"Sink"}]
    assert [found for _, found in compared_texts(ast.parse('a in ("auto", "native")'))] == [
        {"auto", "native"}
    ]


def test_leaves_of_patterns_are_asked_for_in_their_file_their_table_and_the_lowering_only() -> None:
    wrong = [
        f"{place(path)}:{line} asks for {', '.join(sorted(found))}"
        for path in FILES
        if place(path) not in OF_LEAVES
        for line, found in leaf_matches(ast.parse(path.read_text()))
        if found
    ]
    assert not wrong


def test_backends_are_compared_by_name_in_the_policy_only() -> None:
    wrong = [
        f"{place(path)}:{line} compares with {', '.join(sorted(found & set(BACKENDS)))}"
        for path in FILES
        if place(path) not in OF_BACKENDS
        for line, found in compared_texts(ast.parse(path.read_text()))
        if found & set(BACKENDS) - {path.parent.name, path.stem}
    ]
    assert not wrong
