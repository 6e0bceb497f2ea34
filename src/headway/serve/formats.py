"""Formats in which model families write tool calls and reasoning, recognized by their chat templates."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from headway.serve.notations import Calls, gemma_calls, python_calls, xml_calls


class Tags(NamedTuple):
    """Markup of a call whose arguments are written one by one: key, parameter name, end_key, value, end_value. "{key}"
    stands for the parameter's name again, "{type}" for the JSON type of the value.

    text: end_key and end_value of a string, which is written verbatim; other values are JSON. If None, strings are JSON
        too. If both pairs are the same, the schema says whether a value is a string.
    separator: text between two arguments.   nested: whether objects and lists are JSON.
    quotes: optional marks around a string that has markup characters.
    """

    key: str
    end_key: str
    end_value: str
    text: tuple[str, str] | None = None
    separator: str = ""
    nested: bool = True
    quotes: tuple[str, str] = ("", "")

    def around(self, key: str, kind: str) -> tuple[str, str]:
        """Returns the text before and after a value of the JSON type `kind`."""
        end_key, end_value = self.text if self.text and kind == "string" else (self.end_key, self.end_value)
        return f"{self.key}{key}{end_key}".replace("{type}", kind), end_value.replace("{key}", key)


class Reasoning(NamedTuple):
    """Marks around reasoning.

    found: text by which a chat template that knows them is recognized.
    frame: marks before and after the answer that follows, and other marks that are not part of it.
    """

    open: str
    close: str
    found: str
    frame: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallFormat:
    """The format in which a model family writes calls: open, a call, (between, a call)*, close. White space at the ends
    of these is how they are written; when reading, any white space or none is accepted.

    found: pieces of text; a chat template that has all of them is of this family.
    head: the text before the function's name, between it and its arguments, and after the arguments; "{index}" stands
        for the number of the call, "{name}" for the function's name again. The arguments are a JSON object, or as in
        `tags`.
    calls: parses the text between open and close, given the schemas of the functions, if it is in another notation.
    """

    found: tuple[str, ...]
    open: str = ""
    between: str = ""
    close: str = ""
    head: tuple[str, str, str] = ('{"name": "', '", "arguments": ', "}")
    tags: Tags | None = None
    calls: Callable[[str, Mapping[str, Any]], Calls] | None = None

    @property
    def marker(self) -> str:
        """The mark that begins calls after text; "" if a call is an object at the beginning of the answer."""
        return self.open.strip().rstrip("[")

    def write(self, calls: Iterable[tuple[str, str]]) -> str:
        """Returns the text of calls, each a name and its serialized arguments."""
        before, between, behind = self.head
        written = self.between.join(
            f"{before}{name}{between.replace('{name}', name)}{inner}{behind}" for name, inner in calls
        )
        return f"{self.open}{written}{self.close}"


def _objects(open: str, close: str, *marks: str, keys: tuple[str, str] = ("name", "arguments")) -> CallFormat:
    """Returns the format of calls that are JSON objects in a list."""
    head = f'{{"{keys[0]}": "', f'", "{keys[1]}": ', "}"
    return CallFormat(marks or (open,), f"{open}[", ", ", f"]{close}", head)


def _tags(key: str, end_key: str, end_value: str) -> Tags:
    """Returns tags that are the same for strings and other values, so that the schema says which a value is."""
    return Tags(key, end_key, end_value, (end_key, end_value))


HERMES = CallFormat(("<tool_call>",), "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
"""The format for models whose chat templates do not mention functions."""
_QWEN = ("<function=", ">\n", "</function>")
_GLM = _tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
_DEEPSEEK = "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"
_DSML = Tags(
    '<｜DSML｜parameter name="', '" string="false">', "</｜DSML｜parameter>\n",
    ('" string="true">', "</｜DSML｜parameter>\n"),
)  # fmt: skip
_INVOKE = ('<invoke name="', '">\n', "</invoke>")
_LLAMA = ('{"name": "', '", "parameters": ', "}")
_HY = ":opensource>"
_GIGACHAT = "<|message_sep|>\n\nfunction call<|role_sep|>\n"
FORMATS = (
    CallFormat(
        ("<seed:tool_call>",), "<seed:tool_call>\n", "\n</seed:tool_call>\n<seed:tool_call>\n", "\n</seed:tool_call>",
        head=_QWEN, tags=_tags("<parameter=", ">", "</parameter>\n"),
    ),
    CallFormat(
        ("]<]minimax[>[",), "]<]minimax[>[<tool_call>\n", "\n", "\n]<]minimax[>[</tool_call>",
        head=(']<]minimax[>[<invoke name="', '">', "]<]minimax[>[</invoke>"),
        tags=Tags("]<]minimax[>[<", ">", "]<]minimax[>[</{key}>", (">", "]<]minimax[>[</{key}>"), nested=False),
        calls=xml_calls,
    ),
    CallFormat(
        ("<tool_call>", "<parameter="), HERMES.open, HERMES.between, HERMES.close,
        head=_QWEN, tags=_tags("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    CallFormat(
        ("<arg_key>",), "<tool_call>", "</tool_call>\n<tool_call>", "</tool_call>", head=("", "\n", ""), tags=_GLM
    ),
    CallFormat(
        ("<tool_sep{}>",), f"<tool_calls{_HY}\n", "\n", f"\n</tool_calls{_HY}",
        head=(f"<tool_call{_HY}", f"<tool_sep{_HY}\n", f"</tool_call{_HY}"),
        tags=_tags(f"<arg_key{_HY}", f"</arg_key{_HY}\n<arg_value{_HY}", f"</arg_value{_HY}\n"),
    ),
    CallFormat(
        ("<atem:invoke",), " to=", "<|eom|><|start|>assistant to=",
        head=(
            "", '<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n',
            "</atem:invoke>\n</atem:function_calls>",
        ),
        tags=_tags('<atem:parameter name="', '">', "</atem:parameter>\n"),
    ),
    CallFormat(
        ("<param name=",), '<function name="', '\n<function name="', head=("", '">', "</function>"),
        tags=Tags(
            '<param name="', '">', "</param>", ('">', "</param>"), quotes=("<![CDATA[", "]]>")
        ),
    ),
    CallFormat(
        ("<minimax:tool_call>",), "<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>",
        head=_INVOKE, tags=_tags('<parameter name="', '">', "</parameter>\n"),
    ),
    *(
        CallFormat(
            ("｜DSML｜", f"{calls}>"), f"<｜DSML｜{calls}>\n", "\n", f"\n</｜DSML｜{calls}>",
            head=('<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>"), tags=_DSML,
        )
        for calls in ("function_calls", "tool_calls")
    ),
    CallFormat(
        ("<｜tool▁calls▁begin｜>", "```json"), *_DEEPSEEK,
        head=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
    ),
    CallFormat(
        ("<｜tool▁calls▁begin｜>",), *_DEEPSEEK,
        head=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    CallFormat(
        ("<|open|>", "argument"), "<|open|>tools<|sep|>", "", "<|close|>tools<|sep|>",
        head=('<|open|>call tool="', '" index="{index}"<|sep|>', "<|close|>call<|sep|>"),
        tags=Tags(
            '<|open|>argument key="', '" type="{type}"<|sep|>', "<|close|>argument<|sep|>",
            ('" type="string"<|sep|>', "<|close|>argument<|sep|>"),
        ),
    ),
    CallFormat(
        ("<|tool_call:begin|>",), "<|tool_calls|>", "", "<|calls|>",
        head=("<|tool_call:begin|>{index}<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"),
    ),
    CallFormat(
        ("<|tool_calls_section_begin|>",), "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>",
        head=("<|tool_call_begin|>functions.", ":{index}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    CallFormat(
        ("<|channel|>", "functions."), "<|channel|>commentary to=functions.",
        "<|start|>assistant<|channel|>commentary to=functions.",
        head=("", " <|constrain|>json<|message|>", "<|end|>"),
    ),
    CallFormat(
        ("<|tool_call>",), "<|tool_call>", "<tool_call|><|tool_call>", "<tool_call|>", head=("call:", "{", "}"),
        tags=Tags("", ":", "", (':<|"|>', '<|"|>'), ",", nested=False), calls=gemma_calls,
    ),
    CallFormat(
        ("List of tools: ",), "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", head=("", "(", ")"),
        tags=Tags("", "=", "", separator=", "), calls=python_calls,
    ),
    CallFormat(("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", "[TOOL_CALLS]", "", head=("", "[ARGS]", "")),
    _objects("[TOOL_CALLS]", ""),
    _objects("<|START_ACTION|>", "<|END_ACTION|>", keys=("tool_name", "parameters")),
    _objects("<TOOLCALL>", "</TOOLCALL>"),
    _objects("<tool_calls>", "</tool_calls>", "<tool_calls>["),
    CallFormat(("<tool_calls>",), "<tool_calls>\n", "\n", "\n</tool_calls>"),
    _objects("<|tool_call|>", "<|/tool_call|>", "<|/tool_call|>"),
    _objects("<|tool_call|>", ""),
    CallFormat(("<function=", "</function>"), "<function=", "<function=", "", head=("", ">", "</function>")),
    _objects(" functools", ""),
    CallFormat(("<|function_call|>",), "<|function_call|>", "<|function_call|>"),
    CallFormat(("function call", "<|role_sep|>"), _GIGACHAT, _GIGACHAT),
    CallFormat(
        ("<|tools_prefix|>",), "<|tools_prefix|>[", ", ", "]<|tools_suffix|>", head=('{"', '": ', "}")
    ),
    _objects("Action:\n```json\n", "```", "Action:\\n```json", keys=("tool_name", "parameters")),
    HERMES,
    CallFormat(("<|python_tag|>", '"parameters": '), between="; ", head=_LLAMA),
    CallFormat(('{"name": "', '"parameters": '), between="; ", head=_LLAMA),
)  # fmt: skip
"""Known formats; that of a chat template is the first whose `found` it has."""

HARMONY = Reasoning(
    "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>analysis<|message|>",
    ("<|channel|>final<|message|>", "", "<|end|>", "<|call|>", "<|return|>"),
)  # fmt: skip
"""OpenAI's harmony format: messages with headers; those of the channel "analysis" are reasoning."""
ATEM = Reasoning(
    " to=self<|message|>", "<|eom|><|start|>assistant", "<|start|>assistant to=self",
    (" to=user<|message|>", "", "<|eom|>", "<|eot|>"),
)  # fmt: skip
"""Muse's format: messages whose headers name their recipient; those to "self" are reasoning."""
HEADED = HARMONY, ATEM
REASONING = (
    Reasoning("<think>", "</think>", "</think>"),
    Reasoning("[THINK]", "[/THINK]", "[/THINK]"),
    Reasoning("<seed:think>", "</seed:think>", "</seed:think>"),
    Reasoning("<|START_THINKING|>", "<|END_THINKING|>", "<|END_THINKING|>"),
    Reasoning("<mm:think>", "</mm:think>", "</mm:think>"),
    Reasoning("<|channel>thought\n", "<channel|>", "<channel|>"),
    Reasoning(
        "<|open|>think<|sep|>", "<|close|>think<|sep|>", "close_tag('think')",
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    Reasoning("<think:opensource>", "</think:opensource>", "</think{}>"),
    Reasoning("<|inner_prefix|>", "<|inner_suffix|>", "<|inner_suffix|>"),
    Reasoning(
        "Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]", "[BEGIN FINAL RESPONSE]",
        ("", "", "[END FINAL RESPONSE]"),
    ),
    Reasoning(
        "<|think|>", "<|end|><|begin|>assistant", "<|begin|>assistant<|think|>",
        ("<|content|>", "", "<|end|>", "<|calls|>"),
    ),
    *HEADED,
)  # fmt: skip
"""Marks of model families; those of a chat template are the first whose `found` it has."""
PYTHON_TAG = "<|python_tag|>"
"""A mark that Llama 3 may write before a call that is an object."""


def find_format(template: str) -> CallFormat | None:
    """Returns the call format of a chat template; None if it writes no calls, or in an unknown format."""
    return next((form for form in FORMATS if all(part in template for part in form.found)), None)


def find_reasoning(template: str) -> Reasoning | None:
    """Returns the reasoning marks of a chat template, or None."""
    return next((marks for marks in REASONING if marks.found in template), None)
