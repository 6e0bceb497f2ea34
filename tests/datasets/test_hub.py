"""Data of the Hub: an address becomes a local file, streamed once; a broken stream resumes after the stored rows."""

import fcntl
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.data import read_text
from headway.data.hub import file_name, local, parse_address
from headway.data.pairs import read_lines
from headway.data.record_kinds import Chat
from headway.data.records import read_records
from headway.errors import ConfigError, DataError, HubError
from headway.train import TextConfig, train
from headway.train.dry_run import describe_run

ROWS = [{"text": f"line {i}\nnaïve 🙂", "label": i} for i in range(7)]


class Rows:
    """A fake IterableDataset: each iteration over its rows fails before row `breaks`."""

    def __init__(self, rows: list[dict[str, Any]], breaks: int | None) -> None:
        self.rows, self.breaks = rows, breaks

    def skip(self, count: int) -> "Rows":
        return Rows(self.rows[count:], None if self.breaks is None else self.breaks - count)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i, row in enumerate(self.rows):
            if self.breaks is not None and i >= self.breaks:
                raise ConnectionError("the line is dead")
            yield row


class Hub:
    """The content of a fake Hub, and the calls that it has received."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.commit, self.rows, self.breaks = folder, "c0", ROWS, None
        self.asked: list[Any] = []

    breaks: int | None

    def load_dataset(self, path: str, name: str | None, **options: Any) -> Rows:
        self.asked.append((path, name, options["split"], options["revision"]))
        assert options["streaming"] is True
        return Rows(self.rows, self.breaks)

    def download(self, name: str, path: str, *, repo_type: str, revision: str | None) -> str:
        self.asked.append((name, path, repo_type, revision))
        return str(self.folder / path)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Returns a fake Hub that serves files only."""
    fake = Hub(tmp_path / "files")
    fake.folder.mkdir()
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.download)
    info = SimpleNamespace(dataset_info=lambda name, revision: SimpleNamespace(sha=fake.commit))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: info)
    return fake


