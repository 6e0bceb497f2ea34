"""What model families write, as far as a chat template says how: their own markup, read whole and cut anywhere."""

import json
from typing import Any

import jsonschema
import pytest

from headway.errors import ConfigError
from headway.serve.formats import find_format, find_reasoning
from headway.serve.grammar import Grammars
from headway.serve.markup import CallReader, Part
from headway.serve.notations import json_of
from tests.serve.calls import LM, accepts, calls_of, merged, prepared, template_of

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"type": "array", "items": {"type": "string"}},
        "opts": {"type": "object", "properties": {"x": {"type": "boolean"}}},
    },
}
SCHEMAS = {"get_weather": CITY, "now": {"type": "object"}}
GIVEN = {"city": 'São "P" <b>', "days": 2, "units": ["c", "f"], "opts": {"x": True}}

DSML = """\
Let me look.

<｜DSML｜NAME>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">São "P" <b></｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>
<｜DSML｜parameter name="units" string="false">["c", "f"]</｜DSML｜parameter>
<｜DSML｜parameter name="opts" string="false">{"x": true}</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="now">
</｜DSML｜invoke>
</｜DSML｜NAME>"""
DSML_TEMPLATE = """{%- set dsml_token = '｜DSML｜' -%}{%- set thinking_end_token = '</think>' -%}{% if tools %}
{{- '</' + dsml_token + 'NAME>' -}}"""
HARMONY_TEMPLATE = """{%- if tools -%}{{- render_tool_namespace("functions", tools) }}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
{{- "functions." + tool_call.name + "<|channel|>commentary " }}"""
LFM = (
    """<|tool_call_start|>[get_weather(city=CITY, days=2, units=['c', "f"], opts={"x": true}), now()]"""
    "<|tool_call_end|>"
)
FAMILIES: dict[str, tuple[str, str, bool, str, str]] = {
    "gpt-oss": (
        HARMONY_TEMPLATE,
        "<|channel|>analysis<|message|>Hm.\nSo.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>GIVEN"
        "<|end|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        False, "Hm.\nSo.", "Let me look.",
    ),
    "gpt-oss, as its template writes calls": (
        HARMONY_TEMPLATE,
        " to=functions.get_weather<|channel|>commentary json<|message|>GIVEN<|call|><|start|>assistant<|channel|>"
        "analysis to=functions.now<|message|>{}",
        False, "", "",
    ),
    "Gemma 4": (
        "{%- if tools -%}{{- '<|channel>thought\\n' + thinking_text + '\\n<channel|>' -}}{{- '<|tool_call>call:' }}",
        '<|channel>thought\nHm.\n<channel|>Let me look.<|tool_call>call:get_weather{city:<|"|>São "P" <b><|"|>,days:2,'
        'opts:{x:true},units:[<|"|>c<|"|>,<|"|>f<|"|>]}<tool_call|><|tool_call>call:now{}<tool_call|>',
        False, "Hm.", "Let me look.",
    ),
    "LFM2": (
        '{%- if tools -%}{%- set s = "List of tools: <|tool_list_start|>[" -%}',
        "Let me look." + LFM.replace("CITY", "'São \"P\" <b>'"), False, "", "Let me look.",
    ),
    "LFM2.5": (
        '{%- if tools -%}{%- set s = "List of tools: [" -%}{{- "<think>" + message.thinking + "</think>" -}}',
        "<think>Hm.</think>" + LFM.replace("CITY", '"S\\u00e3o \\"P\\" <b>"'), False, "Hm.", "",
    ),
    "DeepSeek V3.2": (
        DSML_TEMPLATE.replace("NAME", "function_calls"), "Hm.</think>" + DSML.replace("NAME", "function_calls"),
        True, "Hm.", "Let me look.",
    ),
    "DeepSeek V4": (
        DSML_TEMPLATE.replace("NAME", "tool_calls"), DSML.replace("NAME", "tool_calls"), False, "", "Let me look.",
    ),
    "Kimi-K3": (
        "{% if tools %}{{- '<|open|>' + tag -}}{{- close_tag('think') -}}{{- open_tag('argument', [('key', key)]) -}}",
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>Let me look.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>São "P" <b><|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
        '<|open|>argument key="units" type="array"<|sep|>["c","f"]<|close|>argument<|sep|>'
        '<|open|>argument key="opts" type="object"<|sep|>{"x":true}<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>',
        True, "Hm.", "Let me look.",
    ),
    "MiniMax-M3": (
        "{%- set ns_token = ']<]minimax[>[' -%}{%- set toolcall_begin_token = ns_token ~ '<tool_call>' -%}"
        "{% if tools %}{%- set think_end_token = '</mm:think>' -%}",
        "<mm:think>Hm.</mm:think>Let me look.]<]minimax[>[<tool_call>\n"
        ']<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>São "P" <b>]<]minimax[>[</city>]<]minimax[>[<days>2'
        "]<]minimax[>[</days>]<]minimax[>[<units>]<]minimax[>[<item>c]<]minimax[>[</item>]<]minimax[>[<item>f"
        "]<]minimax[>[</item>]<]minimax[>[</units>]<]minimax[>[<opts>]<]minimax[>[<x>true]<]minimax[>[</x>"
        "]<]minimax[>[</opts>]<]minimax[>[</invoke>\n"
        ']<]minimax[>[<invoke name="now">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
        False, "Hm.", "Let me look.",
    ),
}  # fmt: skip
"""For each family: what its template has, an answer, whether the prompt ends in reasoning, its reasoning and text."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_own_markup_is_read_cut_anywhere(family: str) -> None:
    template, text, inside, reasoning, prose = FAMILIES[family]
    text = text.replace("GIVEN", json.dumps(GIVEN, ensure_ascii=False))
    marks, call_format = find_reasoning(template), find_format(template)
    assert call_format is not None

    def read(*pieces: str) -> Any:
        reader = CallReader(marks, inside, call_format, SCHEMAS)
        parts = [part for piece in pieces for part in reader.push(piece, last=False)]
        return merged([*parts, *reader.push("", last=True)])

    parts = read(text)
    assert calls_of(parts) == [("get_weather", GIVEN), ("now", {})]
    assert "".join(part.text for part in parts if part.kind == "reasoning") == reasoning
    assert "".join(part.text for part in parts if part.kind == "text") == prose
    assert read(*text) == parts
    for i in range(len(text)):
        assert read(text[:i], text[i:]) == parts
    if prose:  # also if no functions are offered
        parts = CallReader(marks, inside).push(text.partition(prose)[0] + prose, last=True)
        assert [part for part in parts if part.kind == "text"] == [Part("text", prose)]


@pytest.mark.parametrize(
    "text",
    ["<|tool_call_start|>[f(1)]<|tool_call_end|>", "<|tool_call_start|>[f(a=g())]<|tool_call_end|>",
     "<|tool_call_start|>[f(a=<|tool_call_end|>", "<|tool_call_start|>5<|tool_call_end|>"],
)  # fmt: skip
def test_what_is_no_call_of_python_is_text(text: str) -> None:
    parts = merged(CallReader(how=find_format("tools List of tools: ")).push(f"so {text}", last=True))
    assert {part.kind for part in parts} == {"text"}
    assert "".join(part.text for part in parts).replace(" ", "") == f"so{text}".replace(" ", "")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, '"so"', '"so"'),
        ({"type": "string", "maxLength": 5}, '"so"', "so"),
        ({"type": "string", "maxLength": 5}, "so", "so"),
        ({"type": "string", "enum": ["5"]}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({}, "null", None),
        (True, "so", "so"),
    ],
)
def test_a_value_between_tags_is_what_its_schema_says(schema: Any, text: str, value: Any) -> None:
    assert json.loads(json_of(text, schema)) == value


CHOSEN = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
        "code": {"type": "string", "pattern": "^[ab]{2}$"},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["unit"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "found", ["<parameter=", "argument", "tool_calls>", "<|tool_call>", "List of tools: "]
)
def test_texts_of_forced_calls_follow_their_schemas(found: str) -> None:
    """What is written between tags is what is read: an enum's value as it is, a string with a pattern as JSON."""
    call_format = next(
        call_format
        for call_format in map(
            find_format, [FAMILIES[name][0] for name in FAMILIES] + ["tools <tool_call> <parameter="]
        )
        if call_format is not None and call_format.found[-1] == found
    )
    tokenizer = LM.need_tokenizer().with_chat_template(template_of(call_format))
    tools = [{"type": "function", "function": {"name": "f", "parameters": CHOSEN}}]
    chat = prepared(tokenizer, tools=tools, tool_choice="required", parallel_tool_calls=False)
    constraint, within = chat.grammar
    assert constraint is not None
    grammar = Grammars(tokenizer, LM.spec.vocab, LM.eos).compile(*constraint, within=within)
    for seed in range(3):
        generation = LM.generate(chat.ids, grammar=grammar, temperature=0.9, seed=seed, max_new_tokens=300)
        ((name, arguments),) = calls_of(merged(chat.reader().push(generation.text, last=True)))
        assert name == "f"
        jsonschema.validate(arguments, CHOSEN)


