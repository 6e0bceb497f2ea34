"""The readers of calls and reasoning: for every family, in any pieces."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from headway.serve.formats import ATEM, FORMATS, HARMONY, HERMES, REASONING, CallFormat, Reasoning
from headway.serve.markup import CallReader, Part
from tests.serve.calls import FRAMED, IDS, KIMI, SCHEMA, TOOLS, calls_of, merged, spelled

SCHEMAS = {"f": SCHEMA, "g": TOOLS[1]["function"]["parameters"]}  # type: ignore[index]


def marks_of(call_format: CallFormat) -> Reasoning:
    return FRAMED.get(call_format.found[-1], REASONING[0])


def answered(call_format: CallFormat, thought: str, text: str, calls: list[Any]) -> str:
    """Returns an answer as a family writes it."""
    marks, called = marks_of(call_format), spelled(call_format, calls)
    if marks is HARMONY:
        framed_text = f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant"
        return f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant{framed_text}{called}"
    if marks is ATEM:
        framed_text = f"{marks.frame[0]}{text}{marks.close}"
        return f"{marks.open}{thought}{marks.close}{framed_text}{called}"
    if marks is KIMI:
        return f"{marks.open}{thought}{marks.close}{text.join(marks.frame[:2])}{called}{marks.frame[2]}"
    return f"{marks.open}\n{thought}\n{marks.close}\n\n{text}{called}"


def read(text: str, cuts: list[int] = [], **options: Any) -> list[Part]:  # noqa: B006
    reader = CallReader(**options)
    ends = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(ends)]
    return merged(
        [part for i, piece in enumerate(pieces) for part in reader.push(piece, last=i == len(pieces) - 1)]
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
    pushed = [
        reader.push(piece, last=False) for piece in ["Hello", " ", "there", " <", "b", " <tool_c", "all"]
    ]
    assert ["".join(part.text for part in parts) for parts in pushed] == [
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
    pushed = [part for piece in pieces for part in reader.push(piece, last=False)]
    assert pushed == [Part("call", "f"), *(Part("arguments", piece) for piece in pieces)]
