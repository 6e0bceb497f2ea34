"""Answers are the most probable spans of the context, or say that it holds none."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.pipelines.document_question_answering import select_starts_ends

import headway
from headway.api import Answerer
from headway.data.encoded import windows
from headway.errors import ConfigError, DataError
from tests.small_bert import SIZE, WORDS, bert, folder_of


def best_spans(begins: Tensor, ends: Tensor, longest: int) -> list[tuple[float, int, int]]:
    """Returns all spans with their probabilities, the best first, by trying each one."""
    p, q = begins.double().softmax(0), ends.double().softmax(0)
    spans = [(float(p[i] * q[j]), i, j) for i in range(len(p)) for j in range(i, min(len(p), i + longest))]
    return sorted(spans, reverse=True)


@pytest.mark.parametrize("family", ["Bert", "Longformer"])
def test_answers_are_the_best_stretches_of_the_context(family: str, tmp_path: Path) -> None:
    if family == "Bert":
        path, model = bert(tmp_path / "m", "ForQuestionAnswering")
    else:
        torch.manual_seed(4)
        config = transformers.LongformerConfig(
            **{**SIZE, "max_position_embeddings": 40}, attention_window=4, type_vocab_size=1, pad_token_id=0,
            sep_token_id=3, bos_token_id=2, eos_token_id=3,
        )  # fmt: skip
        model = transformers.LongformerForQuestionAnswering(config).eval()
        path = folder_of(tmp_path / "m", model)
    ours = headway.load(path)
    assert isinstance(ours, Answerer)
    question, context = "who sat", "the cat sat on a mat ."
    encoded = ours.need_tokenizer().inputs([(question, context)])[0]
    with torch.no_grad():
        question_and_before = [
            i < max(k for k, t in enumerate(encoded.texts) if t == 0) + 1 for i in range(len(encoded.ids))
        ]
        extra_inputs = (
            {"token_type_ids": torch.tensor([encoded.token_types])}
            if family == "Bert"
            else {"global_attention_mask": torch.tensor([question_and_before]).long()}
        )
        out = model(torch.tensor([encoded.ids]), **extra_inputs)
    inside = [i for i, segment in enumerate(encoded.texts) if segment == 1]
    expected = best_spans(out.start_logits[0, inside], out.end_logits[0, inside], 3)
    offsets = [encoded.offsets[i] for i in inside]
    answers = ours.answer(question, context, top_k=5, longest=3)
    for (p, i, j), answer in zip(expected[:5], answers, strict=True):
        assert answer.probability == pytest.approx(p, rel=1e-3)
        assert (answer.start, answer.end) == (offsets[i][0], offsets[j][1])  # type: ignore[index]
        assert answer.text == context[answer.start : answer.end]


def test_a_long_context_is_read_in_windows(tmp_path: Path) -> None:
    path, _ = bert(tmp_path / "m", "ForQuestionAnswering")
    ours = headway.load(path, task="answer")
    question, context = "who sat", " ".join(WORDS[i] for i in [0, 1, 2, 3, 4, 5, 6, 7, 8] * 6)
    pair = ours.need_tokenizer().inputs([(question, context)])[0]
    parts = windows(pair, 24, 7)
    assert all(len(part.ids) <= 24 and part.texts.count(0) == 2 for part in parts)
    covered = {
        place
        for part in parts
        for place, segment in zip(part.offsets, part.texts, strict=True)
        if segment == 1
    }
    assert covered == {p for p, segment in zip(pair.offsets, pair.texts, strict=True) if segment == 1}
    best = ours.answer(question, context, top_k=3, stride=7, batch_size=2)
    assert len({(answer.start, answer.end) for answer in best}) == 3
    begins, ends, places = [], [], []
    for part in parts:
        ids, types = torch.tensor([part.ids]), torch.tensor([part.token_types])
        out = ours.model(ids, types=types)[0].detach()
        inside = [i for i, segment in enumerate(part.texts) if segment == 1]
        begins.append(out[inside, 0])
        ends.append(out[inside, 1])
        places.append([part.offsets[i] for i in inside])
    starts = torch.cat(begins).double().log_softmax(0).split([len(b) for b in begins])
    stops = torch.cat(ends).double().log_softmax(0).split([len(b) for b in begins])
    score, place = max(
        (float(s[i] + e[j]), (at[i][0], at[j][1]))  # type: ignore[index]
        for s, e, at in zip(starts, stops, places, strict=True)
        for i in range(len(s))
        for j in range(i, len(s))
    )
    assert (best[0].start, best[0].end) == place
    assert best[0].probability == pytest.approx(float(torch.tensor(score).exp()), rel=1e-4)
    with pytest.raises(ConfigError, match="stride 128 skips tokens between the windows"):
        ours.answer(question, context)
    with pytest.raises(ConfigError, match="leaves no room"):
        ours.answer("the cat " * 12, context)
    with pytest.raises(DataError, match="the context has no tokens"):
        ours.answer(question, "")


QUESTION, CONTEXT = "who sat", "the cat sat on a mat . the dog ran home"
LONG = " ".join(WORDS[i] for i in [0, 1, 2, 3, 4, 5, 6, 7, 8] * 6)


def read_by_transformers(ours: Answerer, model: Any, context: str) -> list[tuple[Any, Tensor]]:
    """Returns each window with the logits of the model of transformers, [T, 2]."""
    pair = ours.need_tokenizer().inputs([(QUESTION, context)])[0]
    results = []
    for part in windows(pair, 24, 7):
        with torch.no_grad():
            out = model(torch.tensor([part.ids]), token_type_ids=torch.tensor([part.token_types]))
        results.append((part, torch.stack([out.start_logits[0], out.end_logits[0]], 1).double()))
    return results


@pytest.mark.parametrize("context", [CONTEXT, LONG], ids=["one window", "windows"])
def test_no_answer_stands_where_the_threshold_says(context: str, tmp_path: Path) -> None:
    """Against every span of every window, one by one, with "no answer" at each of the first six ranks."""
    path, model = bert(tmp_path / "m", "ForQuestionAnswering")
    ours = headway.load(path, task="answer")
    results = read_by_transformers(ours, model, context)
    assert (len(results) > 1) == (context is LONG)
    null = min((logits[0] for _, logits in results), key=lambda both: float(both.sum()))
    score: dict[tuple[int, int], float] = {}
    for part, logits in results:
        inside = [i for i, segment in enumerate(part.texts) if segment == 1]
        for a in inside:
            for b in inside:
                if a <= b < a + 4:
                    place = (part.offsets[a][0], part.offsets[b][1])
                    score[place] = max(score.get(place, -math.inf), float(logits[a, 0] + logits[b, 1]))
    ranked = sorted(score, key=lambda place: -score[place])
    context_logits = [logits[[segment == 1 for segment in part.texts]] for part, logits in results]
    norm = float(torch.cat([*context_logits, null[None]]).logsumexp(0).sum())
    s_null = float(null.sum())
    plain = ours.answer(QUESTION, context, top_k=7, longest=4, stride=7)
    for k in range(6):
        between = (score[ranked[k]] + score[ranked[k - 1]]) / 2 if k else score[ranked[0]] + 1
        answers = ours.answer(QUESTION, context, top_k=7, longest=4, stride=7, no_answer=between - s_null)
        assert [answer.text == "" for answer in answers] == [i == k for i in range(7)]
        assert (answers[k].start, answers[k].end) == (0, 0)
        assert answers[k].probability == pytest.approx(math.exp(s_null - norm), rel=1e-4)
        spans = answers[:k] + answers[k + 1 :]
        assert [(answer.start, answer.end) for answer in spans] == ranked[:6]
        assert [(answer.start, answer.end, answer.text) for answer in spans] == [
            (answer.start, answer.end, answer.text) for answer in plain[:6]
        ]
        expected = [math.exp(score[place] - norm) for place in ranked[:6]]
        assert [answer.probability for answer in spans] == pytest.approx(expected, rel=1e-4)
        difference = math.log(answers[k].probability) - math.log(spans[0].probability)
        assert difference == pytest.approx(s_null - score[ranked[0]], abs=1e-3)
    only = ours.answer(QUESTION, context, longest=4, stride=7, no_answer=math.inf)
    assert [answer.text for answer in only] == [""]
    never = ours.answer(QUESTION, context, top_k=7, longest=4, stride=7, no_answer=-math.inf)
    assert all(answer.text for answer in never)


def test_no_answer_has_the_probability_of_transformers(tmp_path: Path) -> None:
    """The rule of `handle_impossible_answer` in the pipelines of transformers, whose threshold is 0."""
    path, model = bert(tmp_path / "m", "ForQuestionAnswering")
    ours = headway.load(path, task="answer")
    ((part, logits),) = read_by_transformers(ours, model, CONTEXT)
    barred = np.array([[0 if segment == 1 or i == 0 else 1 for i, segment in enumerate(part.texts)]])
    begin, end = (logits[None, :, side].numpy() for side in (0, 1))
    starts, ends, scores, null = select_starts_ends(
        begin, end, barred, None, top_k=999, handle_impossible_answer=True, max_answer_len=4
    )
    kept = [(float(p), a, b) for p, a, b in zip(scores, starts, ends, strict=True) if p > 0]
    theirs = [(p, part.offsets[a][0], part.offsets[b][1]) for p, a, b in kept]
    theirs = sorted([*theirs, (null, 0, 0)], reverse=True)
    answers = ours.answer(QUESTION, CONTEXT, top_k=999, longest=4, no_answer=0.0)
    assert [(answer.start, answer.end) for answer in answers] == [(a, b) for _, a, b in theirs]
    assert [answer.probability for answer in answers] == pytest.approx([p for p, _, _ in theirs], rel=1e-4)


def test_no_answer_that_cannot_be_weighed(tmp_path: Path) -> None:
    ours = headway.load(bert(tmp_path / "m", "ForQuestionAnswering")[0], task="answer")
    with pytest.raises(ConfigError, match=r"no_answer must be a number, .*, got nan"):
        ours.answer(QUESTION, CONTEXT, no_answer=math.nan)
    config = tmp_path / "m" / "tokenizer.json"
    ours.need_tokenizer().save(tmp_path / "bare")
    bare = json.loads((tmp_path / "bare" / config.name).read_text())
    bare["post_processor"] = None
    (tmp_path / "bare" / config.name).write_text(json.dumps(bare))
    plain = Answerer(ours.model, headway.text.Tokenizer.load(tmp_path / "bare"))
    assert plain.answer(QUESTION, CONTEXT)
    with pytest.raises(ConfigError, match="adds none; leave no_answer out"):
        plain.answer(QUESTION, CONTEXT, no_answer=0.0)
