"""Judges with known preferences and faults: the reports show what the judges were made to do."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.cli import run
from headway.endpoints import Transcript
from headway.errors import DataError
from headway.judge import (
    Judgment,
    Pairs,
    Question,
    Ratings,
    ask,
    judgments,
    pairs_of,
    ratings_of,
    read_answers,
    read_questions,
)
from headway.judge.judgments import Side
from tests.data import data_path
from tests.endpoints.scripted import Scripted, completion, server

Judge = Callable[[str, str], str]  # the answers to the judged turn, in the order shown -> the judge's reply


def shown(text: str) -> tuple[str, ...]:
    """Returns the answers to the judged turn in a prompt: of A and B, or the single one."""
    if "<|The Start of Assistant" in text:
        return tuple(re.findall(r"### Assistant [AB]:\n((?:(?!###).)*?)\n\n<\|The End", text, re.S))
    return tuple(re.findall(r"Answer\]\n(good=.*?)\n\[The End of Assistant", text, re.S))


def quality(answer: str) -> int:
    return int(re.match(r"good=(\d+)", answer)[1])  # type: ignore[index]


def fair(a: str, b: str) -> str:
    return "C" if quality(a) == quality(b) else "A" if quality(a) > quality(b) else "B"


def says(judge: Judge) -> Scripted:
    """Returns a judge that compares pairs by `judge` and rates answers by their quality."""

    def answer(messages: Sequence[Any], seed: int) -> str:
        answers = shown(messages[-1]["content"])
        if len(answers) == 1:
            return f"Some words [of 10]. Rating: [[{quality(answers[0])}]]"
        verdict = judge(*answers)
        return f"Neither [[A]] nor [[B]] is plain, but: {verdict}" if verdict[:2] == "[[" else verdict

    return Scripted(answer)


def bench(count: int = 40) -> tuple[list[Question], dict[str, list[str]], dict[str, list[str]]]:
    """Returns questions, the first half of two turns, and two sets of answers of known quality and length."""
    draw = np.random.default_rng(1)
    questions = [
        Question(f"{i}", "writing", ("What?", "And?")[: 2 if i < count // 2 else 1]) for i in range(count)
    ]

    def answers() -> dict[str, list[str]]:
        return {
            q.id: [f"good={draw.integers(1, 11)} {'x' * draw.integers(5, 300)} {{}}" for _ in q.turns]
            for q in questions
        }

    return questions, answers(), answers()


def judged(judge: Judge, path: Path) -> tuple[Pairs, Ratings]:
    questions, a, b = bench()
    with Transcript(path / "t.jsonl") as transcript:
        pairs = list(judgments("pairs", says(judge), questions, a, b, transcript))
        ratings = list(judgments("ratings", says(judge), questions, a, b, transcript))
    return pairs_of(pairs), ratings_of(ratings)


def test_row_46_a_fair_judge_is_believed_in_both_orders(tmp_path: Path) -> None:
    pairs, ratings = judged(lambda a, b: f"[[{fair(a, b)}]]", tmp_path)
    questions, a, b = bench()
    marks = [(quality(x), quality(y)) for q in questions for x, y in zip(a[q.id], b[q.id], strict=True)]
    assert len(marks) == 60
    wins, losses = sum(x > y for x, y in marks), sum(x < y for x, y in marks)
    assert (pairs.wins, pairs.ties, pairs.losses) == (wins, 60 - wins - losses, losses)
    assert pairs.a_first == pairs.b_first == (wins, 60 - wins - losses, losses)
    assert (pairs.flips, pairs.unparsed) == (0, 0)
    assert pairs.first_shown == 0.5
    assert pairs.win_rate.value == pytest.approx((wins + (60 - wins - losses) / 2) / 60)
    ratio = sum(x for x, _ in marks) / sum(y for _, y in marks)
    assert (ratings.mean_a, ratings.turns) == (pytest.approx(sum(x for x, _ in marks) / 60), 60)
    assert ratings.ratio.value == pytest.approx(ratio)
    assert ratings.ratio.low < ratio < ratings.ratio.high  # type: ignore[operator]
    transcript = (tmp_path / "t.jsonl").read_text().splitlines()
    assert len(transcript) == 60 * 4


def test_requests_sent_at_once_get_the_same_verdicts(tmp_path: Path) -> None:
    questions, a, b = bench(12)
    judge = says(lambda x, y: f"[[{fair(x, y)}]]")
    with Transcript(tmp_path / "one.jsonl") as sequential, Transcript(tmp_path / "many.jsonl") as concurrent:
        assert judgments("pairs", judge, questions, a, b, concurrent, parallel=5) == judgments(
            "pairs", judge, questions, a, b, sequential
        )
        assert judgments("ratings", judge, questions, a, b, concurrent, parallel=5) == judgments(
            "ratings", judge, questions, a, b, sequential
        )
        assert sequential.sent == concurrent.sent == 18 * 4
    lines = [sorted((tmp_path / name).read_text().splitlines()) for name in ("one.jsonl", "many.jsonl")]
    assert lines[0] == lines[1]


def test_a_judge_that_likes_the_first_place_wins_nothing_for_anyone(tmp_path: Path) -> None:
    pairs, _ = judged(lambda a, b: "[[A]]", tmp_path)
    assert (pairs.wins, pairs.ties, pairs.losses, pairs.flips) == (0, 60, 0, 60)
    assert (pairs.a_first, pairs.b_first, pairs.first_shown) == ((60, 0, 0), (0, 0, 60), 1.0)
    assert (pairs.win_rate.value, pairs.length_correlation) == (0.5, None)


def test_a_judge_that_likes_length_is_found_out(tmp_path: Path) -> None:
    pairs, _ = judged(lambda a, b: "[[A]]" if len(a) > len(b) else "[[B]]", tmp_path)
    assert (pairs.longer, pairs.flips) == (1.0, 0)
    assert pairs.length_correlation is not None
    assert pairs.length_correlation > 0.8
    assert abs(judged(lambda a, b: f"[[{fair(a, b)}]]", tmp_path / "fair")[0].length_correlation or 0) < 0.3


def test_of_two_answers_of_one_length_none_is_longer() -> None:
    def verdict(lengths: tuple[int, int], winner: Side) -> tuple[Judgment, Judgment]:
        turn = f"{lengths}", 1, lengths
        return Judgment(*turn, "A", winner), Judgment(*turn, "B", winner)

    uneven = [verdict((9, 4), "A"), verdict((2, 3), "B"), verdict((7, 6), "B")]
    assert pairs_of(uneven).longer == pytest.approx(2 / 3)
    assert pairs_of([*uneven, verdict((5, 5), "A"), verdict((0, 0), "B")]).longer == pytest.approx(2 / 3)
    assert pairs_of([verdict((5, 5), "A")]).longer is None


def test_what_a_judge_leaves_out_is_counted_and_one_bracket_is_enough(tmp_path: Path) -> None:
    pairs, _ = judged(lambda a, b: "[C]" if quality(a) % 2 else "no idea", tmp_path)
    questions, a, b = bench()
    odd = [(quality(x) % 2, quality(y) % 2) for q in questions for x, y in zip(a[q.id], b[q.id], strict=True)]
    assert pairs.unparsed == sum(2 - x - y for x, y in odd)
    assert pairs.wins + pairs.ties + pairs.losses == sum(x and y for x, y in odd)


def test_ratings_outside_of_the_scale_are_not_found(tmp_path: Path) -> None:
    questions, a, b = bench(4)
    replies = iter(["[[11]]", "[[0]]", "[7.5] of [[10]]", "[7.5]", "none", "[[3]]"] + ["[[4]]"] * 6)
    with Transcript(tmp_path / "t.jsonl") as transcript:
        ratings = list(
            judgments("ratings", Scripted(lambda messages, seed: next(replies)), questions, a, b, transcript)
        )
    assert [judgment.value for pair in ratings for judgment in pair][:6] == [None, None, 10.0, 7.5, None, 3.0]
    assert (ratings_of(ratings).unparsed, ratings_of(ratings).turns) == (3, 4)


def test_an_interval_is_the_bootstrap_over_questions() -> None:
    """Against resampling written out here; the draws differ, so both agree as closely as 10,000 draws of a mean do."""
    draw = np.random.default_rng(3)
    scores = draw.integers(1, 11, (30, 2)).astype(float)
    turns = [((f"{i // 2}", i % 2 + 1, (5, 5)), pair) for i, pair in enumerate(scores)]
    both = [(Judgment(*turn, "A", pair[0]), Judgment(*turn, "B", pair[1])) for turn, pair in turns]
    ratio = ratings_of(both, seed=1).ratio
    assert ratio == ratings_of(both, seed=1).ratio
    resampled = []
    for _ in range(4000):
        rows = np.concatenate([[2 * q, 2 * q + 1] for q in draw.integers(15, size=15)])
        resampled.append(scores[rows, 0].mean() / scores[rows, 1].mean())
    assert (ratio.low, ratio.high) == pytest.approx(np.quantile(resampled, [0.025, 0.975]), abs=0.02)
    report = pairs_of([(Judgment(*turns[0][0], "A", None), Judgment(*turns[0][0], "B", "A"))])
    assert (report.win_rate.value, report.first_shown, report.unparsed) == (None, None, 1)


def test_references_are_shown_and_the_second_turn_with_the_first(tmp_path: Path) -> None:
    path = data_path("conversations/mt_bench_question.jsonl")
    questions = read_questions(path, data_path("conversations/mt_bench_reference_gpt-4.jsonl"))
    assert (len(questions), sum(q.reference is not None for q in questions)) == (80, 30)
    assert {len(q.turns) for q in read_questions(data_path("conversations/vicuna_bench_question.jsonl"))} == {
        1
    }
    (question,) = [q for q in questions if q.id == "101"]
    prompts: list[Any] = []

    def answer(messages: Sequence[Any], seed: int) -> str:
        prompts.append(messages)
        return "[[C]]"

    answers = {"101": ["good=1", "good=2"]}
    with Transcript(tmp_path / "t.jsonl") as transcript:
        assert (
            len(
                list(
                    judgments(
                        "pairs",
                        Scripted(answer),
                        [question],
                        answers,
                        {"101": ["good=3", "good=4"]},
                        transcript,
                    )
                )
            )
            == 2
        )
        list(judgments("ratings", Scripted(answer), [question], answers, answers, transcript))
    assert question.reference is not None
    first, _, second, _ = (messages[1]["content"] for messages in prompts[:4])
    assert question.reference[0] in first
    assert question.reference[1] not in first
    assert (shown(first), shown(second)) == (("good=1", "good=3"), ("good=2", "good=4"))
    for text in (*question.turns, *question.reference, "good=1", "good=3"):
        assert text in second
    assert prompts[0][0]["content"].startswith("Please act as an impartial judge")
    assert 'strictly following this format: "[[rating]]"' in prompts[4][1]["content"]


def test_answers_are_asked_turn_after_turn_and_resumed(tmp_path: Path) -> None:
    questions, _, _ = bench(6)
    endpoint = Scripted(lambda messages, seed: f"good={len(messages)}")
    answers = ask(endpoint, questions, tmp_path / "a.jsonl")
    assert answers["0"] == ("good=1", "good=3")
    assert read_answers(tmp_path / "a.jsonl") == answers
    asked = endpoint.asked
    assert ask(endpoint, questions, tmp_path / "a.jsonl") == answers
    assert endpoint.asked == asked
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl.transcript.jsonl").read_text().splitlines()]
    assert {line["request"]["temperature"] for line in lines} == {0.7}


def test_files_that_are_wrong_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    for text, message in (
        ('{"question_id": 1}', r"q.jsonl:1: expected .question_id. and .turns., a list of texts"),
        (
            '{"question_id": 1, "turns": ["a", "b", "c"]}',
            "q.jsonl:1: a question must have one turn or two, got 3",
        ),
        (
            '{"question_id": 1, "turns": ["a"]}\n{"question_id": 1, "turns": ["a"]}',
            "q.jsonl:2: question_id 1 occurs twice",
        ),
    ):
        path.write_text(text + "\n")
        with pytest.raises(DataError, match=message):
            read_questions(path)
    questions, a, b = bench(4)
    del b["2"]
    with (
        Transcript(tmp_path / "t.jsonl") as transcript,
        pytest.raises(DataError, match="question 2 has 1 turns, but B"),
    ):
        list(judgments("pairs", says(fair), questions, a, b, transcript))


def test_the_command_judges_a_server_by_a_server_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions, a, b = bench(8)
    lines = [{"question_id": int(q.id), "category": q.category, "turns": q.turns} for q in questions]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = [{"question_id": name, "choices": [{"turns": turns}]} for name, turns in b.items()]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    judge, requested, limit = says(lambda x, y: f"[[{fair(x, y)}]]"), [], 20

    def answer(path: str, body: Any) -> Any:
        requested.append(body["model"])
        if body["model"] == "judge":
            if len(requested) > limit:
                return 400, {}, {"error": {"message": "out of money"}}
            return completion(judge.answer(body["messages"], 0))  # type: ignore[arg-type]
        turn = (len(body["messages"]) + 1) // 2
        texts = [turns[turn - 1] for q, turns in a.items() if len(turns) >= turn]
        return completion(texts[len(requested) % len(texts)])

    with server(answer) as url:
        command = ["judge", f"{url}#a", str(tmp_path / "b.jsonl"), "--questions", str(tmp_path / "q.jsonl")]
        command += ["--by", f"{url}#judge", "--out", str(tmp_path / "out")]
        assert run(command) == 1
        assert "400 out of money" in capsys.readouterr().err
        limit = 10**9
        assert run([*command, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert requested.count("a") == 12
        assert requested.count("judge") == 12 * 4 + 1
        assert run(command) == 0
    printed = capsys.readouterr().out
    assert "verdicts that change with the order" in printed
    assert "ratio of the means, A / B" in printed
    assert len(requested) == 12 * 5 + 1
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["pairs"]["flips"] == 0
    assert len((tmp_path / "out" / "judgments.jsonl").read_text().splitlines()) == 12 * 4
    assert run([*command, "--mode", "all"]) == 2
    assert "'all' is not one of 'pairs', 'ratings', 'both'" in capsys.readouterr().err
