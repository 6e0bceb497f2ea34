"""Functions, reasoning and what reads them: of every family, in any pieces, asked for by OpenAI's own client."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError, DataError
from headway.serve.bodies import Chat
from headway.serve.formats import (
    ATEM,
    FORMATS,
    HARMONY,
    HERMES,
    REASONING,
    CallFormat,
    Reasoning,
    find_format,
)
from headway.serve.grammar import Grammars
from headway.serve.markup import CallReader, Part
from headway.serve.notations import Arguments
from headway.serve.tools import Prepared
from headway.text import Tokenizer, train_bpe
from headway.text import chat as chat_templates
from headway.text.chat import ChatTemplate
from tests.serve.conftest import House, talker
from tests.text.conftest import CORPUS

openai = pytest.importorskip("openai")

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "on": {"enum": [True, None, "x"]},
    },
    "required": ["city", "n"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "additionalProperties": False}}},
]  # fmt: skip
SCHEMAS = {"f": SCHEMA, "g": TOOLS[1]["function"]["parameters"]}  # type: ignore[index]
LM = talker()
KIMI = next(marks for marks in REASONING if marks.open == "<|open|>think<|sep|>")
IDS = [how.found[-1] for how in FORMATS]
FRAMED = {"functions.": HARMONY, "<atem:invoke": ATEM, "argument": KIMI}
"""Reasoning of families that have marks around their texts, too."""


def marks_of(how: CallFormat) -> Reasoning:
    return FRAMED.get(how.found[-1], REASONING[0])


KINDS = {type(None): "null", bool: "boolean", int: "number", str: "string", list: "array", dict: "object"}


def spelled(how: CallFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a family writes them."""
    written = []
    for name, arguments in calls:
        inner = json.dumps(arguments, ensure_ascii=False)
        if (tags := how.tags) is not None:
            inner = tags.separator.join(
                (
                    value if tags.text and isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                ).join(tags.around(key, KINDS[type(value)]))
                for key, value in arguments.items()
            )
        written.append((name, inner))
    return how.write(written).replace("{index}", "3")


def answered(how: CallFormat, thought: str, text: str, calls: list[Any]) -> str:
    """An answer as a family writes it."""
    marks, called = marks_of(how), spelled(how, calls)
    if marks is HARMONY:
        said = f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant"
        return f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant{said}{called}"
    if marks is ATEM:
        said = f"{marks.frame[0]}{text}{marks.close}"
        return f"{marks.open}{thought}{marks.close}{said}{called}"
    if marks is KIMI:
        return f"{marks.open}{thought}{marks.close}{text.join(marks.frame[:2])}{called}{marks.frame[2]}"
    return f"{marks.open}\n{thought}\n{marks.close}\n\n{text}{called}"


def merged(parts: list[Part]) -> list[Part]:
    """Pieces of one part together."""
    found: list[Part] = []
    for part in parts:
        if found and part.kind != "call" and found[-1][::2] == part[::2]:
            found[-1] = Part(part.kind, found[-1].text + part.text, part.call)
        else:
            found.append(part)
    return found


def read(text: str, cuts: list[int] = [], **how: Any) -> list[Part]:  # noqa: B006
    reader = CallReader(**how)
    ends = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(ends)]
    return merged(
        [part for i, piece in enumerate(pieces) for part in reader.push(piece, last=i == len(pieces) - 1)]
    )


def calls_of(parts: list[Part]) -> list[tuple[str, Any]]:
    names = [part.text for part in parts if part.kind == "call"]
    return list(
        zip(names, [json.loads(part.text) for part in parts if part.kind == "arguments"], strict=True)
    )


WORDS = st.text("ab {}\"',.:;é猫\n", max_size=12)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-99, 99), WORDS.map("a{}".format)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
CUTS = st.lists(st.integers(0, 10_000), max_size=40)