@pytest.fixture
def hub(files: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Returns a fake Hub that also serves splits, streamed by a fake of `datasets`."""
    module: Any = ModuleType("datasets")
    module.__spec__, module.load_dataset = ModuleSpec("datasets", None), files.load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return files


def test_addresses() -> None:
    for text, expected in {
        "hf://o/n/a/b.txt": ("o/n", None, "a/b.txt", None, None),
        "hf://o/n@v1/a.jsonl": ("o/n", "v1", "a.jsonl", None, None),
        "hf://o/n.x:train#text": ("o/n.x", None, None, "train", "text"),
        "hf://o/n@c0/config-1:train[:10%]": ("o/n", "c0", "config-1", "train[:10%]", None),
        "hf://o/n/d/x.parquet#text": ("o/n", None, "d/x.parquet", None, "text"),
    }.items():
        assert parse_address(text).group("id", "revision", "path", "split", "column") == expected
    for text in ("hf://o/n", "hf://name:train", "hf://o/n/a.txt#text", "hf://o/n@v1", "hf://"):
        with pytest.raises(
            DataError, match=r"not an address of Hub data; write hf://OWNER/NAME\[@REVISION\]/PATH"
        ):
            parse_address(text)
    assert local("some/file.txt") == Path("some/file.txt")


def test_files_are_what_they_are(hub: Hub) -> None:
    (hub.folder / "a.txt").write_text("one\ntwo\n")
    assert [piece.text for piece in read_text("hf://o/n@v1/a.txt")] == ["one\ntwo\n"]
    assert hub.asked == [("o/n", "a.txt", "dataset", "v1")]
    assert read_lines("hf://o/n/a.txt") == ["one", "two"]
    (hub.folder / "a.jsonl").write_text(json.dumps({"instruction": "a", "output": "b"}) + "\n")
    assert len(list(read_records("hf://o/n/a.jsonl", Chat))) == 1


def test_a_split_is_streamed_once(hub: Hub) -> None:
    for _ in range(2):
        assert [piece.text for piece in read_text("hf://o/n/small:train#text")] == [
            row["text"] for row in ROWS
        ]
    assert hub.asked == [("o/n", "small", "train", "c0")]
    assert [json.loads(line) for line in local("hf://o/n:train").read_text().splitlines()] == ROWS
    assert (
        len(
            {local(f"hf://o/n{name}") for name in (":train", "@v1:train", ":test", "/x:train", ":train#text")}
        )
        == 5
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_what_broke_off_goes_on_after_the_rows_that_are_there(
    hub: Hub, tmp_path: Path, data: st.DataObject
) -> None:
    shutil.rmtree(tmp_path / "home", ignore_errors=True)
    hub.breaks = data.draw(st.integers(0, len(ROWS) - 1))
    with pytest.raises(HubError, match=r"hf://o/n:train: the Hub is unreachable \(the line is dead\)"):
        local("hf://o/n:train")
    (partial,) = (tmp_path / "home").rglob(".train.jsonl.c0")
    whole = partial.read_bytes()
    assert whole.count(b"\n") == hub.breaks
    partial.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])  # the last write may be incomplete
    hub.breaks = None
    assert [json.loads(line) for line in local("hf://o/n:train").read_text().splitlines()] == ROWS


def test_rows_of_another_commit_are_not_continued(hub: Hub) -> None:
    hub.breaks = 3
    with pytest.raises(HubError):
        local("hf://o/n:train")
    hub.breaks, hub.commit, hub.rows = None, "c1", [{"text": "new"}] * 5
    assert [json.loads(line) for line in local("hf://o/n:train").read_text().splitlines()] == hub.rows


def test_what_cannot_be_rows_of_text_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for address, message in (
        (
            "hf://o/n:train#txet",
            r"row 1: #txet must name a column of strings; its columns are \['label', 'text'\]",
        ),
        ("hf://o/n:train#label", r"row 1: #label must name a column of strings; 'label' is int"),
    ):
        with pytest.raises(DataError, match=message):
            local(address)
    hub.rows = [{"text": "a"}, {"text": b"bytes"}]
    with pytest.raises(
        DataError, match=r"row 2: not JSON; choose a column of strings.*: Object of type bytes is not JSON"
    ):
        local("hf://o/n:train")
    monkeypatch.setattr("headway.data.hub.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r'needs datasets, which is not installed; pip install "headway\[hub\]"'
    ):
        local("hf://o/n:test")


def test_what_another_process_fetches_is_waited_for(hub: Hub) -> None:
    """Its lock is on the partial file of the commit, which stays untouched."""
    folder = Path(constants.HF_HOME) / "headway" / "o--n" / "main"
    folder.mkdir(parents=True)
    target = folder / file_name(parse_address("hf://o/n:train"))
    partial = folder / f".{target.name}.c0"
    partial.write_bytes(b"half a li")
    with partial.open("rb+") as locked_file:
        fcntl.flock(locked_file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError) as caught:
            local("hf://o/n:train")
    assert str(caught.value) == "hf://o/n:train is being fetched by another process; wait for it"
    assert partial.read_bytes() == b"half a li"
    assert not target.exists()
    assert [json.loads(line) for line in local("hf://o/n:train").read_text().splitlines()] == ROWS
    assert not partial.exists()


def test_a_model_is_trained_on_a_split(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.train.tasks.rows.gemm_peak", lambda dtype: 1e12)
    hub.rows = [{"text": "one two three four\n" * 9}] * 8
    sizes: dict[str, Any] = {
        "depth": 1,
        "width": 16,
        "heads": 2,
        "context": 16,
        "batch_tokens": 64,
        "steps": 2,
    }
    config = TextConfig.of(
        {"data": "hf://o/n:train#text", "out": str(tmp_path / "run"), "vocab": 260, **sizes}
    )
    assert train(config, quiet=True).steps == 2
    assert len(hub.asked) == 1
    with pytest.raises(
        DataError, match="hf://o/n:train#text: a dry run downloads nothing; give a local file"
    ):
        describe_run(config)


@pytest.mark.slow
def test_rows_of_parquet_are_streamed_from_where_they_broke_off(files: Hub) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), files.folder / "x.parquet", row_group_size=2)
    path = local("hf://o/n/x.parquet")
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS
    texts = [json.loads(line) for line in local("hf://o/n/x.parquet#text").read_text().splitlines()]
    assert texts == [{"text": row["text"]} for row in ROWS]
    whole = path.read_bytes()
    path.rename(path.with_name(f".{path.name}.c0"))
    path.with_name(f".{path.name}.c0").write_bytes(whole[:-5])
    assert local("hf://o/n/x.parquet").read_bytes() == whole


@pytest.mark.slow
def test_datasets_streams_what_the_fake_streams(tmp_path: Path) -> None:
    """The calls that the fake answers, made to the real library on a local file."""
    import datasets

    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    make: Callable[..., Any] = datasets.load_dataset
    stream = make("json", None, data_files={"train": str(path)}, split="train", streaming=True)
    assert list(stream) == ROWS
    assert list(stream.skip(3)) == ROWS[3:]
