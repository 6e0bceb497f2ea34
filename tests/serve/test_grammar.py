"""Texts that follow grammars: in Python, with any tokenizer, with drafts, preempted, and in a forked process."""

import json
import os
import signal
import time
from functools import cache
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.generate import Engine, GenerationConfig, NgramDraft, Reader, Sampling
from headway.generate.drafts import ModelDraft
from headway.generate.requests import make_requests
from headway.generate.sequences import SampledText
from headway.serve.grammar import Grammars, check_schema
from tests.serve.grammars import GRAMMARS, LM, SCHEMA
from tests.text.conftest import sentencepiece, word_piece

KEYS = st.sampled_from(["a", "name", "größe", "x y", '"', "</s>"])


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Returns a strategy for small schemas whose texts are short."""
    leaves = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(
            lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
            st.integers(-99, 99),
            st.integers(0, 99),
        ),
        st.integers(0, 4).map(lambda most: {"type": "string", "maxLength": most}),
        st.lists(st.one_of(st.integers(-9, 9), st.text(max_size=3)), min_size=1, max_size=3).map(
            lambda values: {"enum": values}
        ),
    )

    def grown(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        return st.one_of(
            st.dictionaries(KEYS, inner, max_size=3).flatmap(
                lambda properties: st.sets(st.sampled_from(sorted(properties) or [""])).map(
                    lambda needed: {
                        "type": "object",
                        "properties": properties,
                        "required": sorted(needed & properties.keys()),
                        "additionalProperties": False,
                    }
                )
            ),
            st.builds(
                lambda items, most: {"type": "array", "items": items, "maxItems": most},
                inner,
                st.integers(0, 2),
            ),
            st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
        )

    return st.recursive(leaves, grown, max_leaves=5)


def test_a_random_model_writes_json_of_any_schema() -> None:
    """A text may be cut in the middle, but few are."""
    ended: list[bool] = []

    @settings(max_examples=40)
    @given(schemas(), st.integers(0, 99))
    def write_one(schema: dict[str, Any], seed: int) -> None:
        grammar = GRAMMARS.compile("json", schema)
        generation = LM.generate("hello", grammar=grammar, temperature=1.5, seed=seed, max_new_tokens=300)
        assert generation.finish_reason in ("stop", "eos", "length")
        ended.append(generation.finish_reason != "length")
        if ended[-1]:
            jsonschema.validate(json.loads(generation.text), schema)

    write_one()
    assert sum(ended) > 0.9 * len(ended)


@pytest.mark.parametrize(
    ("kind", "source", "texts"),
    [
        ("regex", "[ab]{2}c?", {"aa", "ab", "ba", "bb", "aac", "abc", "bac", "bbc"}),
        ("choice", ['ja "', "nein\n", "猫"], {'ja "', "nein\n", "猫"}),
        ("grammar", 'root ::= ("x" | "y") "z"', {"xz", "yz"}),
        ("grammar", 'start: A "!"?\nA: /[01]/', {"0", "1", "0!", "1!"}),
    ],
)
def test_every_text_of_a_grammar_is_written_and_no_other(kind: str, source: Any, texts: set[str]) -> None:
    grammar = GRAMMARS.compile(kind, source)
    generations = [
        LM.generate("so", grammar=grammar, temperature=3.0, seed=seed, max_new_tokens=20)
        for seed in range(60)
    ]
    assert {generation.text for generation in generations} == texts


@pytest.mark.parametrize("tokenizer", [sentencepiece()], ids=["sentencepiece"])
def test_tokens_of_other_tokenizers_are_their_bytes(tokenizer: Any) -> None:
    """A token is allowed only if its bytes continue a text of the grammar."""
    size = tokenizer.vocab_size
    state = Grammars(tokenizer, size + 3, [2]).compile("regex", "( the|cat) ?a").copy()
    table = tokenizer.table.bytes_of
    written, sentences = b"", (b" the a", b" thea", b"cat a", b"cata")
    while not state.ended:
        fits = [
            i
            for i in range(3, size)
            if table[i] and any(sentence.startswith(written + table[i]) for sentence in sentences)
        ]
        allowed = state.allowed().nonzero().flatten().tolist()
        assert allowed
        assert set(allowed) <= set(fits)
        state.advance(allowed[-1])
        written += table[allowed[-1]]
    assert written in sentences
    with pytest.raises(ConfigError, match="words, not bytes"):
        Grammars(word_piece(), 12, [2])


preempt = Engine._preempt


@cache
def alone(seed: int) -> tuple[int, ...]:
    return tuple(write([seed])[0].ids)


def write(seeds: list[int], **options: Any) -> list[SampledText]:
    """Returns texts of one grammar, generated in one batch."""
    texts = []
    for seed in seeds:
        config = GenerationConfig(
            max_new_tokens=70, sampling=Sampling(temperature=1.0), seed=seed, eos=LM.eos,
            grammar=GRAMMARS.compile("json", SCHEMA),
        )  # fmt: skip
        (request,) = make_requests([LM.need_tokenizer().encode("go " * 20)], config, LM.spec)
        texts.append(SampledText(request, LM.tokenizer))
    draft = options.pop("draft", None)
    engine = Engine(Reader(LM.model, slack=8 if draft else 0, **options), draft=draft)
    for _ in engine.run(texts):
        pass
    return texts


@pytest.mark.parametrize("draft", [NgramDraft(), ModelDraft(model=LM.model)], ids=["ngram", "model"])
def test_drafts_change_no_text(draft: Any) -> None:
    texts = write([1, 2, 3], draft=draft)
    assert [tuple(text.ids) for text in texts] == [alone(seed) for seed in (1, 2, 3)]
    assert sum(text.accepted for text in texts) > 0


def test_neither_do_neighbours_and_texts_that_are_sent_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    monkeypatch.setattr(Engine, "_preempt", lambda self: sent.append(1) or preempt(self))
    texts = write([1, 2, 3, 4], budget=3 * 40_000)
    assert sent
    assert [tuple(text.ids) for text in texts] == [alone(seed) for seed in (1, 2, 3, 4)]


def test_probabilities_are_those_of_the_model() -> None:
    grammar = GRAMMARS.compile("json", SCHEMA)
    generation = LM.generate("go", grammar=grammar, max_new_tokens=30, log_probs=True)
    assert not torch.tensor(generation.log_probs).isinf().any()
    unconstrained = LM.generate(
        "go", max_new_tokens=1, log_probs=True, top_log_probs=1, bias={generation.ids[0]: 100.0}
    )
    assert generation.log_probs[0] == pytest.approx(unconstrained.log_probs[0], abs=1e-5)


def test_a_forked_process_writes_the_same_text() -> None:
    """A forked process has none of its parent's threads."""
    write([1])
    child = os.fork()
    if child == 0:
        os._exit(tuple(write([1])[0].ids) != alone(1))
    deadline = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
    assert ended == (child, 0)


@pytest.mark.parametrize("step", [2000, 2000.0, 0.25, 10_000])
def test_a_step_counts_as_its_digits(step: float) -> None:
    check_schema({"items": {"multipleOf": step}})
    with pytest.raises(ConfigError, match="the least common multiple of"):
        check_schema({"allOf": [{"multipleOf": step}, {"multipleOf": 10_007}]})


def test_steps_that_are_no_numbers_are_left_to_the_compiler_and_huge_ones_are_refused() -> None:
    check_schema({"items": [{"multipleOf": float("inf")}, {"multipleOf": True}, {"multipleOf": "2"}]})
    with pytest.raises(ConfigError, match=r"multipleOf .*: the least common multiple"):
        check_schema({"allOf": [{"multipleOf": 10**4000 + i} for i in range(3)]})


def test_beams_and_grammars_are_one_or_the_other() -> None:
    with pytest.raises(ConfigError, match="beams"):
        LM.generate("go", grammar=GRAMMARS.compile("regex", "a"), beams=2)
