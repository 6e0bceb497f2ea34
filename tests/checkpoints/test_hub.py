"""Models from the Hub, and the Hub's errors in our words, tested with a fake Hub."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from headway.checkpoints import save_folder
from headway.checkpoints.remote import asking, local_model
from headway.cli import run
from headway.errors import CheckpointError, ConfigError, HubError
from tests.generate.conftest import small
from tests.text.conftest import byte_level


def http(kind: Any, code: int) -> Exception:
    request = SimpleNamespace(url="https://huggingface.co", method="GET")
    response = SimpleNamespace(status_code=code, headers={}, request=request)
    error: Exception = kind("no", response=response, server_message="the server's words")
    return error


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: http(errors.GatedRepoError, 403), "the repository is gated; request access on its page"),
        (
            lambda: http(errors.RepositoryNotFoundError, 401),
            "no such repository, or it is private; check owner",
        ),
        (
            lambda: http(errors.RevisionNotFoundError, 404),
            "no such revision; give a branch, a tag or a commit",
        ),
        (lambda: http(errors.RemoteEntryNotFoundError, 404), "the repository has no such file"),
        (
            lambda: errors.LocalEntryNotFoundError("gone"),
            r"the Hub is disabled \(HF_HUB_OFFLINE=1\) or unreachable",
        ),
        (
            lambda: errors.OfflineModeIsEnabled("off"),
            r"the Hub is disabled \(HF_HUB_OFFLINE=1\) or unreachable",
        ),
        (lambda: errors.HFValidationError("two slashes"), r"which is OWNER/NAME \(two slashes\)"),
        (
            lambda: http(errors.HfHubHTTPError, 401),
            "the Hub answered 401: the server's words; the token .HF_TOKEN. is invalid",
        ),
        (lambda: http(errors.HfHubHTTPError, 500), "the Hub answered 500: the server's words$"),
        (lambda: ConnectionError("no line"), r"the Hub is unreachable \(no line\)"),
    ],
)
def test_errors_of_the_hub_say_what_to_do(make: Callable[[], Exception], message: str) -> None:
    with pytest.raises(HubError, match=rf"^o/n: .*{message}"), asking("o/n"):
        raise make()


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Sets up a fake Hub that has the model owner/name, and returns the list of requests to it."""
    requests: list[tuple[str, str | None]] = []
    save_folder(tmp_path / "kept", small(), tokenizer=byte_level())

    def snapshot(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        requests.append((name, revision))
        if name != "owner/name":
            raise http(errors.RepositoryNotFoundError, 404)
        return str(tmp_path / "kept")

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return requests


def test_an_address_of_the_hub_stands_for_a_folder(
    kept: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    assert local_model("owner/name") == local_model("hf://owner/name") == folder
    assert local_model("hf://owner/name@v1") == local_model(Path("hf://owner/name@v1")) == folder
    assert local_model("owner/name", revision="v2") == folder
    assert kept == [("owner/name", revision) for revision in (None, None, "v1", "v1", "v2")]
    with pytest.raises(ConfigError, match="names a revision other than revision 'v2'"):
        local_model("owner/name@v1", revision="v2")
    with pytest.raises(CheckpointError, match=r"^hf://owner/nam: it could not be downloaded \(RepositoryNot"):
        local_model("hf://owner/nam")
    del kept[:]
    Path("run/checkpoint-20").mkdir(parents=True)
    assert local_model(folder) == folder
    Path("owner/name").mkdir(parents=True)  # a folder of that name goes first
    assert local_model("owner/name") == Path("owner/name")
    assert kept == []
    local_model("hf://owner/name")
    assert kept == [("owner/name", None)]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (
            "run/final",
            "run/final: no such file or folder (run has checkpoint-20); for the Hub repository use hf://run/final",
        ),
        (
            "run/checkpoint-10",
            'run/checkpoint-10: no such file or folder (did you mean "checkpoint-20"?); for the Hub repository',
        ),
        ("./run/final", "./run/final: no such file or folder (run has checkpoint-20)"),
        ("runs/mine/final", "runs/mine/final: no such file or folder"),
        ("/nowhere/model", "/nowhere/model: no such file or folder"),
    ],
)
def test_a_misspelt_path_is_said_to_be_missing_and_the_hub_is_not_asked(
    kept: list[tuple[str, str | None]], typed: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path begins with a dot, a slash or the name of an existing folder, or has several slashes."""
    Path("run/checkpoint-20").mkdir(parents=True)
    with pytest.raises(CheckpointError) as error:
        local_model(typed)
    assert str(error.value).startswith(says)
    assert run(["inspect", typed]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert kept == []


@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "{}"],
        ["plan", "{}"],
        ["diff", "{}", "llama"],
        ["generate", "{}", "the", "--max-new-tokens", "2"],
        ["quantize", "{}", "--weights", "int8", "out"],
        ["surgery", "window", "{}", "out", "--window", "8"],
        ["convert", "{}", "out"],
        ["eval", "{}", "--data", "text.txt"],
        ["train", "--model", "{}", "--data", "text.txt", "--dry-run"],
    ],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize("address", ["owner/name", "hf://owner/name"])
def test_every_command_takes_an_address_for_a_model(
    command: list[str], address: str, kept: list[tuple[str, str | None]], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text("the cat sat on the mat\n" * 40)
    assert run([part.format(address) for part in command]) == 0, capsys.readouterr().err
    assert ("owner/name", None) in kept
    assert run([part.format(address + "s") for part in command]) in (1, 2)
    assert "could not be downloaded (RepositoryNotFoundError" in " ".join(capsys.readouterr().err.split())
