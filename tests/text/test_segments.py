"""Conversations as segments: every answer is trained, nothing else, and generation reads the same ids before it."""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headway.errors import DataError
from headway.text.chat import Message
from headway.text.segments import chat_segments, completion_segments
from tests.text.conftest import byte_level, sentencepiece
from tests.text.segments import KINDS, MARKED, OWN, comparable, expected, prepared
from tests.text.templates import SAID, conversations, found_templates, in_parts

FEW = OWN | found_templates(all_of_them=False)


def check(kind: str, name: str, chat: list[dict[str, Any]], all_of_them: bool) -> None:
    tokenizer, wants_parts, stops = prepared(kind, all_of_them)[1][name]
    chat = in_parts(chat) if wants_parts else chat
    try:
        reference = expected(tokenizer, chat, stops)
    except Exception as error:  # errors of jinja, and of the template itself
        assume("raise_exception" not in str(error))
        return
    same = partial(comparable, kind, tokenizer)
    try:
        segments = chat_segments(tokenizer, chat, stop=stops)
    except DataError:
        if reference is not None and all(reference[1]):
            raise
        return
    assert reference is not None
    text, answers = reference
    ids, trained = segments.ids, [turn > 0 for turn in segments.turns]
    assert same(tokenizer.decode(ids, special=True)) == same(text)
    runs = [
        [i for i, _ in run]
        for is_trained, run in groupby(zip(ids, trained, strict=True), lambda x: x[1])
        if is_trained
    ]
    assert [same(tokenizer.decode(run, special=True)) for run in runs] == [same(answer) for answer in answers]
    assert all(run[-1] in stops for run in runs)
    if segments.otherwise or segments.unmarked or len(answers) != sum(m["role"] == "assistant" for m in chat):
        assert MARKED.search(str(tokenizer.chat_template and tokenizer.chat_template.source))
        return
    begins = [i for i, is_trained in enumerate(trained) if is_trained and not (i and trained[i - 1])]
    assistant_turns = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    for begin, i in zip(begins, assistant_turns, strict=True):
        assert tokenizer.render_chat(chat[:i]) == ids[:begin]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("name", FEW)
@settings(max_examples=40)
@given(chat=conversations())
def test_answers_are_trained_and_nothing_else(kind: str, name: str, chat: list[dict[str, Any]]) -> None:
    """The trained ids decode to the answers with their stop tokens, all ids to the rendering; the ids before an answer
    are those that generation reads; control tokens and template syntax in messages stay text."""
    check(kind, name, chat, False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_conversations_over_all_templates(kind: str) -> None:
    @settings(max_examples=2000)
    @given(st.sampled_from([*prepared(kind, True)[1]]), conversations())
    def law(name: str, chat: list[dict[str, Any]]) -> None:
        check(kind, name, chat, True)

    law()


HI = {"role": "user", "content": "the cat"}
YO = {"role": "assistant", "content": "sat on"}
MARKED_TURNS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ eos_token }}\n{% endgeneration %}{% else %}<|user|>{{ m.content }}<|reply|>{% endif %}{% endfor %}"
)


def segments_of(
    template: str, chat: Sequence[Message], stop: int = 1, **options: Any
) -> list[tuple[str, bool]]:
    tokenizer = byte_level().with_chat_template(template)
    segments = chat_segments(tokenizer, chat, stop={stop}, **options)
    runs = groupby(zip(segments.ids, segments.turns, strict=True), lambda x: x[1] > 0)
    return [(tokenizer.decode([i for i, _ in run], special=True), trained) for trained, run in runs]


def test_what_is_trained() -> None:
    """Answers are trained up to their stop token, and only those of the chosen messages."""
    chat = [HI, YO, HI, YO]
    before, answer, after = "<|begin|><|user|>the cat<|reply|>", "sat on<|end|>", ("\n", False)
    again = "\n<|user|>the cat<|reply|>"
    each = [(before, False), (answer, True), (again, False), (answer, True), after]
    assert segments_of(MARKED_TURNS, chat) == each
    last = [(before + answer + again, False), (answer, True), after]
    assert segments_of(MARKED_TURNS, chat, train_on="last") == last
    weighted = [HI, {**YO, "weight": 0}, HI, {**YO, "weight": 1}]
    assert segments_of(MARKED_TURNS, weighted) == last
    assert [t for _, t in segments_of(MARKED_TURNS, weighted[:3])] == [False]


def test_an_answer_in_several_marks_is_one() -> None:
    apart = MARKED_TURNS.replace("{{ eos_token }}", "{% endgeneration %}{% generation %}{{ eos_token }}")
    assert segments_of(apart, [HI, YO]) == segments_of(MARKED_TURNS, [HI, YO])


