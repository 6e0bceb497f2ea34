"""Paths that begin with ~/ are expanded by every command: shells leave `--out=~/x` as it is."""

from pathlib import Path

import pytest

from headway.checkpoints import save_folder
from headway.cli import run
from headway.cli._options import click_command
from headway.models import ModelSpec, build

SPEC = ModelSpec.of(
    "llama", vocab=64, width=32, layers=1, heads=2, kv_heads=1, hidden=32, trained_context=32, tied=True
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder, with a model `m`; the working folder is another one."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    save_folder("../home/m", build(SPEC, seed=0))
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("command", "written"),
    [
        (["quantize", "~/m", "--weights", "int4", "~/q"], "q/config.json"),
        (["convert", "~/m", "~/m.gguf"], "m.gguf"),
        (["surgery", "window", "~/m", "~/w", "--window", "8"], "w/config.json"),
        (["show", "Causal()", "--tokens", "4", "--out=~/p.png"], "p.png"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_path_at_home_is_written_there(home: Path, command: list[str], written: str) -> None:
    assert run(command) == 0
    assert (home / written).exists()
    assert not list(Path().iterdir())


def test_every_path_of_a_command_is_expanded_and_nothing_else(home: Path) -> None:
    received: list[object] = []

    def command(one: Path, *, more: list[Path] | None = None, text: str = "", at: Path = Path("~/d")) -> None:
        received.extend([one, more, text, at])

    click_command(command)(["~/a", "--more=~/b", "--more=c/~", "--text=~/t"], standalone_mode=False)
    assert received == [home / "a", [home / "b", Path("c/~")], "~/t", home / "d"]