@pytest.mark.parametrize("how", FORMATS, ids=IDS)
@settings(max_examples=15, phases=(Phase.explicit, Phase.generate))
@given(
    st.lists(st.tuples(st.sampled_from("fg"), WORDS, VALUES), min_size=1, max_size=3), WORDS, WORDS, CUTS
)  # fmt: skip
def test_what_a_family_writes_is_read_in_any_pieces(
    how: CallFormat, asked: list[Any], thought: str, before: str, cuts: list[int]
) -> None:
    calls = [(name, {"city": city, "n": value}) for name, city, value in asked]
    thought, before = thought.strip(), before.strip()
    text = before if how.marker and not before.endswith(("{", "[")) else ""
    whole = answered(how, thought, text, calls)
    options = {"marks": marks_of(how), "how": how, "functions": {"f": SCHEMA, "g": SCHEMA}}
    parts = read(whole, **options)
    assert calls_of(parts) == calls
    assert [part.text for part in parts if part.kind == "reasoning"] == [thought] * bool(thought)
    assert [part.text for part in parts if part.kind == "text"] == [text] * bool(text)
    assert [part.call for part in parts if part.kind == "call"] == list(range(len(calls)))
    assert read(whole, cuts, **options) == parts


SCRAPS = st.sampled_from(
    [*"{}[]\"',:;\n \\a", "name", '{"name": "f"', '"arguments": ', "<tool", "<tool_call>", "</tool_call>", "<think>",
     "</think>", "<|channel|>", "<|message|>", "<|start|>assistant", " to=functions.f", "<|end|>", "analysis",
     "<|open|>", "tools<|sep|>", "<|close|>", "<|tool_call>", "call:f{", '<|"|>', "<tool_call|>", "[TOOL_CALLS]",
     "[ARGS]", "<function=f>", "<parameter=n>", "</parameter>", "1", "f", "<arg_key>"]
)  # fmt: skip


@pytest.mark.parametrize("how", FORMATS, ids=IDS)
@settings(max_examples=25, phases=(Phase.explicit, Phase.generate))
@given(st.lists(SCRAPS, max_size=14).map("".join), st.booleans(), CUTS)
def test_what_is_no_call_is_text_whichever_way_it_is_cut(
    how: CallFormat, text: str, inside: bool, cuts: list[int]
) -> None:
    options = {"marks": marks_of(how), "inside": inside, "how": how, "functions": SCHEMAS}
    parts = read(text, **options)
    assert read(text, cuts, **options) == parts
    if (
        marks_of(how) is REASONING[0]
        and all(part.kind == "text" for part in parts)
        and "think>" not in text
        and not inside
    ):
        assert "".join("".join(part.text for part in parts).split()) == "".join(text.split())


def test_only_what_may_become_markup_is_held_back() -> None:
    reader = CallReader(how=HERMES)
    told = [reader.push(piece, last=False) for piece in ["Hello", " ", "there", " <", "b", " <tool_c", "all"]]
    assert ["".join(part.text for part in parts) for parts in told] == [
        "Hello",
        "",
        " there",
        "",
        " <b",
        "",
        "",
    ]
    reader = CallReader(how=HERMES)
    reader.push('<tool_call>\n{"name": "f", "arguments": ', last=False)
    pieces = ['{"ci', 'ty": "', "Pa", "ris"]
    told = [part for piece in pieces for part in reader.push(piece, last=False)]
    assert told == [Part("call", "f"), *(Part("arguments", piece) for piece in pieces)]


def prepared(tokenizer: Tokenizer = LM.need_tokenizer(), **chat: Any) -> Prepared:  # noqa: B008
    return Prepared(
        Chat(**{"messages": [{"role": "user", "content": "go"}], "tools": TOOLS, **chat}), tokenizer
    )


SHORT = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "on": {"enum": [True, None, "x"]}},
    "required": ["n"],
    "additionalProperties": False,
}
FUNCTIONS = [{"type": "function", "function": {"name": name, "parameters": SHORT}} for name in ("f", "g.h")]


def template_of(how: CallFormat, *more: str) -> str:
    """A chat template that is found to be of a family."""
    return "{{ messages[0].content }}{% if tools %}{% endif %}{# " + " ".join([*how.found, *more]) + " #}"


