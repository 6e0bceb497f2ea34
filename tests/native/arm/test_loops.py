"""Counts of the code that ran, from an invented log and disassembly."""

from collections import Counter

import pytest

from tests.native.arm.foreign import OF_PLACES
from tests.native.arm.loops import Line, counted, executed, kind, report

CODE = ("mov", "fmla", "fmla", "b.ne", "ret")
LINES = {
    0x100 + 4 * i: Line(0x100 + 4 * i, name, "product", 0x104 if name == "b.ne" else -1)
    for i, name in enumerate(CODE)
}


def log(*addresses: int) -> list[str]:
    return [
        f"Trace 0: 0x7f00 [00000000/{0x4000 + address:016x}/00000000/ff000000] \n" for address in addresses
    ]


def test_a_loop_that_runs_is_counted_each_time() -> None:
    """Also as part of the code that leads into it."""
    runs = executed(iter(["IN:\n", *log(0x100, 0x104, 0x104, 0x110)]), 0x4000, LINES)
    assert runs == {(0x100, 0x110): 1, (0x104, 0x110): 2, (0x110, 0x114): 1}
    assert counted(runs, LINES, "fmla") == {0x100: 2, 0x104: 4, 0x110: 0}


def test_long_code_ends_where_the_next_begins() -> None:
    assert executed(iter(log(0x100, 0x108, 0x110)), 0x4000, LINES) == {
        (0x100, 0x108): 1,
        (0x108, 0x110): 1,
        (0x110, 0x114): 1,
    }


def test_code_ends_with_its_page() -> None:
    lines = {address: Line(address, "fmla", "product") for address in range(0xFF0, 0x1010, 4)}
    assert executed(iter(log(0xFF8)), 0x4000, lines) == {(0xFF8, 0x1000): 1}


def test_code_outside_the_library_is_left_out() -> None:
    runs = executed(iter(log(0x104, 0x9000, 0x104)), 0x4000, LINES)
    assert runs == {(0x104, 0x110): 2}


def test_the_ratio_and_the_loops_are_named() -> None:
    times = Counter({0x104: 100, 0x100: 1})
    (line,) = report("a product", "fmla", 4 * 190, Counter({0x104: 200, 0x100: 0}), times, LINES)
    assert line == "a product: 1.053 fmla for each that is needed, in product at 104"


@pytest.mark.parametrize(
    ("counts", "times", "useful", "why"),
    [
        ({0x104: 0}, {0x104: 100}, 100, "no fmla ran"),
        ({0x104: 200}, {0x104: 1}, 800, "no inner loops have most of the fmla"),
        ({0x104: 200}, {0x104: 100}, 640, r"1\.250 times the fmla that are needed, in product at 104"),
        ({0x104: 200}, {0x104: 100}, 4000, "200 fmla are fewer than the 1000"),
    ],
)
def test_none_too_many_and_too_few_fail(
    counts: dict[int, int], times: dict[int, int], useful: int, why: str
) -> None:
    with pytest.raises(AssertionError, match=why):
        report("a product", "fmla", useful, Counter(counts), Counter(times), LINES)


def test_only_instructions_of_whole_vectors_count() -> None:
    assert kind("fmla", "v0.4s, v1.4s, v2.s[0]") == "fmla"
    assert kind("fmla", "v0.2s, v1.2s, v2.2s") == "fmla of one"
    assert kind("smull2", "v0.8h, v1.16b, v2.16b") == "smull"
    assert kind("smull", "x0, w1, w2") == "smull of one"
    assert kind("usdot", "v0.4s, v1.16b, v2.16b") == "usdot"


def test_jumps_are_no_forms_and_others_are() -> None:
    assert all(
        OF_PLACES.search(x)
        for x in ("b.ne\t1a4 <f+0x4>", "bl\t0", "adrp\tx0, 1000", "cbnz\tx0, 10", ".word 1")
    )
    assert not any(
        OF_PLACES.search(x) for x in ("bic\tv0.8h, #1", "bfdot\tv0.4s, v1.8h, v2.8h", "br\tx1", "ret")
    )
