"""The reports and the command of explain, and the topics scale and masks against their formulas."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from string import Formatter

import pytest
import torch

from headway.cli import run
from headway.errors import ConfigError
from headway.patterns import Causal, Window, visible
from headway.tokens import Tokens
from headway_lab.explain import GROUPS, TOPICS, explain, judged, masks, scale, settings_of
from headway_lab.explain.report import Report, Row
from headway_lab.explain.spread import Gap


def report(**change: object) -> Report:
    fields: dict[str, object] = {
        "topic": "scale",
        "question": "Why?",
        "formula": "a = b\nc = d",
        "rows": ({"n": 1, "value": 0.5}, {"n": 2, "value": 0.25}, {"n": 3, "value": 0.125}),
        "claims": {"it falls": True, "it halves": True},
        "setting": "n = 1..3, seed 0",
        "finding": "it halves",
    }
    return Report(**{**fields, **change})  # type: ignore[arg-type]


def test_a_verdict_says_where_and_never_that_something_is_refuted() -> None:
    assert report().verdict == "seen at this size (n = 1..3, seed 0): it halves."
    assert report(claims={"a": False}).verdict.startswith("not seen at this size (")
    part = report(claims={"it falls": True, "it halves": False})
    assert part.verdict == "seen in part at this size (n = 1..3, seed 0): it halves. Not seen: it halves."
    assert not part.seen
    assert report(claims={"a": None, "b": None}).verdict.startswith("too small to tell (n = 1..3, seed 0)")
    mixed = report(claims={"it falls": True, "it halves": None, "it ends": False})
    assert mixed.verdict.endswith("it halves. Not seen: it ends. Too small to tell: it halves.")
    assert "  seen               it falls\n  too small to tell  it halves\n" in mixed.to_text()
    assert report(claims={"a": None, "b": False}).verdict.startswith("not seen at this size")
    assert "  seen      it falls\n  not seen  it halves" in part.to_text()
    assert (part.to_json()["seen"], part.to_json()["claims"]) == (
        False,
        {"it falls": True, "it halves": False},
    )


def test_the_terminal_shows_the_highlighted_rows_and_says_so() -> None:
    text = report(highlight=(0, 2), picture="# .\n# #").to_text()
    assert "0.5" in text
    assert "0.125" in text
    assert "0.25" not in text
    assert "2 of 3 rows" in text
    assert "  # .\n  # #" in text
    assert "2 of 3" not in report().to_text()


def test_a_row_without_a_column_has_an_empty_cell() -> None:
    sparse = report(rows=({"n": 1}, {"value": 2.0}))
    assert sparse.columns == ("n", "value")
    assert sparse.cells == [[1, None], [None, 2.0]]
    assert sparse.column("value") == [2.0]
    document = sparse.to_json()
    assert (document["columns"], document["rows"]) == (("n", "value"), sparse.cells)
    assert "values" not in document


def test_an_unknown_topic_lists_the_topics() -> None:
    with pytest.raises(ConfigError, match=r'no topic \'scal\' \(did you mean "scale"\?\); topics are scale'):
        explain("scal")


def test_without_a_topic_the_questions_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain"]) == 0
    text = capsys.readouterr().out
    for name, topic in TOPICS.items():
        assert name in text
        assert topic.question in text
    assert run(["explain", "--json"]) == 0
    topics = json.loads(capsys.readouterr().out)
    assert {name: topic["question"] for name, topic in topics.items()} == {
        name: topic.question for name, topic in TOPICS.items()
    }
    assert [topic["group"] for topic in topics.values()] == [
        group for group, names in GROUPS.items() for _ in names
    ]
    assert all(topic["seconds"] > 0 for topic in topics.values())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["swish", "--heads", "4"], "explain swish: the topic takes no --heads; it takes --quick"),
        (
            ["scale", "--quick", "--n", "4"],
            "explain scale: the topic takes no --n; it takes --seeds and --quick",
        ),
        (["heads", "--d", "4"], "takes no --d; it takes --heads, --kv-heads, --context, --seeds and --quick"),
        (["heads", "--heads", "12", "--kv-heads", "5"], "12"),
        (["heads", "--heads", "1"], "--heads 1 must be at least 2"),
        (["complexity", "--n", "4"], "n must be at least 8, and d, k and r at least 2; got n=4"),
        (["complexity", "--k", "0"], "settings must be at least 1, got --k 0"),
        (["memory", "--context", "100"], "--context 100 must be at least 512 and a multiple of 4"),
        (["cache", "--context", "100"], "--context 100 must be a multiple of 512"),
        (["scale", "--seeds", "3,3"], "--seeds needs at least two different seeds, got (3, 3)"),
        (["scale", "--seeds", "many"], "--seeds takes numbers between commas, as 0,1,2; got 'many'"),
        (["--quick"], "explain: --quick needs a topic, or all"),
        (["--out", "x"], "explain: --out needs a topic, all or figures"),
    ],
)
def test_a_setting_that_a_topic_does_not_take_is_refused_by_name(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", *arguments]) == 1
    assert told in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("topic", TOPICS)
def test_a_quick_run_is_made_of_settings_that_the_topic_takes(topic: str) -> None:
    assert set(TOPICS[topic].quick) <= set(settings_of(topic))


def test_quick_is_taken_by_every_topic(capsys: pytest.CaptureFixture[str]) -> None:
    """A topic without a smaller run says so, and its verdict is that of its usual run."""
    assert all("quick" in settings_of(topic) for topic in TOPICS)
    assert run(["explain", "swish", "--quick", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"] == explain("swish").verdict
    assert "swish: 1 s of one core, and no smaller run" in err


def test_a_gap_within_its_bound_is_too_small_to_tell() -> None:
    sentence = "{gap}"
    topic = replace(TOPICS["scale"], finding=sentence, setting="", picture="", claims={})
    for mean, word in ((0.3, "seen"), (0.1, "too small to tell"), (-0.3, "seen")):
        actual = topic.told("scale", report(claims={}, values={"gap": Gap(mean, 0.2)}))
        assert actual.finding == f"{mean:+.3f} ± 0.200, {word}"


def test_settings_reach_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--n", "16", "--d", "6", "--k", "2", "--r", "5"]
    assert run(["explain", "complexity", *sizes, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["seen"], document["verdict"]
    assert document["setting"].startswith("n = 4..16, d = 3, 6, k = 2, r = 5")


def test_a_topic_writes_its_table_and_its_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "scale", "--json", "--out", str(tmp_path / "new")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"].startswith("seen at this size")
    assert Path(document["figure"]).read_bytes().startswith(b"\x89PNG")
    with Path(document["csv"]).open(newline="") as file:
        lines = list(csv.reader(file))
    assert lines[0] == document["columns"]
    assert [[float(x) for x in line] for line in lines[1:]] == document["rows"]


def test_every_topic_has_a_formula() -> None:
    assert [name for name, topic in TOPICS.items() if not topic.formula] == []


def test_jacobian_norm_is_the_norm_of_the_jacobian() -> None:
    scores = torch.randn(9, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), scores)
    assert float(scale.jacobian_norm(scores.softmax(-1))) == pytest.approx(float(jacobian.norm()), rel=1e-12)


def test_scale_sees_the_collapse_only_without_the_scale() -> None:
    report = judged(scale)
    assert report.seen
    assert report.column("d") == list(scale.WIDTHS)
    # 3 seeds x 256 x 64 products of shared q and k: the spread of the variance is a few percent, not ten
    for width, variance in zip(report.column("d"), report.column("Var(q.k)"), strict=True):
        assert variance == pytest.approx(width, rel=0.1)
    assert report == judged(scale), "the same seeds must give the same report"


def test_scale_would_notice_a_softmax_that_does_not_collapse() -> None:
    def row(width: int, variance: float, plain: float) -> Row:
        values = {"d": width, "|J| without scale": plain, "most |J| without": plain}
        values |= dict.fromkeys(("Var(q.k)", "Var(q.k), least", "Var(q.k), most"), variance)
        return values | dict.fromkeys(("|J| with scale", "least |J| with scale"), 0.2)

    assert scale.judge([row(4, 4.0, 0.2), row(512, 512.0, 0.001)]).seen
    assert not scale.judge([row(4, 4.0, 0.2), row(512, 512.0, 0.19)]).seen
    assert not scale.judge([row(4, 8.0, 0.2), row(512, 1024.0, 0.001)]).seen


def test_masks_find_the_declared_pairs_and_no_others() -> None:
    report = masks.run()
    assert report.seen
    tokens = Tokens.range(masks.COUNT).with_global(list(masks.GLOBAL))
    counts = [int(visible(pattern, tokens, tokens).sum()) for _, pattern in masks.CASES]
    assert report.column("pairs allowed") == report.column("with gradient") == counts
    assert set(report.column("differing")) == set(report.column("changed from outside")) == {0}
    assert report.column("gradient from the future") == [None] * 4 + [0.0] * 4


def test_masks_would_notice_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    wider = Window(5, 1)  # looks one token ahead of what is declared
    attend = masks.attend

    def leaky(q, k, v, pattern, **tokens):  # type: ignore[no-untyped-def]
        return attend(q, k, v, wider if pattern == Window.last(6) else pattern, **tokens)

    masks.measure.cache_clear()
    monkeypatch.setattr(masks, "attend", leaky)
    monkeypatch.setattr(masks, "CASES", (("causal", Causal()), ("causal window", Window.last(6))))
    report = masks.run()
    masks.measure.cache_clear()
    assert not report.seen
    assert report.column("differing") == [0, masks.COUNT - 1]
    assert report.column("changed from outside") == [0, masks.COUNT - 1]
    assert report.column("gradient from the future")[1] > 0


# The digits of formulas, names and units; every other digit of a finding is computed.
SYMBOLS = re.compile(
    r"sqrt\(2\)|1 \+ cosine|Swish\(-?\d\)|\bx / 2|beta = 0|at 1 it|m [>=] 0|equal to 1|\[1/2, 1/2\]|\[1, 1\]"
    r"|mean 0 and variance 1|sums? to 1|float32"
)


@pytest.mark.parametrize("topic", TOPICS)
def test_numbers_in_a_finding_are_computed(topic: str) -> None:
    """A finding's template has no digits but those of formulas: the run fills in all numbers."""
    text = "".join(text for text, *_ in Formatter().parse(TOPICS[topic].finding))
    assert not re.search(r"\d", SYMBOLS.sub("", text)), text
