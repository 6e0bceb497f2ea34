"""--threads is checked before anything runs: a team of tens of thousands of threads crashes OpenMP."""

import pytest

from headway.cli import run
from headway.threads import MOST_THREADS

TOO_MANY = f"less than or equal to {MOST_THREADS}"


@pytest.mark.parametrize(
    "line",
    [
        "generate m hi", "chat m", "translate m hi", "classify m hi", "answer m why", "embed m hi", "fill-mask m hi",
        "eval m --data x", "judge a b", "instruct", "plan m", "convert m n", "quantize m n --weights int8",
        "surgery merge m n --adapter a", "demo", "explain heads", "bench attention", "train --data x",
    ],
)  # fmt: skip
def test_no_command_starts_with_too_many(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*line.split(), "--threads", "100000"]) in (1, 2)
    assert TOO_MANY in capsys.readouterr().err


@pytest.mark.parametrize("line", ["generate m hi", "train --data x"])
def test_the_environment_is_no_way_around(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_THREADS", str(MOST_THREADS + 1))
    assert run(line.split()) in (1, 2)
    assert TOO_MANY in capsys.readouterr().err
