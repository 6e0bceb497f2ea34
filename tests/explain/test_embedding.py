"""The topic of the scaled embedding (row 21), and numbers that turn its verdict."""

import math

import pytest

from headway_lab.explain import embedding
from headway_lab.explain.report import Report
from tests.explain import toys


@pytest.fixture
def report() -> Report:
    return toys.toy("embedding").report


def test_tokens_and_positions_are_of_one_size_only_when_scaled(report: Report) -> None:
    assert report.seen, report.verdict
    base = {row["M"]: row for row in report.rows}[512]
    assert base["sqrt(M)"] == pytest.approx(22.627, abs=5e-4)
    assert base["|PE|"] == pytest.approx(16.0), "|PE| = sqrt(M/2)"
    for row in report.rows:
        assert row["|sqrt(M) e| / |PE|"] == pytest.approx(math.sqrt(2), rel=0.02)
        assert row["|e| / |PE|"] == pytest.approx(math.sqrt(2 / row["M"]), rel=0.02)
    assert set(report.column("matrices")) == {1}


def test_the_verdict_would_notice(report: Report) -> None:
    first, *rest = report.rows
    assert embedding.judge(report.rows).seen
    for column, value in (
        ("|e| / |PE|", 1.0),
        ("|sqrt(M) e| / |PE|", 1.0),
        ("Var(logit)", 2.0),
        ("Var(logit), entries of variance 1", 1.0),
        ("matrices", 3),
    ):
        assert not embedding.judge([{**first, column: value}, *rest]).seen, column
