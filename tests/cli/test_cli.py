"""The command line itself: the overview, exit codes, and where messages go."""

import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway import cli
from headway.cli import COMMANDS, Command, commands, run
from headway.errors import ConfigError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Returns a function that installs its argument as a command called `probe`."""

    def put(function: Any) -> None:
        module = types.ModuleType("probe_command")
        module.command = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "probe_command", module)
        monkeypatch.setitem(COMMANDS, "probe", Command("a probe", "probe_command"))

    return put


def test_help_names_every_command_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["-h"], ["help"]):
        assert run(arguments) == 0
        text = capsys.readouterr().out
        for name, command in commands().items():
            assert f"  {name}" in text
            assert command.help in text
        assert max(map(len, text.splitlines())) <= 100


def test_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"headway {version('headway')}\n"


@pytest.mark.parametrize(
    ("name", "kind", "hint"),
    [
        ("trian", "command", 'did you mean "train"?'),
        ("explian", "command", '"explain"'),
        ("--vrsion", "option", ""),
    ],
)
def test_an_unknown_command_is_wrong_usage_and_told(
    name: str, kind: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"there is no {kind} {name!r}" in err
    assert hint in err
    assert "the commands are train, " in err


def test_what_a_command_returns_is_the_exit_code(command: Callable[[Any], None]) -> None:
    def answer(*, code: int = 0) -> int | None:
        return code or None

    command(answer)
    assert run(["probe"]) == 0
    assert run(["probe", "--code", "1"]) == 1


def test_a_users_error_is_one_line_on_stderr(
    command: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        print("half a result")
        raise ConfigError("width 7: must be even; give 6 or 8")

    command(fail)
    assert run(["probe"]) == 1
    out, err = capsys.readouterr()
    assert out == "half a result\n"
    assert err == "headway: error: width 7: must be even; give 6 or 8\n"


def test_a_missing_file_is_named(command: Callable[[Any], None], capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        open("/nowhere/at/all.txt").close()

    command(fail)
    assert run(["probe"]) == 1
    assert capsys.readouterr().err == "headway: error: /nowhere/at/all.txt: No such file or directory\n"


def test_an_error_of_ours_is_not_hidden(command: Callable[[Any], None]) -> None:
    def fail() -> None:
        raise KeyError("a bug")

    command(fail)
    with pytest.raises(KeyError, match="a bug"):
        run(["probe"])


def test_ctrl_c_is_130(command: Callable[[Any], None], capsys: pytest.CaptureFixture[str]) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    command(stop)
    assert run(["probe"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_wrong_usage_of_a_command_is_2_and_shown(
    command: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def count(number: int) -> None:
        """Count."""

    command(count)
    for arguments in ([], ["seven"], ["7", "--colour"], ["7", "8"]):
        assert run(["probe", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "Usage: headway probe" in err


def test_help_of_a_command_is_its_docstring_on_stdout(
    command: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def count(*, number: int = 3) -> None:
        """Count to a number.

        number: how many
            there are
        """

    command(count)
    assert run(["probe", "--help"]) == 0
    out, err = capsys.readouterr()
    assert "Usage: headway probe" in out
    assert "Count to a number." in out
    assert "--number" in out
    assert "how many there are" in out
    assert "number:" not in out
    assert "[default: 3]" in out
    assert err == ""


@pytest.mark.parametrize(
    ("command", "first"),
    [
        ("show 'Causal()' --tokens 400", "Causal()"),
        pytest.param("models", "Families", marks=pytest.mark.slow),
    ],
)
def test_a_reader_that_goes_away_is_no_error(command: str, first: str) -> None:
    line = f"{sys.executable} -m headway {command} | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == (f"{first}\n", "")


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Returns a function that installs a package `other` with one command."""

    def install(entry_point: str) -> None:
        info = tmp_path / "other-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[headway.commands]\n{entry_point}\n")
        (tmp_path / "other.py").write_text(
            "from headway.cli import Command\n\nCOUNT = Command('Count to ten', 'other')\n\n\n"
            "def command(*, start: int = 1) -> int:\n    print(*range(start, 11))\n    return 1\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "other", raising=False)

    return install


def test_another_package_adds_a_command(
    plugin: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    plugin("count = other:COUNT")
    assert run(["--help"]) == 0
    assert re.search(r"(?m)^  count +Count to ten$", capsys.readouterr().out)
    assert run(["count", "--start", "9"]) == 1
    assert capsys.readouterr().out == "9 10\n"


@pytest.mark.parametrize(
    ("entry_point", "error"),
    [
        ("count = other:NONE", r"command 'count' of the package other cannot be loaded \(other:NONE"),
        ("count = othr:COUNT", r"cannot be loaded .*No module named 'othr'.*uninstall that package"),
        ("train = other:COUNT", r"command 'train' of the package other exists already \(headway.cli.train\)"),
    ],
)
def test_a_command_that_cannot_be_added_is_an_error(
    entry_point: str, error: str, plugin: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    plugin(entry_point)
    assert run(["--help"]) == 1
    assert re.search(error, capsys.readouterr().err)
    assert run(["show", "Causal()", "--tokens", "2"]) == 0, "headway's own commands do not depend on it"


def test_main_exits_with_the_code() -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["no-such-command"])
    assert stop.value.code == 2


def test_a_warning_is_one_line_without_code() -> None:
    script = (
        "import warnings; from headway import cli; cli.run = lambda argv: warnings.warn('so few', stacklevel=1)\n"
        "cli.main()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stderr == "headway: so few\n"


def test_a_terminal_without_unicode_gets_escapes() -> None:
    script = (
        "import sys; from headway import cli; cli.run = lambda argv: print('\\u4e2d \\u221a'); cli.main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert result.stdout == rb"\u4e2d \u221a" + os.linesep.encode()
