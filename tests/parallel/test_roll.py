"""Which process of a run is missing, by the notes that processes leave in the store; tests write them by hand."""

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from headway.errors import RankError
from headway.parallel import roll
from headway.parallel.roll import Roll

Store = dist.HashStore


class Others:
    """The other ranks: writes their notes, and heartbeats of those in `beating`."""

    def __init__(self, store: Any, ranks: list[int]) -> None:
        self.store, self.beating, self.over = store, {*ranks}, threading.Event()
        for rank in ranks:
            store.set(f"who/{rank}", f"process {100 + rank} on host h")
        self.thread = threading.Thread(target=self.beat, daemon=True)
        self.thread.start()

    def beat(self) -> None:
        number = 0
        while not self.over.wait(0.02):
            number += 1
            for rank in [*self.beating]:
                self.store.set(f"beat/{rank}", str(number))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll, "BEAT", 0.05)
    monkeypatch.setattr(roll, "SILENCE", 0.5)


@pytest.fixture
def run() -> Iterator[tuple[Roll, Others]]:
    """Yields rank 1 of 4, and the other ranks."""
    store = Store()
    others = Others(store, [0, 2, 3])
    rank_1 = Roll(store, 1, 4)
    rank_1.come()
    for rank in (0, 2, 3):
        store.set(f"at/{rank}", "1")
    yield rank_1, others
    others.over.set()
    rank_1.leave(None)


FAILED = RuntimeError("connection closed")


def said(run: tuple[Roll, Others]) -> str:
    error = run[0].missing(FAILED)
    assert isinstance(error, RankError)
    return str(error)


def test_a_failure_of_which_nobody_is_the_reason_stays_what_it_was(run: tuple[Roll, Others]) -> None:
    assert run[0].missing(FAILED) is FAILED


def test_a_process_without_a_heartbeat_is_gone_and_the_others_are_told(run: tuple[Roll, Others]) -> None:
    run[1].beating -= {2, 3}
    expected = [
        f"rank {rank} (process {100 + rank} on host h) is gone: its heartbeat stopped, so it was killed, or its host "
        "is down"
        for rank in (2, 3)
    ]
    assert said(run) == "; ".join(expected)
    assert run[1].store.get("absent").decode() == "; ".join(expected)


def test_a_process_that_never_signed_is_named_so(run: tuple[Roll, Others]) -> None:
    run[1].store.delete_key("who/3")
    run[1].beating.discard(3)
    assert said(run).startswith("rank 3 (never registered) is gone")


def test_a_process_that_left_says_why_before_others_hang(run: tuple[Roll, Others]) -> None:
    store = run[1].store
    store.set("left/2", "DataError: no text")
    store.set("left/3", "-RankError: rank 2 stopped")
    store.set("at/0", "0")
    assert said(run) == "rank 2 (process 102 on host h) stopped: DataError: no text"


def test_a_process_that_beats_but_does_not_come_hangs(run: tuple[Roll, Others]) -> None:
    run[1].store.set("at/2", "0")
    run[1].store.delete_key("at/3")
    run[1].store.set("left/0", "-RankError: rank 2 hangs")
    assert said(run) == "; ".join(
        f"rank {rank} (process {100 + rank} on host h) hangs: it is alive, but did not reach the call in which "
        "rank 1 waits"
        for rank in (2, 3)
    )


def test_where_all_others_left_because_of_others_they_are_named(run: tuple[Roll, Others]) -> None:
    run[1].store.set("left/0", "-RankError: rank 2 is gone")
    assert said(run) == "rank 0 (process 100 on host h) stopped: RankError: rank 2 is gone"


def test_who_was_told_asks_no_more(run: tuple[Roll, Others]) -> None:
    run[1].store.set("absent", "rank 3 is gone: so says rank 0")
    until = time.monotonic() + 5
    while not run[0]._gone and time.monotonic() < until:
        time.sleep(0.01)
    assert said(run) == "rank 3 is gone: so says rank 0"


def test_a_store_that_does_not_answer_is_that_of_rank_0(
    run: tuple[Roll, Others], monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: Any) -> str:
        raise RuntimeError("broken pipe")

    monkeypatch.setattr(run[0], "_get", silent)
    assert (
        said(run) == "rank 0, or the process that started the run, is gone: its store does not answer rank 1"
    )
    run[0]._gone = "rank 2 is gone"
    assert said(run) == "rank 2 is gone"


def test_waiting_ends_with_the_key_or_with_the_main_process(run: tuple[Roll, Others]) -> None:
    rank_1, others = run
    threading.Timer(0.2, others.store.set, ("made", "1")).start()
    rank_1.wait("made")
    others.store.set("left/0", "KeyboardInterrupt")
    with pytest.raises(
        RankError, match=re.escape("rank 0 (process 100 on host h) stopped: KeyboardInterrupt")
    ):
        rank_1.wait("never")


def test_waiting_for_a_process_that_went_silent_ends_after_a_while(
    run: tuple[Roll, Others], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roll, "LOST", 0.3)
    run[1].beating.discard(0)
    with pytest.raises(RankError, match=r"rank 0 .* is gone: its heartbeat stopped, so it was killed"):
        run[0].wait("never")


@pytest.mark.parametrize("why", [None, "KeyboardInterrupt"])
def test_who_leaves_for_a_reason_leaves_it_and_lingers_until_the_others_have_gone(why: str | None) -> None:
    store = Store()
    rank_0 = Roll(store, 0, 1)
    rank_0.ranks = 3
    rank_0.leave(why)
    assert not rank_0._thread.is_alive()
    assert store.check(["left/0"]) == (why is not None)
    begun = time.monotonic()
    for rank, after in ((1, 0.1), (2, 0.3)):
        threading.Timer(after, store.set, (f"left/{rank}", "-gone")).start()
    rank_0.linger()
    assert (time.monotonic() - begun > 0.25) == (why is not None)
    begun = time.monotonic()
    store.delete_key("left/2")
    rank_0.linger()
    assert (0.9 < time.monotonic() - begun < 5) == (why is not None), "at most twice the silence"


def test_only_rank_0_lingers(run: tuple[Roll, Others]) -> None:
    run[0].leave("an error")
    begun = time.monotonic()
    run[0].linger()
    assert time.monotonic() - begun < 0.5


def test_who_signs_alone_waits_for_the_others_and_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's own timeout ends the wait."""
    store = Store()
    monkeypatch.setattr(
        Store, "wait", lambda *_: (_ for _ in ()).throw(RuntimeError("wait timeout")), raising=False
    )
    with pytest.raises(RankError, match=r"rank 1 \(never registered\) is gone") as caught:
        Roll(store, 0, 2)
    assert str(caught.value.__cause__) == "wait timeout"
