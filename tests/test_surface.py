"""The surface is frozen: names, commands, and what importing them costs. To grow it, decide so here."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import headway
from headway.cli import commands
from tests import public_names

NAMES = [
    "ALiBi",
    "Bias",
    "Causal",
    "Choice",
    "Chunk",
    "Full",
    "Global",
    "GlobalKeys",
    "GlobalQueries",
    "HeadwayError",
    "Heads",
    "KeyValues",
    "LanguageModel",
    "Learned",
    "ModelSpec",
    "NoPositions",
    "Partial",
    "Pattern",
    "PerHead",
    "RelativeBias",
    "RelativeKey",
    "Rotary",
    "Sampling",
    "Sink",
    "Sinusoidal",
    "SoftCap",
    "Tokens",
    "Window",
    "attend",
    "attend_keys",
    "attention_weights",
    "load",
]
SUBCOMMANDS = [
    "train",
    "data",
    "preview",
    "generate",
    "translate",
    "fill-mask",
    "classify",
    "answer",
    "embed",
    "chat",
    "run",
    "serve",
    "eval",
    "instruct",
    "judge",
    "convert",
    "surgery",
    "quantize",
    "show",
    "models",
    "inspect",
    "tokenize",
    "plan",
    "diff",
    "doctor",
    "bench",
    "demo",
    "explain",
]
HEAVY = {"torch", "numpy", "matplotlib", "transformers", "tokenizers", "pydantic", "safetensors"}


def imported_by(code: str) -> tuple[set[str], float]:
    """The top-level modules that `code` imports in a fresh interpreter, and the seconds it took."""
    script = (
        "import sys, time, json; at = time.perf_counter()\n"
        f"{code}\n"
        "seconds = time.perf_counter() - at\n"
        "print(json.dumps([sorted({name.split('.')[0] for name in sys.modules}), seconds]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    names, seconds = json.loads(done.stdout.splitlines()[-1])
    return set(names), seconds


def test_the_public_names_are_frozen() -> None:
    assert sorted(headway.__all__) == sorted(NAMES)
    assert set(NAMES) <= set(dir(headway))


def test_the_public_names_of_every_package_are_those_of_the_page() -> None:
    """A name that is there stays; who adds one runs `python -m tests.public_names`."""
    assert public_names.listed() == {name: public_names.names_of(name) for name in public_names.MODULES}


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(headway, name)
    assert value.__doc__
    assert value.__module__.startswith("headway.")


def test_what_a_type_checker_sees_is_what_is_looked_up() -> None:
    tree = ast.parse(Path(headway.__file__).read_text())
    seen = {
        (alias.asname, node.module.removeprefix("headway."))
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("headway")
        for alias in node.names
    }
    assert seen == set(headway._HOME_OF.items())


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'headway' has no attribute 'atend'"):
        headway.atend  # noqa: B018


def test_the_commands_are_frozen() -> None:
    assert list(commands()) == SUBCOMMANDS


def test_importing_the_package_imports_nothing_heavy() -> None:
    modules, seconds = imported_by("import headway")
    print(f"import headway: {seconds:.3f} s")
    assert not modules & HEAVY


def test_the_engine_needs_torch_and_little_else() -> None:
    modules, seconds = imported_by("import torch; at = time.perf_counter()\nimport headway; headway.attend")
    print(f"import headway, attend looked up, beyond torch: {seconds:.3f} s")
    assert not modules & {"matplotlib", "transformers", "tokenizers", "pydantic", "typer", "huggingface_hub"}


def test_help_imports_nothing_heavy() -> None:
    modules, seconds = imported_by("from headway.cli import run; assert run(['--help']) == 0")
    print(f"headway --help: {seconds:.3f} s")
    assert not modules & HEAVY


def test_the_help_of_every_command_is_quick() -> None:
    """In one interpreter: none of them imports what takes seconds."""
    code = f"from headway.cli import run; assert not any(run([name, '--help']) for name in {SUBCOMMANDS})"
    assert not imported_by(code)[0] & {"torch", "transformers"}


def test_a_name_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards it is the package's own; a name that is not there is an AttributeError, as from any module."""
    from headway.patterns import Causal

    monkeypatch.delitem(vars(headway), "Causal", raising=False)
    assert headway.Causal is Causal
    assert vars(headway)["Causal"] is Causal
    with pytest.raises(AttributeError, match=r"^module 'headway' has no attribute 'causal'$"):
        headway.causal  # noqa: B018
    assert headway.__getattr__("compat").__name__ == "headway.compat"
