"""No module imports itself through others; only their own files, their tables and the one lowering compare names of
backends, families and tasks, or classes of patterns."""

import ast
import graphlib
import traceback
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.attention import BACKENDS
from headway.attention.backends.native import kernels
from headway.models import FAMILIES
from headway.nn import Attention
from headway.patterns import leaves
from headway.patterns.base import Pattern
from headway.train.tasks import TASKS
from tests.native.presence import needs_kernels

SOURCE = Path(__file__).parents[1] / "src"
PLACES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
LEAVES = {
    name for name, value in vars(leaves).items() if isinstance(value, type) and issubclass(value, Pattern)
}
LEAVES -= {"Pattern"}
OF_LEAVES = {"headway/patterns/leaves.py", "headway/patterns/text.py", "headway/patterns/program.py"}
# Files that may compare with a name: its own files, its table, and those where the same word means something else.
OWN = {
    "backend": ("headway/attention/backends/", "headway/attention/select.py"),
    "family": (
        "headway/checkpoints/hf/layouts/",
        "headway/models/families.py",
        "headway/models/encoder_families.py",
        "headway_lab/bench/",
    ),  # cases
    "task": (
        "headway/train/tasks/",
        "headway/models/",
        "headway/checkpoints/",
        "headway/api/",
    ),  # heads
}
NAMES: Mapping[str, Mapping[str, object]] = {"backend": BACKENDS, "family": FAMILIES, "task": TASKS}


def module(place: str) -> str:
    """Returns the module of a file: headway.nn.block for headway/nn/block.py, headway.nn for headway/nn/__init__.py."""
    return place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module(place) for place in PLACES}


@cache
def trees() -> Mapping[str, ast.Module]:
    """Returns the syntax trees of all modules, read once."""
    return {place: ast.parse(path.read_text()) for place, path in PLACES.items()}


@cache
def asked(place: str) -> tuple[tuple[int, set[str]], ...]:
    """Returns the strings that a module compares with, by line."""
    return tuple(compared_texts(trees()[place]))


def imported(tree: ast.AST) -> Iterator[str]:
    """Yields every imported module, also those imported in functions and for type checking only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                yield name if name in MODULES else node.module


def test_no_module_imports_itself_through_others() -> None:
    graph = {module(place): {*imported(tree)} & MODULES for place, tree in trees().items()}
    assert (
        "headway.attention.attend" in graph["headway"]
    )  # found although it is imported for type checking only
    graphlib.TopologicalSorter(graph).prepare()
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter({**graph, "headway.errors": {"headway"}}).prepare()


def names(node: ast.AST) -> set[str]:
    """Returns every name and attribute below a node."""
    variables = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return variables | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def texts(*nodes: ast.AST) -> set[str]:
    constants = (n.value for node in nodes for n in ast.walk(node) if isinstance(n, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def leaf_matches(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """Yields the lines that test the class of a value, with the leaf patterns among the classes."""
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
    """Yields, by line, the strings that something is compared with: by ==, in, startswith, endswith, and match."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and not is_head(node):
            yield node.lineno, texts(node)
        elif isinstance(node, ast.MatchValue):
            yield node.value.lineno, texts(node)
        elif isinstance(node, ast.Call) and names(node.func) & {"startswith", "endswith"}:
            yield node.lineno, texts(*node.args)


def is_head(node: ast.Compare) -> bool:
    """Returns whether a comparison is `head.task == ...`: heads of models have tasks, too, such as masked-lm."""
    return isinstance(node.left, ast.Attribute) and node.left.attr == "task" and "head" in names(node.left)


def test_there_is_something_to_look_for() -> None:
    assert {"Full", "Causal", "Window", "Sink", "Chunk", "GlobalKeys", "GlobalQueries"} == LEAVES
    assert {"dense", "native"} <= set(BACKENDS)
    assert "llama" in FAMILIES
    assert "causal-lm" in TASKS
    seen = ast.parse("isinstance(p, Or | leaves.Window)\nmatch p:\n  case Sink(n): pass\nx = type(p) is Full")
    assert [names_found for _, names_found in leaf_matches(seen)] == [{"Window"}, {"Full"}, {"Sink"}]
    seen = ast.parse('a in ("x", "y")\nb.startswith("z")\nspec.head.task == "masked-lm"\ntask == "u"')
    assert sorted(map(sorted, (names_found for _, names_found in compared_texts(seen)))) == [
        ["u"],
        ["x", "y"],
        ["z"],
    ]


def test_leaves_of_patterns_are_asked_for_in_their_file_their_table_and_the_lowering_only() -> None:
    wrong = [
        f"{place}:{line} asks for {', '.join(sorted(classes))}"
        for place in PLACES.keys() - OF_LEAVES
        for line, classes in leaf_matches(trees()[place])
        if classes
    ]
    assert not wrong


@pytest.mark.parametrize("kind", NAMES)
def test_no_code_asks_for_a_name_of_a_table(kind: str) -> None:
    """What concerns one backend, family or task is in its own file and in its row of the table."""
    wrong = [
        f"{place}:{line} compares with {', '.join(sorted(strings & NAMES[kind].keys()))}"
        for place in PLACES
        if not place.startswith(OWN[kind])
        for line, strings in asked(place)
        if strings & NAMES[kind].keys()
    ]
    assert not wrong
    assert not [place for place in OWN[kind] if not (SOURCE / place).exists()]


@needs_kernels
@pytest.mark.parametrize("gradient", [False, True])
def test_from_a_layer_to_the_kernels_a_call_passes_six_files(
    gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[set[str]] = []
    run = kernels._run

    def recorded(*arguments: Any) -> None:
        files = {Path(frame.filename) for frame in traceback.extract_stack()}
        passed.append({place.relative_to(SOURCE).as_posix() for place in files if SOURCE in place.parents})
        run(*arguments)

    monkeypatch.setattr(kernels, "_run", recorded)
    layer, x = Attention(16, 2, backend="native"), torch.zeros(1, 3, 16)
    with torch.set_grad_enabled(gradient):
        layer(x)
        assert layer(x).requires_grad == gradient
    first, again = passed
    assert first - again <= {"headway/attention/select.py", "headway/attention/autograd.py"}
    assert {"headway/nn/attention_layer.py", "headway/attention/backends/native/kernels.py"} <= again <= first
    assert len(first) <= 6