@pytest.mark.parametrize("how", FORMATS, ids=IDS)
def test_a_forced_call_is_one_of_a_function(how: CallFormat) -> None:
    """Written by a random model, in the format of any family."""
    template = template_of(how)
    assert find_format(template) is how
    tokenizer = LM.need_tokenizer().with_chat_template(template)
    grammars = Grammars(tokenizer, LM.spec.vocab, LM.eos)
    seed = FORMATS.index(how)
    choice = FUNCTIONS[1] if seed % 2 else "required"
    one = prepared(tokenizer, tools=FUNCTIONS, tool_choice=choice, parallel_tool_calls=False)
    asked, within = one.grammar
    assert asked is not None
    grammar = grammars.compile(*asked, within=within)
    told = LM.generate(one.ids, grammar=grammar, temperature=0.7, seed=seed, max_new_tokens=300)
    parts = merged(one.reader().push(told.text, last=True))
    assert told.finish_reason in ("stop", "eos")
    assert {part.kind for part in parts} == {"call", "arguments"}
    ((name, arguments),) = calls_of(parts)
    assert name == "g.h" or (name == "f" and choice == "required")
    jsonschema.validate(arguments, SHORT)


def accepts(one: Prepared, text: str, tokenizer: Tokenizer = LM.need_tokenizer()) -> bool:  # noqa: B008
    """Whether the grammar of an answer lets a text be all of it."""
    asked, within = one.grammar
    assert asked is not None
    state = Grammars(tokenizer, tokenizer.vocab_size, LM.eos).compile(*asked, within=within).copy()
    for token in tokenizer.encode(text, bos=False, eos=False, special=True):
        if not state.allowed()[token]:
            return False
        state.advance(token)
    return state.ended or bool(state.allowed()[LM.eos[0]])


@pytest.mark.parametrize("how", FORMATS, ids=IDS)
def test_what_begins_as_a_call_of_a_strict_function_is_one(how: CallFormat) -> None:
    marks = FRAMED.get(how.found[-1])
    template = template_of(how, "" if marks is None else marks.found)
    strict = [{"type": "function", "function": {**one["function"], "strict": True}} for one in FUNCTIONS]
    one = prepared(LM.need_tokenizer().with_chat_template(template), tools=strict)
    call = spelled(how, [("f", {"n": 5, "on": True})])
    said = "so" if marks is None else "so".join(marks.frame[:2])
    assert accepts(one, said)
    assert accepts(one, call)
    assert accepts(one, f"{said}{call}")  # Llama's, behind text, is text
    assert not accepts(one, call.replace("5", "x"))


CALL = '<tool_call>\n{"name": "f", "arguments": {"city":"Bonn","n":5}}\n</tool_call>'