@pytest.mark.parametrize(
    ("template", "chat", "error"),
    [
        (MARKED_TURNS.replace("{{ eos_token }}", "."), [HI, YO],
         r"ends with 'Ċ', at which generation would not stop \(stop tokens: '<\|end\|>'\); use a template that "
         "ends answers with one of them, or set stop"),
        (MARKED_TURNS.replace("\n", "x"), [HI, YO], "an answer ends with 'x', at which generation would not stop"),
        (MARKED_TURNS.replace("{{ m.content }}{{ eos_token }}\n", ""), [HI, YO], "an answer is empty, at which"),
        ("{% generation %}{% generation %}{% endgeneration %}{% endgeneration %}", [HI], "marks are nested"),
        ("{{ messages | length }}{{ messages[-1].content }}{{ eos_token }}", [HI, YO],
         r"chat template '\{\{ messages \| length \}\}.*': its text for messages 0 to 1 is not the beginning "
         r"of its text for all 2, so that the answers cannot be located; use a template with \{% generation %\}"),
        (MARKED_TURNS, [{**YO, "weight": 0}, YO], "a message has weight 0, but the chat template marks 1 answers for"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(template: str, chat: Sequence[Message], error: str) -> None:
    with pytest.raises(DataError, match=error):
        segments_of(template, chat)


def test_answers_that_generation_would_begin_otherwise_are_counted() -> None:
    """Qwen 3 begins answers with a block that its generation prompt lacks; some templates mark the last answer only."""
    thinks = MARKED_TURNS.replace("{% generation %}", "<think></think>{% generation %}")
    tokenizer = byte_level().with_chat_template(thinks)
    segments = chat_segments(tokenizer, [HI, YO, HI, YO], stop={1})
    assert (segments.answers, segments.otherwise, segments.unmarked) == (2, 2, 0)
    last = MARKED_TURNS.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    segments = chat_segments(tokenizer.with_chat_template(last), [HI, YO, HI, YO], stop={1})
    assert (segments.answers, segments.otherwise, segments.unmarked) == (1, 0, 1)


def test_text_that_goes_on_has_the_spaces_of_the_template_and_no_others() -> None:
    """If an answer follows text, SentencePiece puts no space of its own before it, and takes none away around it."""
    tokenizer = sentencepiece().with_chat_template("llama2")
    segments = chat_segments(tokenizer, [HI, YO, HI], stop={2})
    assert (
        tokenizer.decode(segments.ids, special=True)
        == "<s> [INST] the cat [/INST] sat on </s><s> [INST] the cat [/INST]"
    )
    spaced = (
        "A: {% for m in messages %}{% if m.role == 'user' %}{{ m.content }} B: {% else %}{% generation %}"
    )
    spaced += "{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    tokenizer = KINDS["squeezes"]().with_chat_template(spaced)
    segments = chat_segments(tokenizer, [HI, YO], stop={2})
    assert tokenizer.decode(segments.ids, special=True) == "A: the cat B: sat on</s>"
    assert tokenizer.render_chat([HI]) == segments.ids[: segments.turns.index(1)]


@given(st.tuples(SAID, SAID))
def test_a_completion_goes_on_with_its_prompt(texts: tuple[str, str]) -> None:
    """Both decode as one text, and the prompt's ids are those that generation starts from."""
    for kind in ("byte_level", "sentencepiece"):
        tokenizer = KINDS[kind]()
        segments = completion_segments(tokenizer, *texts, stop={tokenizer.need("eos")})
        prompt = tokenizer.encode(texts[0], eos=False)
        assert segments.ids[: len(prompt)] == prompt
        assert segments.turns == [0] * len(prompt) + [1] * (len(segments.ids) - len(prompt))
        assert tokenizer.decode(segments.ids) == tokenizer.decode(tokenizer.encode("".join(texts)))
    with pytest.raises(DataError, match=r"stop tokens: none"):
        completion_segments(tokenizer, *texts, stop=())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte_level", "llama3"])
def test_masks_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """The ids and which of them are trained, over all templates with marks; what follows the stop token is not
    trained."""
    from transformers import AutoTokenizer

    straddling = compared = 0
    chat = [HI, YO, {**HI, "content": "and the dog? 猫"}, {**YO, "content": "the\n dog 🙂 sat"}]
    tokenizer, by_template = prepared(kind, True)
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for copy, wants_parts, stops in by_template.values():
        assert copy.chat_template is not None
        if not (MARKED.search(copy.chat_template.source) and stops):
            continue
        messages = in_parts(chat) if wants_parts else chat
        expected = theirs.apply_chat_template(
            messages,
            chat_template=copy.chat_template.source,
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
        ours = chat_segments(copy, messages, stop=stops)
        if ours.ids != expected["input_ids"]:
            straddling += 1
            assert copy.decode(ours.ids, special=True) == copy.decode(expected["input_ids"], special=True)
            continue
        compared += 1
        pieces = copy.encode_pieces(copy.chat_pieces(messages))
        answers = [k % 2 for k, ids in enumerate(pieces) for _ in ids]
        assert answers == [int(x) for x in expected["assistant_masks"]]
        assert all(answer for answer, turn in zip(answers, ours.turns, strict=True) if turn)
    assert compared >= 25
    assert straddling <= 3
