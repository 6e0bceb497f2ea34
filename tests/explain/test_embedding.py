"""The topic of the scaled embedding (row 21), and that its verdict can differ."""

import math

import pytest
from matplotlib.figure import Figure

from headway_lab.explain import Report, embedding


@pytest.fixture(scope="module")
def report() -> Report:
    return embedding.run()


def test_tokens_and_positions_are_of_one_size_only_when_scaled(report: Report) -> None:
    assert report.seen, report.verdict
    base = {row[0]: row for row in report.rows}[512]
    assert base[1] == pytest.approx(22.627, abs=5e-4)
    assert base[4] == pytest.approx(16.0), "|PE| = sqrt(M/2)"
    for row in report.rows:
        assert row[6] == pytest.approx(math.sqrt(2), rel=0.02)
        assert row[5] == pytest.approx(math.sqrt(2 / row[0]), rel=0.02)
    assert set(report.column("matrices")) == {1}


def test_the_verdict_would_notice(report: Report) -> None:
    rows = list(report.rows)
    assert embedding.judge(rows).seen
    for column, value in ((5, 1.0), (6, 1.0), (9, 2.0), (10, 1.0), (11, 3)):
        changed = (*rows[0][:column], value, *rows[0][column + 1 :])
        assert not embedding.judge([changed, *rows[1:]]).seen, report.columns[column]


def test_the_figure_has_two_panels_with_labels(report: Report) -> None:
    figure = Figure()
    embedding.draw(figure, report)
    assert [axes.get_xlabel() for axes in figure.axes] == ["width M"] * 2
    assert all(axes.get_title(loc="left") or axes.get_title() for axes in figure.axes)
