"""Pictures of attention maps: standalone files that show the texts and shades of the maps."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import headway
from headway.api import LanguageModel
from headway.models import ModelSpec, build
from tests.api.maps import SIZE, SPECS, loaded
from tests.checkpoints import seq2seq


def painted(html: str) -> list[list[tuple[str, int, int]]]:
    """Returns the painted cells (fill, query, key) of each SVG, read back from its paths."""
    pictures = []
    for picture in re.findall(r"<svg.*?</svg>", html):
        cells = []
        for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}path"):
            runs = re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", element.get("d") or "")
            for x, y, length in ((int(n) for n in run) for run in runs):
                cells += [(element.get("fill") or "", y, x + i) for i in range(length)]
        pictures.append(cells)
    return pictures


class _Parts(HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.values: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.values += [value or "" for name, value in attrs if name != "xmlns"]


def check_alone(html: str) -> None:
    """Checks that the page runs no scripts and fetches nothing."""
    parts = _Parts(html)
    assert parts.tags <= {"div", "span", "svg", "g", "rect", "path", "text"}
    assert not any("http" in value or "url(" in value for value in parts.values)


def test_the_picture_of_a_map_has_its_texts_and_shades() -> None:
    lm = loaded(SPECS["window with sinks, full"])
    attention_map = lm.attention("<b>&\"' cat", layers=1, heads=[0, 2])[1]
    html = attention_map._repr_html_()
    check_alone(html)
    labels = [
        text for text in ElementTree.fromstring(re.findall(r"<svg.*?</svg>", html)[0]).itertext() if text
    ]
    assert labels == [*attention_map.queries, *attention_map.keys]
    for cells, weights in zip(painted(html), attention_map.weights(), strict=True):
        assert {(q, k) for _, q, k in cells} == set(map(tuple, (weights > 0).nonzero().tolist()))
        shades = {(q, k): int(fill[1:3], 16) for fill, q, k in cells}
        darkest = min(shades, key=lambda cell: (shades[cell], -float(weights[cell])))
        assert weights[darkest] == weights.max()


def test_the_picture_of_a_long_text_is_drawn_from_some_queries_and_pooled_keys() -> None:
    lm = LanguageModel(build(ModelSpec.of("llama", **SIZE), seed=3).eval())
    attention_map = lm.attention([5, 9] * 75, layers=1, heads=1)[1]
    html = attention_map._repr_html_()
    check_alone(html)
    assert "one query in 3, of 150, the largest of 3 keys side by side, of 150" in html
    (cells,) = painted(html)
    assert {(q, k) for _, q, k in cells} == {(q, k) for q in range(50) for k in range(q + 1)}
    overview = lm.attention([5, 9] * 75)._repr_html_()
    check_alone(overview)
    assert len(painted(overview)) == 8
    assert "layer 1, head 3" in overview


def test_the_picture_of_a_translation_is_that_of_its_target_on_its_source(tmp_path: Path) -> None:
    model = seq2seq.theirs("marian")
    model.save_pretrained(tmp_path)
    translator = headway.load(tmp_path)
    maps = translator.attention([5, 9, 1, 0], [60, 4, 4])
    assert maps._repr_html_() == maps.cross._repr_html_()
    generated = translator.attention([5, 9, 1, 0], layers=0)
    assert generated.decoder[0].queries[0] == "60"
    assert "0" not in generated.decoder[0].queries[1:]
