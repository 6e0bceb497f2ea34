"""Pictures of cells: exact SVG of small examples, and cells read back from the paths."""

import re

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.patterns.picture import BLUE, figure, svg


def cells_of(picture: str, fills: list[str], shape: tuple[int, int]) -> Tensor:
    """Returns the cells that a picture's paths paint, numbered by their fill."""
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
    html = figure([("a < b", "<svg/>"), ("c", "<i/>")], "<b>below</b>")
    assert html == (
        '<div style="background:white;color:#1d2733;font-family:sans-serif;padding:8px">'
        '<div style="display:flex;flex-wrap:wrap;gap:14px">'
        '<div><div style="font-size:11px;margin-bottom:3px">a &lt; b</div><svg/></div>'
        '<div><div style="font-size:11px;margin-bottom:3px">c</div><i/></div></div>'
        '<div style="color:#8a94a0;font-size:11px;margin-top:6px"><b>below</b></div></div>'
    )
