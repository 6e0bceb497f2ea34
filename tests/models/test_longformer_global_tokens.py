"""Longformer's claims, row 97: which tokens of a task are global."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from headway.models import build, mark_global
from headway.models.head import Task
from headway.patterns import Global, Window
from headway.text import Tokenizer
from headway.tokens import Tokens
from tests.models.test_encoder import encoder


def test_row_97_the_first_token_for_classification_wherever_padding_stands() -> None:
    pooled: tuple[Task, ...] = ("classify", "embed")
    for task in pooled:
        marked = mark_global(Tokens.from_lengths([5, 3], side="left"), task)
        assert marked.globals.tolist() == [[True] + [False] * 4, [False, False, True, False, False]]
    unpooled: tuple[Task, ...] = ("tag", "masked-lm", "states")
    for task in unpooled:
        assert mark_global(Tokens.range(4), task).is_global is None


BERT_STYLE = [[None, 0, 0, None, 1, 1, 1, None], [None, 0, 0, 0, None, 1, None]]  # [CLS] q [SEP] text [SEP]
ROBERTA_STYLE = [[None, 0, None, None, 1, 1, None]]  # <s> q </s></s> text </s>


def test_row_97_the_question_for_answers() -> None:
    right = mark_global(Tokens.from_lengths([8, 7]), "answer", BERT_STYLE)
    assert right.globals.int().tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]]
    left = mark_global(Tokens.from_lengths([8, 7], side="left"), "answer", BERT_STYLE)
    assert left.globals.int().tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0, 0]]
    roberta = mark_global(Tokens.range(7).with_global([6]), "answer", ROBERTA_STYLE)
    assert roberta.globals.int().tolist() == [[1, 1, 0, 0, 0, 0, 1]]


def test_row_97_the_question_is_what_transformers_takes_for_it() -> None:
    from transformers.models.longformer.modeling_longformer import _compute_global_attention_mask

    sep, texts = 2, []
    row = torch.full((3, 12), 9)
    for i, (question, text) in enumerate([(3, 5), (1, 7), (6, 2)]):
        ends = [question + 1, question + 2, question + text + 3]
        row[i, ends] = sep
        texts.append([None, *[0] * question, None, None, *[1] * text, None])
    marked = mark_global(Tokens.range(12), "answer", texts)
    reference: Any = _compute_global_attention_mask
    assert torch.equal(marked.globals, reference(row, sep))


@pytest.mark.parametrize(("style", "special"), [("Bert", ("[CLS]", "[SEP]")), ("Roberta", ("<s>", "</s>"))])
def test_row_97_pairs_as_a_tokenizer_encodes_them(style: str, special: tuple[str, str]) -> None:
    words = {word: i for i, word in enumerate([*special, "[UNK]", "who", "was", "here", "a", "cat"])}
    backend = Backend(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(special[1], 1), (special[0], 0)]
    backend.post_processor = getattr(processors, f"{style}Processing")(*ends)
    inputs = Tokenizer(backend).inputs([("who was here", "a cat"), ("who", "a cat was here")])
    tokens = Tokens.from_lengths([len(pair.ids) for pair in inputs])
    glob = mark_global(tokens, "answer", [pair.texts for pair in inputs]).globals
    word_of = {i: word for word, i in words.items()}
    marked_words = [
        [word_of[i] for i, marked in zip(pair.ids, row, strict=False) if marked]
        for pair, row in zip(inputs, glob.tolist(), strict=True)
    ]
    assert marked_words == [[special[0], "who", "was", "here"], [special[0], "who"]]


def test_packed_texts_are_marked_as_rows_are() -> None:
    texts = [[None, 0, 0, None, 1, None], [None, 0, None, 1, 1, 1, None]]
    lengths = [len(row) for row in texts]
    rows, packed = Tokens.from_lengths(lengths), Tokens.packed(lengths)
    for task, given_texts in (("answer", texts), ("classify", None), ("tag", None)):
        by_row = mark_global(rows, task, given_texts).globals.expand(2, -1)  # type: ignore[arg-type]
        marked = mark_global(packed, task, given_texts).globals  # type: ignore[arg-type]
        assert marked[0].equal(torch.cat([row[:n] for row, n in zip(by_row, lengths, strict=True)]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mark_global(Tokens.range(3), "lm"), "an encoder has no task 'lm'"),
        (lambda: mark_global(Tokens.range(3), "anser"), "did you mean"),  # type: ignore[arg-type]
        (lambda: mark_global(Tokens.range(3), "answer"), "needs texts="),
        (lambda: mark_global(Tokens.range(3), "classify", [[0, 1, 1]]), "drop texts="),
        (lambda: mark_global(Tokens.packed([2, 1]), "answer", [[0, 1]]), "texts has 1 rows, but tokens have"),
        (lambda: mark_global(Tokens.range(8), "answer", [[None, 0, 1]]), "row 0 has 8 tokens, but texts has 3"),
        (lambda: mark_global(Tokens.from_lengths([3, 3]), "answer", [[0, 0, 1]]), "texts has 1 rows, but tokens have"),
        (lambda: mark_global(Tokens.range(2), "answer", [[0, None]]), "row 0 is not a pair of question and text"),
    ],
)  # fmt: skip
def test_row_97_what_marks_nothing_is_refused(call: Callable[[], Tokens], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("marked", [[[0], [0, 5]], [[], []]], ids=str)
def test_row_96_projections_of_global_tokens_are_trained_where_there_are_some(
    marked: list[list[int]],
) -> None:
    spec = encoder("longformer", patterns=Window.around(1) | Global())
    model = build(spec, seed=4)
    model(torch.zeros(2, 7, dtype=torch.int64), tokens=Tokens.range(7).with_global(marked)).sum().backward()
    layer = model.model.layers[0].self_attn  # type: ignore[union-attr,index]
    assert (layer.q_global_proj.weight.grad is not None) == any(marked)  # type: ignore[union-attr]