def test_what_an_answer_in_messages_may_be() -> None:
    """For harmony, which also puts marks around texts."""
    tokenizer = LM.need_tokenizer().with_chat_template(
        "{{ messages[0].content }}{# " + HARMONY_TEMPLATE.replace("{", "").replace("}", "") + " #}"
    )
    chat = prepared(tokenizer, tools=None, response_format={"type": "json_object"})
    thought = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    for answer in ('<|channel|>final<|message|>{"a":1}', thought + '<|channel|>final<|message|>{"a":1}'):
        assert accepts(chat, answer)
        parts = merged(chat.reader().push(answer, last=True))
        assert parts[-1].text == '{"a":1}'
    assert not accepts(chat, '{"a":1}')


def test_notations_that_cannot_follow_a_schema_say_so() -> None:
    tokenizer = LM.need_tokenizer().with_chat_template("{{ messages[0].content }}{# tools <|tool_call> #}")
    tools = [{"type": "function", "function": {"name": "f", "parameters": CITY}}]
    with pytest.raises(ConfigError, match="units: this model writes objects and lists in its own notation"):
        _ = prepared(tokenizer, tools=tools, tool_choice="required").grammar
    assert prepared(tokenizer, tools=tools).grammar == (None, "")


HISTORY = [
    {"role": "user", "content": "go"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bonn"}'}}],
    },
]  # fmt: skip


