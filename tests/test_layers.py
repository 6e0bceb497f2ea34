"""Rules of imports and dependencies that import-linter (make check) cannot check."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "headway"
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LABORATORY = tomllib.loads((ROOT / "packages" / "lab" / "pyproject.toml").read_text())
IMPORTED_AS = {"pyyaml": "yaml", "prometheus-client": "prometheus_client"}
COME_WITH = {"cycler": "matplotlib"}
PURE = {
    "patterns",
    "tokens",
    "heads",
    "positions",
    "scores",
    "partial",
    "choice",
    "errors",
    "similarity",
    "metrics",
    "block_quantization",
    "quantization",
}


def lazy(path: Path) -> bool:
    """Returns whether functions of a file may import headway: this keeps the file quick to import."""
    return path.name == "__init__.py" or PACKAGE / "cli" in path.parents


def modules() -> set[str]:
    """Returns the top-level modules and packages of headway."""
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    return files | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def floors() -> list[list[str]]:
    return [re.findall(r"\w+", layer) for layer in CONTRACTS["floors"]["layers"]]


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields every module that is imported below `tree`, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), node.lineno


def test_every_module_stands_on_exactly_one_floor() -> None:
    named = [name for floor in floors() for name in floor]
    assert sorted(named) == sorted(set(named))
    assert modules() <= set(named), "name the new module in the floors of pyproject.toml"


def test_the_pure_values_are_the_lowest_floor() -> None:
    assert set(floors()[-1]) >= PURE
    assert {name.removeprefix("headway.") for name in CONTRACTS["pure"]["source_modules"]} == PURE


def test_imports_are_absolute_and_at_the_top() -> None:
    """Functions import headway only in lazy files; elsewhere this would hide a cycle."""
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text())
        wrong += [
            f"{name}:{line} relative import" for module, line in imports(tree) if module.startswith(".")
        ]
        if lazy(path):
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                wrong += [
                    f"{name}:{line} imports {module} inside {function.name}"
                    for module, line in imports(function)
                    if module.split(".")[0] == "headway"
                ]
    assert not wrong


def test_what_few_need_is_imported_where_it_is_needed() -> None:
    """These are imported in functions: matplotlib is optional, and the Hub's client takes a second to import."""
    seldom = {"matplotlib", "huggingface_hub", "datasets", "sacrebleu", "transformers"}
    at_once = {
        f"{path.relative_to(PACKAGE)}: {module}"
        for path in PACKAGE.rglob("*.py")
        if PACKAGE / "integrations" not in path.parents
        for statement in ast.parse(path.read_text()).body
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for module, _ in imports(statement)
        if module.split(".")[0] in seldom
    }
    assert not at_once


def distributions(requirements: list[str]) -> set[str]:
    names = {re.match(r"[\w-]+", requirement)[0].lower() for requirement in requirements}  # type: ignore[index]
    return {IMPORTED_AS.get(name, name) for name in names}


def test_what_is_declared_is_imported_and_what_is_imported_is_declared() -> None:
    declared = distributions(PROJECT["dependencies"])
    optional = distributions([name for extra in PROJECT["optional-dependencies"].values() for name in extra])
    lab_only = LABORATORY["tool"]["hatch"]["metadata"]["hooks"]["custom"]["beside-headway"]
    assert declared <= used_by(PACKAGE) <= declared | optional
    assert distributions(lab_only) <= used_by(PACKAGE.with_name("headway_lab")) <= declared | optional
    assert set(COME_WITH.values()) <= distributions(lab_only)
    assert lab_only == PROJECT["optional-dependencies"]["plots"]


def used_by(package: Path) -> set[str]:
    """Returns the names of third-party packages that a package imports."""
    modules = {
        module.split(".")[0]
        for path in package.rglob("*.py")
        for module, _ in imports(ast.parse(path.read_text()))
    }
    return modules - {*sys.stdlib_module_names, *COME_WITH, "headway", "headway_lab"}
