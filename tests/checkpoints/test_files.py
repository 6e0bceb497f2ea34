"""Saves are atomic: whichever call fails, and wherever a write is cut, the previous content stays intact."""

import ctypes
import errno
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headway.errors import CheckpointError
from headway.storage import disk
from headway.storage.files import atomic_folder, atomic_write, current_folder, remove_folder, write_file
from tests.faults import calls_of, failing, watch
from tests.train.test_resume import in_a_child, kill_me

OLD = {"a": b"old a", "b": b"old b", "notes.txt": b"mine"}
NEW = {"a": b"new a!", "c": b"new c"}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def put_old(folder: Path) -> None:
    folder.mkdir()
    for name, data in OLD.items():
        (folder / name).write_bytes(data)


def save_new(folder: Path) -> None:
    with atomic_folder(folder, keep=lambda name: name == "notes.txt") as new:
        for name, data in NEW.items():
            write_file(new / name, data)


@pytest.fixture(params=["exchange", "two renames"])
def swap(request, monkeypatch):
    if request.param == "two renames":
        monkeypatch.setattr(disk, "exchange", lambda source, target: False)
    return request.param


def test_everything_is_on_the_device_before_the_rename(tmp_path, swap):
    """All files, also nested ones and those written by other means, and all folders are synced first, then swapped in;
    then the parent folder is synced."""
    folder, calls = tmp_path / "m", []
    put_old(folder)
    with (
        watch(lambda operation, path, data: calls.append((operation, path))),
        atomic_folder(folder) as new,
    ):
        (new / "inner").mkdir()
        (new / "inner" / "plain").write_text("by other means")
        write_file(new / "a", b"new")
    swapped = next(i for i, (operation, _) in enumerate(calls) if operation in ("exchange", "rename"))
    synced = {path.relative_to(new).as_posix() for operation, path in calls[:swapped] if operation == "fsync"}
    assert synced == {".", "a", "inner", "inner/plain"}
    assert ("fsync", tmp_path) in calls[swapped:]


def test_folder_is_replaced_whole_and_keeps_what_it_is_told_to(tmp_path, swap):
    folder = tmp_path / "m"
    put_old(folder)
    with open(folder / "notes.txt", "ab") as open_handle:
        save_new(folder)
        open_handle.write(b" and more")
    assert contents(folder) == {**NEW, "notes.txt": b"mine and more"}
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_each_call_failing_in_turn_leaves_the_previous_folder(tmp_path, swap):
    put_old(tmp_path / "probe")
    calls = calls_of(lambda: save_new(tmp_path / "probe"))
    assert {"mkdir", "open", "write", "fsync", "close", "link", "remove"} < set(calls)
    for n, operation in enumerate(calls):
        folder = tmp_path / str(n)
        put_old(folder)
        cleanup = n == len(calls) - 1 or (swap == "two renames" and n >= len(calls) - 2)
        if cleanup:
            assert operation == "remove"
            with watch(failing(n)):
                save_new(folder)
            assert contents(current_folder(folder)) == {**NEW, "notes.txt": b"mine"}
        else:
            with watch(failing(n)), pytest.raises(CheckpointError, match=r"could not save .*error"):
                save_new(folder)
            assert contents(folder) == OLD, (n, operation)
        save_new(folder)  # and the next save works
        assert contents(folder) == {**NEW, "notes.txt": b"mine"}


def test_what_a_killed_save_moved_aside_stays_until_another_has_taken_its_name(tmp_path):
    """This must hold whichever call of the next save fails."""
    put_old(tmp_path / ".probe.previous")
    for n in range(len(calls_of(lambda: save_new(tmp_path / "probe")))):
        folder, aside = tmp_path / str(n), tmp_path / f".{n}.previous"
        put_old(aside)
        with watch(failing(n)), suppress(CheckpointError):
            save_new(folder)
        assert contents(current_folder(folder)) in (OLD, {**NEW, "notes.txt": b"mine"}), n
        save_new(folder)
        assert contents(folder) == {**NEW, "notes.txt": b"mine"}
        assert not aside.exists()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_between_any_two_calls_leaves_a_whole_folder(tmp_path, swap):
    """The killed process is a child that exits without clean-up at the n-th call."""
    put_old(tmp_path / "probe")
    calls = calls_of(lambda: save_new(tmp_path / "probe"))
    for n in range(len(calls)):
        folder = tmp_path / str(n)
        put_old(folder)
        child = os.fork()
        if child == 0:
            count = iter(range(10**6))
            with watch(lambda o, p, d: os._exit(9) if next(count) == n else None):  # noqa: B023
                save_new(folder)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        assert contents(current_folder(folder)) in (OLD, {**NEW, "notes.txt": b"mine"})
        save_new(folder)
        assert contents(folder) == {**NEW, "notes.txt": b"mine"}
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(f".{n}.")], "left-overs are swept"


