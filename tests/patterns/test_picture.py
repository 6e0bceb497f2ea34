"""Pictures of cells: every number in them by hand, and cells that are read back from the paths."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.patterns import Causal, Full, GlobalKeys, Sink, Window
from headway.patterns.picture import BLUE, ORANGE, PALE, PALETTE, figure, patterns_html, svg
from headway.tokens import Tokens


def cells_of(picture: str, fills: list[str], shape: tuple[int, int]) -> Tensor:
    """The cells that the paths of a picture paint, by the numbers of their fills."""
    cells = torch.zeros(shape, dtype=torch.int64)
    for fill, path in re.findall(r'<path fill="(#\w+)" d="([^"]*)"/>', picture):
        for x, y, length, back in re.findall(r"M(\d+) (\d+)h(\d+)v1h-(\d+)z", path):
            assert length == back
            assert not cells[int(y), int(x) : int(x) + int(length)].any(), "painted twice"
            cells[int(y), int(x) : int(x) + int(length)] = fills.index(fill) + 1
    return cells


def test_a_picture_by_hand() -> None:
    picture = svg(torch.tensor([[1, 1, 0], [0, 2, 1]]), ["red", "blue"], side=10)
    assert picture == (
        '<svg xmlns="http://www.w3.org/2000/svg" width="31" height="21" viewBox="0 0 31 21" '
        'font-family="sans-serif" font-size="10" fill="#1d2733"><g transform="translate(0 0) scale(10)">'
        '<rect width="3" height="2" fill="#e9edf1"/>'
        '<path fill="red" d="M0 0h2v1h-2zM2 1h1v1h-1z"/><path fill="blue" d="M1 1h1v1h-1z"/>'
        '<path d="M0 0h3M0 1h3M0 2h3M0 0v2M1 0v2M2 0v2M3 0v2" stroke="white" stroke-width="0.06" fill="none"/>'
        "</g></svg>"
    )
    assert 'stroke-width="0.1"' in svg(torch.zeros(1, 1), [], side=2), "lines are a tenth of a cell at most"
    assert "<path fill" not in svg(torch.zeros(2, 2, dtype=torch.int64), ["red"], side=2)


def test_labels_stand_beside_rows_and_above_columns_and_are_cut() -> None:
    picture = svg(
        torch.tensor([[1, 0]]), [BLUE], side=10, queries=["a<b"], keys=["twelve chars", "thirteen char"]
    )
    assert '<svg xmlns="http://www.w3.org/2000/svg" width="50" height="103" ' in picture
    assert '<g transform="translate(29 92) scale(10)">' in picture
    assert re.findall(r"<text .*?</text>", picture) == [
        '<text x="25" y="97" text-anchor="end" dy=".35em">a&lt;b</text>',
        '<text transform="translate(34 88) rotate(-90)" dy=".35em">twelve chars</text>',
        '<text transform="translate(44 88) rotate(-90)" dy=".35em">thirteen ch…</text>',
    ]


@given(st.data())
def test_cells_are_read_back(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    cells = torch.tensor(
        data.draw(st.lists(st.integers(0, 3), min_size=rows * columns, max_size=rows * columns))
    ).view(rows, columns)
    fills = ["#aa0000", "#00aa00", "#0000aa"]
    assert torch.equal(cells_of(svg(cells, fills, side=4), fills, (rows, columns)), cells)


def test_a_figure_has_titles_as_text_and_pictures_as_they_are() -> None:
    made = figure([("a < b", "<svg/>"), ("c", "<i/>")], "<b>below</b>")
    assert made == (
        '<div style="background:white;color:#1d2733;font-family:sans-serif;padding:8px">'
        '<div style="display:flex;flex-wrap:wrap;gap:14px">'
        '<div><div style="font-size:11px;margin-bottom:3px">a &lt; b</div><svg/></div>'
        '<div><div style="font-size:11px;margin-bottom:3px">c</div><i/></div></div>'
        '<div style="color:#8a94a0;font-size:11px;margin-top:6px"><b>below</b></div></div>'
    )


def panels(html: str) -> list[tuple[str, str]]:
    return re.findall(r'margin-bottom:3px">([^<]*)</div>(<svg.*?</svg>)', html)


def below(html: str) -> str:
    return html.partition('margin-top:6px">')[2].removesuffix("</div></div>")


def test_one_pattern_is_one_panel_with_its_share() -> None:
    html = patterns_html([("Causal()", [Causal()])] * 2, reach=0, count=8)
    ((title, picture),) = panels(html)
    assert title == "heads 0, 1: Causal() (56%)"
    tokens = Tokens(torch.arange(8)[None])
    assert torch.equal(cells_of(picture, [BLUE], (8, 8)), Causal().allows(tokens, tokens)[0].long())
    assert below(html) == "queries down, keys to the right"
    assert panels(patterns_html([("Full()", [Full()])], 0, 4))[0][0] == "Full() (100%)", (
        "of one head, no number"
    )


def test_heads_of_two_patterns_are_two_panels_and_parts_have_colours() -> None:
    window, sink = Window.last(3), Sink(2)
    html = patterns_html([("w", [window]), ("u", [sink, window]), ("w", [window])], reach=3, count=12)
    assert [title for title, _ in panels(html)] == ["heads 0, 2: w (23%)", "head 1: u (35%)"]
    tokens = Tokens(torch.arange(12)[None])
    by_window, by_sink = (part.allows(tokens, tokens)[0] for part in (window, sink))
    wanted = torch.where(by_sink, 1, torch.where(by_window, 2, 0))
    assert torch.equal(cells_of(panels(html)[1][1], [BLUE, ORANGE], (12, 12)), wanted), (
        "the first part colours"
    )
    assert below(html) == (
        f'<span style="color:{BLUE}">■</span> {sink} &nbsp; <span style="color:{ORANGE}">■</span> {window} &nbsp; '
        "queries down, keys to the right"
    )


@pytest.mark.parametrize(("reach", "step"), [(0, 1), (4, 1), (5, 2), (8, 2), (9, 3), (1000, 250)])
def test_a_window_fills_half_of_a_picture_at_most(reach: int, step: int) -> None:
    window = Window.last(max(reach, 1))
    html = patterns_html([("w", [window])], reach, count=8)
    ((title, picture),) = panels(html)
    tokens = Tokens(torch.arange(0, 8 * step, step)[None])
    assert torch.equal(cells_of(picture, [BLUE], (8, 8)), window.allows(tokens, tokens)[0].long())
    said = f"; the pairs of one token in {step}, of {8 * step}" if step > 1 else ""
    assert below(html) == "queries down, keys to the right" + said
    assert title.endswith("%)") == (step == 1)


@pytest.mark.parametrize(("reach", "middle"), [(0, 4), (8, 8)])
def test_global_tokens_are_the_first_and_one_in_the_middle(reach: int, middle: int) -> None:
    html = patterns_html([("g", [GlobalKeys()])], reach, count=8)
    ((_, picture),) = panels(html)
    cells = cells_of(picture, [BLUE], (8, 8))
    assert cells.any(0).nonzero().flatten().tolist() == [0, 4]
    assert below(html).endswith(f"; tokens 0 and {middle} are global")


def test_colours_begin_again_behind_the_last() -> None:
    parts = [Sink(n) for n in range(1, 7)]
    fills = re.findall(r"color:(#\w+)\">■", patterns_html([("s", parts)], 0, 8))
    assert fills == [*PALETTE, BLUE]
    assert len({*PALETTE, PALE}) == 6