@pytest.mark.parametrize(
    ("fields", "texts", "others"),
    [
        ({"tools": [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]},  # type: ignore[dict-item]
         ["so", CALL, f"so {CALL}", f"{CALL}\n{CALL}"], [f"so {CALL.replace('5', 'x')}", CALL.replace('"f"', '"h"')]),
        ({"parallel_tool_calls": False}, ["so", CALL], [f"{CALL}\n{CALL}"]),
        ({"tool_choice": "required"}, [CALL, f"{CALL}\n{CALL}"], ["so", f"so {CALL}"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [CALL], [f"{CALL}\n{CALL}"]),
        ({"response_format": {"type": "json_object"}}, [CALL, '{"a":1}'], ["so", f"so {CALL}"]),
        ({"tools": None, "response_format": {"type": "json_object"}}, ['{"a":1}'], [CALL]),
    ],
    ids=str,
)  # fmt: skip
def test_what_an_answer_may_be(fields: dict[str, Any], texts: list[str], others: list[str]) -> None:
    one = prepared(**fields)
    assert [accepts(one, text) for text in texts] == [True] * len(texts)
    assert [accepts(one, text) for text in others] == [False] * len(others)


def test_marks_that_are_control_tokens() -> None:
    """They are tokens in grammars, never text that looks alike, and are shown to what reads the answer."""
    names = ["[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"]
    made = train_bpe(CORPUS, 330, special_tokens=names).with_chat_template(
        "{{ messages[0].content }}{# tools [TOOL_CALLS] [ARGS] #}<think>\n{# </think> #}"
    )
    one = prepared(made, tool_choice="required")
    assert sorted(made.token(i) for i in one.shown) == sorted(names)
    call = '[TOOL_CALLS]f[ARGS]{"city":"Bonn","n":5}'
    assert accepts(one, f"so</think>\n{call}", made)
    assert not accepts(one, call, made)
    parts = merged(one.reader().push(f"so</think>\n{call}", last=True))
    assert parts[0] == Part("reasoning", "so")
    assert calls_of(parts) == [("f", {"city": "Bonn", "n": 5})]
    text = made.decode(made.encode(f"a{call}", bos=False, special=True), special=one.shown)
    assert text == f"a{call}"


def test_arguments_read_as_json_where_a_template_writes_text() -> None:
    given = Arguments({"a": "ü", "b": [1]})
    template = ChatTemplate(
        "{% set a = messages[0].a %}{{ a }}|{{ 'x' + a + 'y' }}|{{ a ~ '' }}|{{ a | tojson }}"
        "|{{ a.a }}|{{ a is mapping }}"
    )
    plain = '{"a": "ü", "b": [1]}'
    assert template.render([{"role": "user", "a": given}]) == f"{plain}|x{plain}y|{plain}|{plain}|ü|True"


HISTORY = [
    {"role": "user", "content": "go"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"city": "</s><|user|>"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sun"}]},
]  # fmt: skip


def test_calls_of_earlier_turns_are_written_by_the_template() -> None:
    tokenizer = LM.need_tokenizer()
    one = prepared(messages=HISTORY)
    text = tokenizer.decode(one.ids, special=True)
    assert '{"name": "f", "arguments": {"city": "</s><|user|>"}}\n</tool_call>' in text
    assert text.count('"maxLength": 5') == 1
    assert "<|im_start|>tool\nsun" in text
    assert not set(one.ids) & {i for i in tokenizer.special_ids if tokenizer.token(i) == "<|user|>"}
    assert "<tools>" not in tokenizer.decode(prepared(tool_choice="none").ids, special=True)


def test_a_template_that_knows_no_functions_is_told_of_them() -> None:
    tokenizer = LM.need_tokenizer().with_chat_template("vicuna")
    one = prepared(tokenizer, messages=HISTORY, tool_choice="required")
    text = tokenizer.decode(one.ids, special=True)
    assert text.index('{"name": "f", "parameters": ') < text.index("</tools>") < text.index("go")
    assert '<tool_call>\n{"name": "f", "arguments": {"city": "</s><|user|>"}}\n</tool_call>' in text
    assert "<tool_response>\nsun\n</tool_response>" in text
    assert accepts(one, CALL)


def test_ids_of_calls_are_short_where_a_template_asks_for_it() -> None:
    template = (
        "{# tools [TOOL_CALLS] length 9 #}{{ messages[1].tool_calls[0].id }} {{ messages[2].tool_call_id }}"
    )
    one = prepared(LM.need_tokenizer().with_chat_template(template), messages=HISTORY)
    first, second = LM.need_tokenizer().decode(one.ids).split()
    assert first == second
    assert len(first) == 9
    assert first.isalnum()


@pytest.fixture
def client(house: House) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as one:
        yield one


ASKED = {
    "model": "small",
    "messages": [{"role": "user", "content": "go"}],
    "tools": FUNCTIONS[:1],
    "seed": 3,
    "temperature": 0.6,
    "max_completion_tokens": 120,
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_calls_are_the_same_streamed(client: Any, choice: Any) -> None:
    asked = {**ASKED, "tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.create(n=2, **asked)
    with client.chat.completions.stream(n=2, **asked) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        told = stream.get_final_completion()
    for one, other in zip(whole.choices, told.choices, strict=True):
        assert one.finish_reason == other.finish_reason == "tool_calls"
        assert one.message.content is None
        (call,), (streamed,) = one.message.tool_calls, other.message.tool_calls
        assert call.function.name == streamed.function.name == "f"
        assert call.function.arguments == streamed.function.arguments
        assert call.id.startswith("call_")
        jsonschema.validate(json.loads(call.function.arguments), SHORT)
    assert whole.choices[0].message.tool_calls[0].id != whole.choices[1].message.tool_calls[0].id
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.delta.tool_calls]
    assert len(deltas) > 4


def test_text_is_that_of_generate_where_functions_are_there(client: Any) -> None:
    told = client.chat.completions.create(**{**ASKED, "max_completion_tokens": 20})
    chat = Chat(**ASKED)
    made = LM.generate(Prepared(chat, LM.need_tokenizer()).ids, seed=3, temperature=0.6, max_new_tokens=20)
    assert told.choices[0].message.content == made.text
    assert told.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "h is asked for"),
        ({"tool_choice": "required", "tools": []}, "a call is asked for"),
        ({"tools": [{"type": "web_search"}]}, "function"),
        ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "name"),
        ({"tools": ASKED["tools"] * 129}, "tools"),  # type: ignore[operator]
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"properties": {"a": {"multipleOf": 99_999_989}}}}}]}, "multipleOf"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}, "messages.0.tool_calls"),
        *(
            ({"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}, "parameters")
            for parameters in ({"properties": []}, {"required": 5}, {"properties": {"a": 5}})
        ),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages.0.tool_calls"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_with_functions_is_said(client: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(**{**ASKED, **fields})


def test_more_than_one_grammar_is_refused() -> None:
    chat = Chat(
        messages=[{"role": "user", "content": "go"}],  # type: ignore[list-item]
        response_format={"type": "json_object"},  # type: ignore[arg-type]
        structured_outputs={"regex": "a"},  # type: ignore[arg-type]
    )
    with pytest.raises(ConfigError, match="one grammar"):
        _ = chat.asked_grammar


def test_templates_that_write_without_end_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}"
    with pytest.raises(DataError, match="at most 16,777,216"):
        ChatTemplate(loop).render(HISTORY)
    monkeypatch.setattr(chat_templates, "MOST_SECONDS", 0.05)
    slow = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% for i in range(9999) %}{% endfor %}{% endfor %}"
    )
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant")] * 200
    with pytest.raises(DataError, match=r"of \d+ messages"):
        slow.pieces(messages, strict=False)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_told_apart(client: Any, house: House, stream: bool) -> None:
    """Through HTTP, by a template that begins an answer within reasoning."""
    lm = house.models.places["small"].model.lm
    before = lm.tokenizer
    lm.tokenizer = before.with_chat_template("{{ messages[0].content }}<think>\n{# </think> #}")
    asked = {"model": "small", "messages": ASKED["messages"], "seed": 1, "max_completion_tokens": 30}
    try:
        told = client.chat.completions.create(stream=stream, temperature=0.5, **asked)
        said = [chunk.choices[0].delta for chunk in told] if stream else [told.choices[0].message]
        ids = lm.tokenizer.render_chat(asked["messages"])
    finally:
        lm.tokenizer = before
    made = LM.generate(ids, seed=1, temperature=0.5, max_new_tokens=30).text.strip()
    thoughts = "".join(getattr(one, "reasoning_content", None) or "" for one in said)
    assert thoughts.strip() == made
    assert not any(one.content for one in said)


def test_an_answer_stands_behind_reasoning() -> None:
    made = LM.need_tokenizer().with_chat_template("{{ messages[0].content }}{# <think> </think> #}")
    asked = {"tools": None, "response_format": {"type": "json_object"}}
    for text in ('{"a":1}', '<think>so</think>\n\n{"a":1}', '<think>so</think>{"a":1}'):
        assert accepts(prepared(made, **asked), text, made)
    assert not accepts(prepared(made, **asked), "<think>so</think>no", made)
    parts = prepared(made, **asked).reader().push('<think>so</think>\n\n{"a":1}', last=True)
    assert merged(parts) == [Part("reasoning", "so"), Part("text", '{"a":1}')]
