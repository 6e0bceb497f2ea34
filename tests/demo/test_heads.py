"""What the demo says and draws of attention maps."""

from pathlib import Path

import torch

from headway_lab.demo import heads
from headway_lab.demo.run import shown


def test_looks_measure_where_the_weight_lies() -> None:
    itself, previous, first = torch.eye(6), torch.eye(6).roll(-1, 1).tril(), torch.zeros(6, 6)
    first[:, 0] = 1.0
    looks = heads.looks([torch.stack([itself, previous, first])])
    assert [(look["itself"], look["previous"], look["first"], look["back"]) for look in looks] == [
        (1.0, 0.0, 0.0, 0.0),
        (0.0, 1.0, 0.0, 1.0),
        (0.0, 0.0, 1.0, 3.5),  # queries 2..5 look 2..5 back
    ]
    text = heads.striking(looks)
    assert "layer 0, head 0  100% of its weight" in text
    assert "layer 0, head 1  100% of its weight" in text
    assert "layer 0, head 2  3.5 tokens" in text


def test_the_figure_has_a_panel_a_head(tmp_path: Path) -> None:
    maps = [torch.rand(2, 5, 5).softmax(-1) for _ in range(3)]
    heads.draw_heads(maps, ["a", "b", "$\\c$", "_d", "\\e"], tmp_path / "heads.png")
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")


def test_spaces_and_line_ends_are_shown() -> None:
    assert shown(" x\n") == "·x¶"
    assert shown("ñ中\t\x1b") == "ñ□□□"
