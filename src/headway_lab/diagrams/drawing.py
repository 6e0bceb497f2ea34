"""Boxes, lines, cells and words as SVG: text stays text, so that drawing a picture in Chinese needs no font."""

import unicodedata
from collections.abc import Sequence
from html import escape

from headway_lab.draw import GREY, INK, PALE

FONT = "'Noto Sans', 'Noto Sans SC', 'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', sans-serif"
SIZE = 12  # font size in pixels
AROUND = 3  # pixels between words and the left and right sides of their box


class Drawing:
    """A picture of `width` x `height` pixels on white.

    Raises ValueError for words that are wider than their box or leave the picture."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.texts: list[str] = []
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        words: str = "",
        *,
        fill: str = PALE,
        edge: str = GREY,
        ink: str = INK,
        size: int = SIZE,
        dashed: bool = False,
    ) -> None:
        """Draws a rectangle from its upper left corner, with words centred in it, one line of text per line of
        `words`."""
        look = f'fill="{fill}" stroke="{edge}"' + ' stroke-dasharray="4 3"' * dashed
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" {look}/>')
        if words:
            room = width - 2 * AROUND
            self.text(x + width / 2, y + height / 2, words, size=size, ink=ink, room=room)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = SIZE,
        ink: str = INK,
        anchor: str = "middle",
        bold: bool = False,
        room: float | None = None,
    ) -> None:
        """Draws words centred vertically on `y`, one line of text per line of `words`, at most `room` pixels wide if
        given."""
        lines = words.split("\n")
        start = {"start": x, "middle": x - wide(words, size) / 2, "end": x - wide(words, size)}[anchor]
        widest = self.width if room is None else room
        if wide(words, size) > widest or start < 0 or start + wide(words, size) > self.width:
            raise ValueError(
                f"{words!r} is {wide(words, size):.0f} pixels wide, at {start:.0f} of {self.width}"
            )
        self.texts.append(words)
        weight = ' font-weight="bold"' if bold else ""
        for number, line in enumerate(lines):
            at = y + (number - (len(lines) - 1) / 2) * 1.25 * size
            self._parts.append(
                f'<text x="{x:g}" y="{at:.4g}" dy=".35em" text-anchor="{anchor}" font-size="{size}" fill="{ink}"'
                f"{weight}>{escape(line)}</text>"
            )

    def line(
        self, *points: tuple[float, float], colour: str = INK, width: float = 1.2, arrow: bool = False
    ) -> None:
        """Draws a line through points, optionally with an arrow at its end."""
        path = " ".join(f"{x:.5g},{y:.5g}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'
        )
        if arrow:
            (x0, y0), (x1, y1) = points[-2:]
            length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
            ux, uy = (x1 - x0) / length, (y1 - y0) / length
            head = ((x1, y1), (x1 - 7 * ux - 3.5 * uy, y1 - 7 * uy + 3.5 * ux),
                    (x1 - 7 * ux + 3.5 * uy, y1 - 7 * uy - 3.5 * ux))  # fmt: skip
            self.polygon(head, fill=colour)

    def polygon(self, points: Sequence[tuple[float, float]], *, fill: str, edge: str = "none") -> None:
        """Draws a filled polygon."""
        path = " ".join(f"{x:.5g},{y:.5g}" for x, y in points)
        self._parts.append(f'<polygon points="{path}" fill="{fill}" stroke="{edge}" stroke-width="0.6"/>')

    def circle(self, x: float, y: float, radius: float, *, fill: str = "none", edge: str = GREY) -> None:
        """Draws a circle around (x, y)."""
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{fill}" stroke="{edge}"/>')

    def cells(self, x: float, y: float, side: float, rows: Sequence[Sequence[str]]) -> None:
        """Draws squares of the given colours row by row, from the upper left corner (x, y)."""
        paths: dict[str, str] = {}
        for j, row in enumerate(rows):
            for i, fill in enumerate(row):
                place = f"M{x + i * side:g} {y + j * side:g}h{side:g}v{side:g}h-{side:g}z"
                paths[fill] = paths.get(fill, "") + place
        self._parts += [f'<path d="{path}" fill="{fill}" stroke="white"/>' for fill, path in paths.items()]

    def to_svg(self) -> str:
        """Returns the SVG file's content."""
        parts = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="{escape(FONT)}">\n'
            f'<rect width="{self.width}" height="{self.height}" fill="white"/>\n{parts}\n</svg>\n'
        )


def wide(words: str, size: int) -> float:
    """Returns the approximate width of words in pixels: that of their longest line."""
    return (
        max(sum(_EM.get(unicodedata.east_asian_width(c), 0.56) for c in line) for line in words.split("\n"))
        * size
    )


_EM = {"W": 1.0, "F": 1.0}
