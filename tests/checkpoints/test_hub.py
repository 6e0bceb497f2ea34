"""Models from the Hub and to it, with the Hub's errors in our words; the Hub is a fake."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from headway.checkpoints import save_folder
from headway.checkpoints.hub import asking, card, download, push
from headway.checkpoints.remote import local_model
from headway.cli import run
from headway.errors import CheckpointError, ConfigError, HubError
from tests.generate.conftest import small
from tests.text.conftest import byte_level


def http(kind: Any, code: int) -> Exception:
    request = SimpleNamespace(url="https://huggingface.co", method="GET")
    response = SimpleNamespace(status_code=code, headers={}, request=request)
    made: Exception = kind("no", response=response, server_message="the server's words")
    return made


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: http(errors.GatedRepoError, 403), "its owner grants access; ask for it on the page"),
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
            r"the Hub is not asked \(HF_HUB_OFFLINE=1\), or not reached",
        ),
        (
            lambda: errors.OfflineModeIsEnabled("off"),
            r"the Hub is not asked \(HF_HUB_OFFLINE=1\), or not reached",
        ),
        (lambda: errors.HFValidationError("two slashes"), r"it is OWNER/NAME \(two slashes\)"),
        (
            lambda: http(errors.HfHubHTTPError, 401),
            "the Hub says 401: the server's words; the token .HF_TOKEN. is not",
        ),
        (lambda: http(errors.HfHubHTTPError, 500), "the Hub says 500: the server's words$"),
        (lambda: ConnectionError("no line"), r"the Hub is not reached \(no line\)"),
    ],
)
def test_errors_of_the_hub_say_what_to_do(make: Callable[[], Exception], message: str) -> None:
    with pytest.raises(HubError, match=rf"^o/n: .*{message}"), asking("o/n"):
        raise make()


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What was asked of a Hub whose repository has `files`."""
    known: dict[str, Any] = {"files": ["config.json", "model.safetensors", "pytorch_model.bin"]}

    def snapshot(name: str, **given: Any) -> str:
        known.update(name=name, **given)
        if given["local_dir"] is not None:
            (given["local_dir"] / ".cache").mkdir(parents=True, exist_ok=True)
            (given["local_dir"] / "config.json").write_text("{}")
        return str(given["local_dir"] or "/kept")

    api = SimpleNamespace(list_repo_files=lambda name, revision: known["files"])
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return known


def test_a_model_is_fetched_without_its_pickles(
    fetched: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "m"
    assert run(["download", "o/n", "--out", str(folder), "--revision", "v1"]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert (fetched["name"], fetched["revision"]) == ("o/n", "v1")
    assert not {"*.bin", "*.pth"} & {*fetched["allow_patterns"]}
    assert download("o/n", folder) == folder  # again: only what is missing
    assert download("o/n") == Path("/kept")
    fetched["files"] = ["config.json", "pytorch_model.bin"]
    with pytest.raises(
        HubError, match=r"o/n: its weights are no safetensors .*pytorch_model.bin.*--allow-pickle"
    ):
        download("o/n")
    download("o/n", allow_pickle=True)
    assert {"*.bin", "*.pth"} <= {*fetched["allow_patterns"]}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("my own")
    with pytest.raises(CheckpointError, match="other holds something already; choose another folder"):
        download("o/n", tmp_path / "other")


def test_a_model_is_published_with_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    class Api:
        def create_repo(self, name: str, **given: Any) -> str:
            calls.append(("create", {"name": name, **given}))
            return f"https://hub/{name}"

        def upload_file(self, **given: Any) -> None:
            calls.append(("file", given))

        def upload_folder(self, **given: Any) -> None:
            calls.append(("folder", given))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    folder = tmp_path / "m"
    save_folder(folder, small(), tokenizer=byte_level())
    assert run(["push", str(folder), "o/n", "--private"]) == 0
    assert capsys.readouterr().out == "https://hub/o/n\n"
    (_, made), (_, written), (_, sent) = calls
    assert (made["name"], made["private"], made["exist_ok"]) == ("o/n", True, True)
    text = written["path_or_fileobj"].decode()
    assert text == card(folder, "o/n")
    assert "llama, 36,640 parameters, 2 layers, context 64" in text
    assert 'headway.load("o/n")' in text
    names = {path.name for path in folder.iterdir()}
    kept = {*huggingface_hub.utils.filter_repo_objects(names, allow_patterns=sent["allow_patterns"])}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= kept
    (folder / "README.md").write_text("mine")
    push(folder, "o/n")
    assert [name for name, _ in calls[3:]] == ["create", "folder"]
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "o/base"}')
    assert "base_model: o/base" in card(tmp_path / "adapter", "o/a")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        push(tmp_path, "o/n")
    assert len(calls) == 5


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """What was asked of a Hub that has the model owner/name."""
    asked: list[tuple[str, str | None]] = []
    save_folder(tmp_path / "kept", small(), tokenizer=byte_level())

    def snapshot(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        if name != "owner/name":
            raise http(errors.RepositoryNotFoundError, 404)
        return str(tmp_path / "kept")

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return asked


def test_an_address_of_the_hub_stands_for_a_folder(
    kept: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    assert local_model("owner/name") == local_model("hf://owner/name") == folder
    assert local_model("hf://owner/name@v1") == local_model(Path("hf://owner/name@v1")) == folder
    assert local_model("owner/name", revision="v2") == folder
    assert kept == [("owner/name", revision) for revision in (None, None, "v1", "v1", "v2")]
    with pytest.raises(ConfigError, match="names a revision, and revision 'v2' is another"):
        local_model("owner/name@v1", revision="v2")
    with pytest.raises(CheckpointError, match=r"^hf://owner/nam: it could not be fetched \(RepositoryNot"):
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
            "run/final: no such file or folder (run has checkpoint-20); the repository of the Hub is hf://run/final",
        ),
        (
            "run/checkpoint-10",
            'run/checkpoint-10: no such file or folder (did you mean "checkpoint-20"?); the repository',
        ),
        ("./run/final", "./run/final: no such file or folder (run has checkpoint-20)"),
        ("runs/mine/final", "runs/mine/final: no such file or folder"),
        ("/nowhere/model", "/nowhere/model: no such file or folder"),
    ],
)
def test_a_misspelt_path_is_said_to_be_missing_and_the_hub_is_not_asked(
    kept: list[tuple[str, str | None]], typed: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What looks like a path: it begins with a dot or a slash, has several slashes, or a folder that is here."""
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
        ["quantize", "{}", "--weights", "int8", "--out", "out"],
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
    assert "could not be fetched (RepositoryNotFoundError" in " ".join(capsys.readouterr().err.split())
