"""`headway show`: the picture is the predicate, the numbers are counted, and an error names its place in the text."""

import json
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from headway.cli import run
from headway.patterns import Causal, Global, Window, draw, pairs, parse, visible
from headway.tokens import Tokens
from headway_lab.draw import draw_pattern

PATTERNS = [
    "Full()",
    "Causal()",
    "Window.last(5)",
    "Window.around(2, step=3)",
    "Window.last(4) | Causal() & Sink(2)",
    "Window.around(1) | Global()",
]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert run(["show", *arguments, "--json"]) == 0
    report: dict[str, object] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.parametrize("text", PATTERNS)
def test_the_text_picture_is_what_is_visible(text: str) -> None:
    tokens = Tokens.range(13).with_global([0, 7])
    expected = visible(parse(text), tokens, tokens)[0, 0]
    for marks in ("■·", "#."):
        rows = [line.split(" ") for line in draw(parse(text), 13, tokens, marks).splitlines()]
        assert [[cell == marks[0] for cell in row] for row in rows] == expected.tolist()
        assert {cell for row in rows for cell in row} <= set(marks)


@pytest.mark.parametrize("text", PATTERNS)
def test_the_figure_colours_exactly_what_is_visible(text: str) -> None:
    tokens = Tokens.range(13).with_global([0, 7])
    axes = Figure().subplots()
    draw_pattern(axes, parse(text), tokens, text)
    cells = torch.as_tensor(axes.collections[0].get_array()).reshape(13, 13)
    assert torch.equal(cells > 0, visible(parse(text), tokens, tokens)[0, 0])
    assert str(int((cells > 0).sum())) in axes.get_xlabel()


def test_a_part_of_a_union_keeps_its_colour() -> None:
    tokens = Tokens.range(6).with_global([4])
    axes = Figure().subplots()
    draw_pattern(axes, Window.around(1) | Global(), tokens)
    cells = axes.collections[0].get_array().reshape(6, 6)
    assert cells[0, 0] == cells[3, 4] == 1  # the window comes first, also for pairs that other parts allow
    assert cells[0, 4] == 2
    assert cells[4, 0] == 3
    assert cells[0, 5] == 0
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "Window.around(1)",
        "GlobalKeys()",
        "GlobalQueries()",
    ]


@pytest.mark.parametrize("text", PATTERNS)
def test_the_numbers_are_counted(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = shown(capsys, text, "--tokens", "17", "--global", "0,5")
    tokens = Tokens.range(17).with_global([0, 5])
    count = int(visible(parse(text), tokens, tokens).sum())
    assert report["pairs"] == count
    assert report["density"] == pytest.approx(count / 17**2)
    assert report["pairs_at"] == {str(n): pairs(parse(text), n) for n in (1024, 8192, 32768)}


def test_window_facts(capsys: pytest.CaptureFixture[str]) -> None:
    report = shown(capsys, "Window.last(8) | (Causal() & Sink(2))", "--tokens", "40", "--layers", "3")
    assert report["causal"] is True
    assert report["retention"] == {"reach": 7, "sinks": 2, "globals": False, "chunk": None}
    assert report["cache"]["what"] == "window"  # type: ignore[index]
    fields = [field["tokens"] for field in report["receptive_field"]]  # type: ignore[attr-defined]
    assert fields == [8 + 2, 15 + 2, 22 + 2]  # each layer adds the 7 tokens before, and the sinks stay


def test_a_dilated_window_reaches_further_with_as_many_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    near = shown(capsys, "Window.last(4)", "--tokens", "60", "--layers", "2")
    far = shown(capsys, "Window.last(4, step=3)", "--tokens", "60", "--layers", "2")
    assert [f["tokens"] for f in near["receptive_field"]] == [4, 7]  # type: ignore[attr-defined]
    assert [f["tokens"] for f in far["receptive_field"]] == [4, 7]  # type: ignore[attr-defined]
    assert [f["first"] for f in near["receptive_field"]] == [56, 53]  # type: ignore[attr-defined]
    assert [f["first"] for f in far["receptive_field"]] == [50, 41]  # type: ignore[attr-defined]


def test_a_pattern_that_looks_ahead_has_no_cache(capsys: pytest.CaptureFixture[str]) -> None:
    report = shown(capsys, "Window.around(2)")
    assert report["causal"] is False
    assert report["cache"]["what"] == "none"  # type: ignore[index]


def test_the_terminal_shows_picture_and_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "Window.last(3)", "--tokens", "4"]) == 0
    text = capsys.readouterr().out
    assert "■ ■ ■ ·\n· ■ ■ ■" in text.replace("#", "■").replace(".", "·")
    assert "9 of 16" in text
    assert "density 56.2%" in text
    assert "window" in text


def test_heads_are_drawn_one_by_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "heads.png"
    assert run(["show", "PerHead(Causal(), Window.last(2))", "--tokens", "6", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    for index, pattern in enumerate((Causal(), Window.last(2))):
        assert f"head {index}: {pattern}\n{draw(pattern, 6, marks='■·')}\n" in captured.out
    assert "32 of 72 in 2 heads" in captured.out
    assert str(out) in captured.err
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Winow.last(8)"], r'unknown name \'Winow.last\' at character 1 (did you mean "Window.last"?)'),
        (["Causal() & Sinc(2)"], "unknown name 'Sinc' at character 12 (did you mean \"Sink\"?)"),
        (["Window.last(8) |"], "cannot be read at character 17"),
        (["Window.last(0)"], "it must be an integer of at least 1, got 0"),
        (["Causal()", "--global", "1,x"], "--global 1,x: give whole numbers joined by commas"),
        (["Causal()", "--global", "40"], "no token 40 among 0..31"),
        (["Causal()", "--global", "-1"], "no token -1 among 0..31"),
    ],
)
def test_bad_input_is_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message.replace("\\", "") in err