def test_a_write_cut_at_every_length_leaves_the_previous_file_and_folder(tmp_path):
    file, folder = tmp_path / "f", tmp_path / "m"
    file.write_bytes(b"before")
    put_old(folder)
    for cut in range(len(NEW["a"])):
        with watch(lambda o, p, d: cut if o == "write" else None):  # noqa: B023
            with pytest.raises(CheckpointError, match="No space left"):
                atomic_write(file, NEW["a"])
            with pytest.raises(CheckpointError, match="No space left"):
                save_new(folder)
        assert file.read_bytes() == b"before"
        assert contents(folder) == OLD
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "m"]


def test_each_call_of_a_file_write_failing_in_turn(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(b"before")
    calls = calls_of(lambda: atomic_write(tmp_path / "g", lambda put: [put(b"1"), put(b"2")][0]))
    assert calls == ["open", "write", "write", "fsync", "close", "rename", "fsync", "remove"]
    for n in range(len(calls) - 1):
        file.write_bytes(b"before")
        with watch(failing(n)), pytest.raises(CheckpointError, match="could not save"):
            atomic_write(file, lambda put: [put(b"1"), put(b"2")][0])
        assert file.read_bytes() == (b"12" if calls[n] == "fsync" and n > 4 else b"before")


def test_an_exception_of_the_caller_leaves_everything_as_it_was(tmp_path):
    put_old(tmp_path / "m")

    def interrupted():
        with atomic_folder(tmp_path / "m") as new:
            write_file(new / "a", b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert contents(tmp_path / "m") == OLD
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_file_where_the_folder_should_go_is_refused(tmp_path):
    (tmp_path / "m").write_text("a file")
    with pytest.raises(CheckpointError, match="a file of that name exists"), atomic_folder(tmp_path / "m"):
        pass
    assert (tmp_path / "m").read_text() == "a file"


def test_a_process_killed_in_removing_leaves_no_part_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("checkpoint-2", "checkpoint-4"):
        with atomic_folder(tmp_path / name) as folder:
            for file in ("a", "b", "c"):
                write_file(folder / file, file)
    unlink = os.unlink

    def killed_behind(*args: Any, **kwargs: Any) -> None:
        unlink(*args, **kwargs)
        kill_me()

    def remove() -> None:
        monkeypatch.setattr(os, "unlink", killed_behind)
        remove_folder(tmp_path / "checkpoint-2")

    assert in_a_child(remove) == -signal.SIGKILL
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["checkpoint-4"]
    assert len([*tmp_path.iterdir()]) == 2
    with atomic_folder(tmp_path / "checkpoint-6"):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-6"]


class Renaming:
    """A stand-in for libc's renameat2: fails with errno `code`, or succeeds if that is 0."""

    def __init__(self, code):
        self.code, self.asked = code, []
        self.renameat2 = self
        self.argtypes = None

    def __call__(self, *arguments):
        self.asked.append(arguments)
        ctypes.set_errno(self.code)
        return -1 if self.code else 0


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.ENOTSUP])
def test_where_paths_cannot_be_exchanged_that_is_no_error(tmp_path, monkeypatch, code):
    library = Renaming(code)
    monkeypatch.setattr(disk.ctypes, "CDLL", lambda name, use_errno: library)
    assert disk.exchange(tmp_path / "a", tmp_path / "b") is False
    assert library.asked == [(-100, str(tmp_path / "a").encode(), -100, str(tmp_path / "b").encode(), 2)]
    library.code = 0
    assert disk.exchange(tmp_path / "a", tmp_path / "b") is True


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="renameat2 is Linux's")
def test_paths_are_exchanged_or_the_system_says_why(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("A")
    with pytest.raises(FileNotFoundError) as caught:
        disk.exchange(a, b)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(b))
    b.mkdir()
    (b / "x").write_text("B")
    if disk.exchange(a, b):
        assert (b.read_text(), (a / "x").read_text()) == ("A", "B")


def test_without_renameat2_nothing_is_exchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.ctypes, "CDLL", lambda name, use_errno: object())
    assert disk.exchange(tmp_path / "a", tmp_path / "b") is False
    monkeypatch.undo()
    monkeypatch.setattr(disk.sys, "platform", "darwin")
    assert disk.exchange(tmp_path / "a", tmp_path / "b") is False


def test_a_link_is_the_file_or_a_copy_where_there_are_none(tmp_path, monkeypatch):
    source = tmp_path / "a"
    source.write_text("A")
    disk.link(source, tmp_path / "b")
    assert (tmp_path / "b").samefile(source)

    def none(*_):
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(disk.os, "link", none)
    disk.link(source, tmp_path / "c")
    assert (tmp_path / "c").read_text() == "A"
    assert not (tmp_path / "c").samefile(source)


def test_what_is_removed_is_a_link_and_not_what_it_is_of(tmp_path):
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    (folder / "x").write_text("x")
    link.symlink_to(folder, target_is_directory=True)
    disk.remove(link)
    assert not link.is_symlink()
    assert (folder / "x").exists()
    disk.remove(folder)
    assert not folder.exists()
    disk.remove(folder)  # nothing is there to remove