def test_calls_of_earlier_turns_are_text_where_a_template_writes_none() -> None:
    """For LFM2, whose conversations have calls in their contents."""
    template = "{% if tools %}List of tools: {% endif %}{{ messages[1].content }}{{ messages[1].role }}"
    chat = prepared(LM.need_tokenizer().with_chat_template(template), messages=HISTORY)
    text = LM.need_tokenizer().decode(chat.ids)
    assert text == 'List of tools: <|tool_call_start|>[f(city="Bonn")]<|tool_call_end|>assistant'
    assert chat.warnings == []


def test_a_template_gets_reasoning_by_the_name_that_it_reads() -> None:
    template = "{# tools tool_calls <tool_call> #}{{ messages[1].thinking }}{# message.thinking #}"
    chat = prepared(LM.need_tokenizer().with_chat_template(template), messages=HISTORY)
    assert LM.need_tokenizer().decode(chat.ids) == "Hm."


def test_a_template_that_writes_calls_in_an_unknown_way_is_named() -> None:
    template = "{{ messages[0].content }}{# tools tool_calls <calls> #}"
    chat = prepared(LM.need_tokenizer().with_chat_template(template))
    assert [warning for warning in chat.warnings if "call format is unknown" in warning]
    template = "{{ messages[0].content }}"
    assert prepared(LM.need_tokenizer().with_chat_template(template)).warnings == []
