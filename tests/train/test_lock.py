"""Only one run at a time uses a folder, however many are started and however they end."""

import errno
import fcntl
import json
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.cli import run
from headway.errors import ConfigError, DataError
from headway.train import Callback, CallbackContext, TextConfig, config_yaml, train
from headway.train.checkpoint import checkpoints
from headway.train.lock import LOCK, locked
from tests.train.test_resume import assert_same_bits, in_a_child, kill_me

Make = Callable[..., TextConfig]


def started(count: int, function: Callable[[int], object]) -> list[tuple[int, str]]:
    """Calls function(i) in `count` processes at the same moment; returns their exit codes and error messages."""
    gate_reader, gate_writer = os.pipe()
    children: list[tuple[int, int]] = []
    for i in range(count):
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks of threaded processes
            child = os.fork()
        if child == 0:
            os.close(gate_writer)
            code = 3
            try:
                os.read(gate_reader, 1)  # returns when all write ends of the gate are closed
                function(i)
                code = 0
            except ConfigError as error:
                os.write(writer, str(error).encode())
                code = 1
            finally:
                os._exit(code)
        os.close(writer)
        children.append((child, reader))
    os.close(gate_reader)
    os.close(gate_writer)
    results = []
    for child, reader in children:
        _, status = os.waitpid(child, 0)
        with open(reader, encoding="utf-8") as file:
            results.append((os.waitstatus_to_exitcode(status), file.read()))
    return results


@pytest.mark.parametrize("count", [2, 8])
def test_of_runs_that_begin_together_exactly_one_runs(settings: Make, tmp_path: Path, count: int) -> None:
    alone = settings(steps=8, out=str(tmp_path / "alone"))
    train(alone, quiet=True)
    results = started(count, lambda i: train(settings(steps=8), quiet=True))
    assert sorted(code for code, _ in results) == [0] + [1] * (count - 1)
    messages = [text for code, text in results if code]
    assert all("run is in use by " in text or "already holds a run" in text for text in messages), messages
    assert_same_bits(settings().out, alone.out)
    text = (tmp_path / "run" / "metrics.jsonl").read_text("utf-8")
    assert [json.loads(line)["step"] for line in text.splitlines()] == list(range(1, 9))
    assert not (tmp_path / "run" / LOCK).exists()


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_the_second_says_who_uses_the_folder(
    settings: Make, tmp_path: Path, resume: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(config_yaml(settings(steps=2)), "utf-8")
    before: list[dict[str, bytes]] = []

    def files() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}

    def second(context: CallbackContext) -> None:
        before.append(files())
        code = in_a_child(
            lambda: os._exit(run(["train", "--config", str(tmp_path / "run.yaml"), "--resume", resume]))
        )
        assert code == 1
        assert files() == before[-1]

    train(settings(steps=2), callbacks=[Callback(second, every_steps=1)], quiet=True)
    assert len(before) == 2
    with locked(tmp_path / "run"):
        assert run(["train", "--config", str(tmp_path / "run.yaml"), "--resume", resume]) == 1
    stderr = capsys.readouterr().err
    assert f"run is in use by process {os.getpid()} on host {socket.gethostname()} since 20" in stderr
    assert "choose another folder with --out" in stderr


def test_what_a_killed_run_leaves_locks_nothing(settings: Make, tmp_path: Path) -> None:
    def killed() -> None:
        train(settings(), callbacks=[Callback(lambda context: kill_me(), every_steps=1)], quiet=True)

    assert in_a_child(killed) == -signal.SIGKILL
    assert (tmp_path / "run" / LOCK).exists()
    train(settings(), resume="auto", quiet=True)
    assert checkpoints(tmp_path / "run")[-1].name == "checkpoint-6"
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_lock_of_another_host_is_not_taken_over(settings: Make, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock_file = tmp_path / "run" / LOCK
    lock_file.write_text(
        json.dumps({"process": 7, "host": "elsewhere", "since": "2026-11-22T10:00:00+00:00"})
    )
    with pytest.raises(
        ConfigError, match=rf"by process 7 on host elsewhere .* If it is gone, remove {lock_file}"
    ):
        train(settings(), quiet=True)
    assert [p.name for p in (tmp_path / "run").iterdir()] == [LOCK]
    lock_file.unlink()
    train(settings(steps=1), quiet=True)


def test_a_file_system_without_locks_is_reported(
    settings: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    train(settings(steps=1))
    assert (
        "run cannot be locked (No locks available): this file system has no locks" in capsys.readouterr().err
    )


def test_a_refused_run_leaves_no_folder(settings: Make, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"empty\.txt: the file is empty"):
        train(settings(out=str(tmp_path / "a" / "b"), data=str(tmp_path / "empty.txt")), quiet=True)
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match="sample prompt"):  # when its data is encoded
        train(settings(out=str(tmp_path / "a" / "b"), sample_prompts=["one"], sample_tokens=99), quiet=True)
    assert not (tmp_path / "a").exists()


def test_a_lock_on_a_file_that_its_holder_removed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another run ends between the opening and the locking of the file, the lock is taken again on the new file of
    that name, which keeps a third run out."""
    flock, ended = fcntl.flock, []

    def after_its_end(descriptor: int, operation: int) -> None:
        if not ended:
            ended.append((tmp_path / "run" / LOCK).unlink())
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", after_its_end)
    with locked(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / LOCK).read_text())["process"] == os.getpid()
        with pytest.raises(ConfigError, match="run is in use by process"), locked(tmp_path / "run"):
            pass
    assert ended


def test_locks_that_come_and_go_are_held_by_one_at_a_time(tmp_path: Path) -> None:
    """Each of 4 processes takes the lock 25 times, while the folder and its lock file are made and removed."""

    def often(i: int) -> None:
        done = 0
        while done < 25:
            try:
                with locked(tmp_path / "a" / "run"):
                    with (tmp_path / "held").open("x"):
                        time.sleep(0.0005)
                    (tmp_path / "held").unlink()
                    done += 1
            except ConfigError:
                time.sleep(0.0005)

    assert started(4, often) == [(0, "")] * 4


@pytest.mark.parametrize("error", [FileNotFoundError, FileExistsError])
def test_a_folder_that_goes_while_it_is_made_is_made_anew(
    error: type[OSError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mkdir(parents=True, exist_ok=True)` takes several steps, and another run may end between two of them."""
    mkdir, ended = Path.mkdir, []

    def gone_at_first(path: Path, *args: object, **options: object) -> None:
        if not ended:
            ended.append(path)
            raise error(path)
        mkdir(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", gone_at_first)
    with locked(tmp_path / "a" / "run"):
        assert (tmp_path / "a" / "run" / LOCK).exists()
    assert ended


def test_a_file_where_the_folder_should_be_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(FileExistsError), locked(tmp_path / "run"):
        pass
