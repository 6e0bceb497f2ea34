"""The chat templates in llama.cpp's sources write what transformers makes of them, or both refuse them; a tokenizer's
named templates are chosen as by transformers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.checkpoints.saving import TokenizerFiles
from headway.errors import DataError
from headway.text import Tokenizer, gguf
from headway.text.chat import Message, one_template
from tests.data import llama_cpp_path
from tests.text.conftest import byte_level

COUNT = 70
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "A <city>"}, "days": {"type": "integer"}},
    "required": ["city"],
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Its weather", "parameters": CITY},
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": NOTHING}},
]
SYSTEM = {"role": "system", "content": 'Be brief & "kind".'}
ASKED = {"role": "user", "content": "What's <up> in Zürich?"}
SAID = {"role": "assistant", "content": "Fine."}
THOUGHT = {**SAID, "reasoning_content": "Hm.\nSo."}
RESULTS = [
    {"role": "tool", "tool_call_id": f"abcdefgh{i}", "name": name, "content": f"{name} <12>"}
    for i, name in enumerate(("get_weather", "now"))
]


def calling(*arguments: Any, **more: Any) -> dict[str, Any]:
    """Returns a message that calls functions, each with its arguments."""
    calls = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": tool["function"]["name"], "arguments": values}}
        for i, (tool, values) in enumerate(zip(TOOLS, arguments, strict=False))
    ]  # fmt: skip
    return {"role": "assistant", "content": "Let me look.", "tool_calls": calls, **more}


ONE = {"city": "Zürich", "days": 2}
CHATS: dict[str, tuple[list[Message], dict[str, Any], int]] = {
    "plain": ([ASKED], {}, 66),
    "system": ([SYSTEM, ASKED], {}, 65),
    "turns": ([SYSTEM, ASKED, SAID, ASKED, SAID, ASKED], {}, 65),
    "tools": ([SYSTEM, ASKED], {"tools": TOOLS}, 66),
    "call": ([ASKED, calling(ONE), RESULTS[0]], {"tools": TOOLS}, 63),
    "call, as text": ([ASKED, calling(json.dumps(ONE)), RESULTS[0]], {"tools": TOOLS}, 43),
    "no content": ([ASKED, calling(ONE, content=None), RESULTS[0], SAID], {"tools": TOOLS}, 54),
    "calls": ([SYSTEM, ASKED, calling(ONE, {}), *RESULTS, SAID, ASKED], {"tools": TOOLS}, 58),
    "reasoning": ([ASKED, THOUGHT, ASKED], {}, 65),
    "reasoning, last": ([ASKED, THOUGHT], {}, 65),
    "reasoning, called thinking": ([ASKED, {**SAID, "thinking": "Hm."}], {}, 65),
    "reasoning, called": ([ASKED, calling(ONE, reasoning="Hm."), RESULTS[0]], {"tools": TOOLS}, 60),
    "no thinking": ([ASKED], {"enable_thinking": False}, 66),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "What?"}]}], {}, 42),
}
"""Messages, variables, and the least number of templates that give a text; the others refuse."""


def written(write: Any) -> str | None:
    """Returns the text, or None if it is refused for any reason."""
    try:
        return str(write())
    except Exception:  # errors of Jinja and of Python, which transformers lets through from a template
        return None


def ours(tokenizer: Tokenizer, messages: list[Message], **variables: Any) -> str | None:
    try:
        return "".join(tokenizer.chat_pieces(messages, strict=False, **variables))
    except DataError:
        return None


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level().save(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("chat", CHATS)
def test_published_templates_write_what_transformers_writes(chat: str, theirs: Any) -> None:
    messages, variables, least = CHATS[chat]
    files = sorted(llama_cpp_path("models/templates").glob("*.jinja"))
    assert len(files) == COUNT
    different, count, tokenizer = [], 0, byte_level()
    for file in files:
        templated = tokenizer.with_chat_template(file)
        for add_prompt in (True, False):
            options = {**variables, "add_generation_prompt": add_prompt}
            expected = written(
                lambda file=file, options=options: theirs.apply_chat_template(
                    messages, chat_template=file.read_text(), tokenize=False, **options
                )
            )
            different += [file.stem] * (ours(templated, messages, **options) != expected)
            count += add_prompt and expected is not None
    assert different == []
    assert count >= least


@pytest.mark.slow
def test_published_templates_let_a_last_message_go_on(theirs: Any) -> None:
    count, tokenizer = 0, byte_level()
    for file in sorted(llama_cpp_path("models/templates").glob("*.jinja")):
        expected = written(
            lambda file=file: theirs.apply_chat_template(
                [ASKED, SAID], chat_template=file.read_text(), tokenize=False, continue_final_message=True
            )
        )
        if expected is not None:
            ids = tokenizer.with_chat_template(file).render_chat([ASKED, SAID], continue_final_message=True)
            assert tokenizer.decode(ids, special=True) == expected, file.stem
            count += 1
    assert count >= 60


PLAIN = "{%- macro m(x) %}<{{ x }}>{% endmacro %}{% for x in messages %}{{ m(x.content) }}\n{% endfor %}\n"
NAMED = {
    "default": PLAIN,
    "tool_use": "\n  {% set n = tools | length %}{% macro m(x) %}({{ x }}){% endmacro %}{{ n }}{{ m('y') }}  \n\n",
    "rag": "  {{ documents[0].text if documents else 'none' }}{{ messages[0].content }}",
}
ASKS: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"chat_template": "rag"},
    {"chat_template": "rag", "tools": TOOLS, "documents": [{"title": "t", "text": "d"}]},
    {"chat_template": "default", "tools": TOOLS},
]


def put(folder: Path, where: str, named: dict[str, str]) -> None:
    """Writes the folder of a tokenizer with these templates in its configuration, or in files."""
    byte_level().save(folder)
    if where == "files":
        (folder / "additional_chat_templates").mkdir()
        for name, source in named.items():
            inner = f"additional_chat_templates/{name}.jinja"
            (folder / ("chat_template.jinja" if name == "default" else inner)).write_text(source)
        return
    file = folder / "tokenizer_config.json"
    listed = [{"name": name, "template": source} for name, source in named.items()]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": listed}))


@pytest.mark.parametrize("where", ["configuration", "files"])
def test_templates_by_name_are_chosen_as_transformers_does(where: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    put(tmp_path / "1", where, NAMED)
    theirs, tokenizer = AutoTokenizer.from_pretrained(tmp_path / "1"), Tokenizer.load(tmp_path / "1")
    tokenizer.save(tmp_path / "2")
    keys = tokenizer.gguf_metadata(400)
    keys |= {f"tokenizer.chat_template.{name}": source for name, source in NAMED.items()}
    keys |= {"tokenizer.chat_template": keys.pop("tokenizer.chat_template.default")}
    backend, arguments = gguf.read(keys, Path("m.gguf"))
    for reread in (tokenizer, Tokenizer.load(tmp_path / "2"), Tokenizer(backend, **arguments)):
        for options in ASKS:
            expected = theirs.apply_chat_template([ASKED], tokenize=False, **options)
            assert ours(reread, [ASKED], **options) == expected
    assert expected != theirs.apply_chat_template([ASKED], tokenize=False, tools=TOOLS)
    with pytest.raises(DataError, match=r"names none of this tokenizer's templates: default, rag, tool_use"):
        tokenizer.render_chat([ASKED], chat_template="tools")


def test_templates_by_name_go_along_with_a_tokenizer_s_files(tmp_path: Path) -> None:
    put(tmp_path / "1", "files", NAMED)
    (tmp_path / "2").mkdir()
    TokenizerFiles(SimpleNamespace(home=tmp_path / "1")).save(tmp_path / "2")  # type: ignore[arg-type]
    sources = [Tokenizer.load(tmp_path / name).chat_template for name in "12"]
    assert sources[0] is not None
    assert sources[1] is not None
    assert sources[0].source == sources[1].source != NAMED["default"]


def test_without_a_default_a_template_is_named(tmp_path: Path) -> None:
    put(tmp_path, "configuration", {"rag": NAMED["rag"]})
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(DataError, match=r"chat_template names none of this tokenizer's templates: rag"):
        tokenizer.render_chat([ASKED])
    assert ours(tokenizer, [ASKED], chat_template="rag") == f"  none{ASKED['content']}"


CASES: list[tuple[list[Message], dict[str, Any]]] = [
    ([ASKED], {}),
    ([ASKED], {"tools": TOOLS}),
    ([ASKED, calling(ONE), RESULTS[0]], {"tools": TOOLS}),
]


@pytest.mark.slow
def test_published_templates_are_the_same_beside_a_default(theirs: Any) -> None:
    """Each file as "tool_use": used if functions are passed, and not otherwise."""
    for file in sorted(llama_cpp_path("models/templates").glob("*.jinja")):
        named = {"default": PLAIN, "tool_use": file.read_text()}
        tokenizer = byte_level().with_chat_template(one_template(named))
        for messages, options in CASES:
            source = named["tool_use" if options else "default"]
            expected = written(
                lambda source=source, messages=messages, options=options: theirs.apply_chat_template(
                    messages, chat_template=source, tokenize=False, **options
                )
            )
            assert ours(tokenizer, messages, **options) == expected, file.stem
