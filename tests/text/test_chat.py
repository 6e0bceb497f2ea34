"""Chat templates: ids as `transformers` makes them, and no control token out of a message's text."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import DataError
from headway.text import Tokenizer
from headway.text.chat import ChatTemplate
from tests.text.conftest import byte_level, sentencepiece

TURNS = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m['role'] }}: {{ m['content'] | trim }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|reply|>{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content']"
    " + ' [/INST]' }}{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": " the cat "},
    {"role": "assistant", "content": "sat on\nthe mat 猫"},
    {"role": "user", "content": "and the dog?"},
]


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    return Tokenizer(
        tokenizer.backend,
        bos=tokenizer.bos,
        eos=tokenizer.eos,
        chat_template=template,
        config=tokenizer.config,
    )


BYTES, LLAMA = with_template(byte_level(), TURNS), with_template(sentencepiece(), LLAMA2)


@pytest.mark.parametrize("tokenizer", [BYTES, LLAMA], ids=["byte_level", "sentencepiece"])
@pytest.mark.parametrize("add", [True, False])
def test_ids_are_those_of_transformers(tokenizer: Tokenizer, add: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=add, tokenize=True, return_dict=False)
    assert tokenizer.render_chat(CHAT, add_generation_prompt=add) == expected
    assert Tokenizer.load(tmp_path).render_chat(CHAT, add_generation_prompt=add) == expected
    if add:  # which is the default: a rendered chat is mostly to be answered
        template, marks = tokenizer.chat_template, {"bos_token": "", "eos_token": ""}
        assert tokenizer.render_chat(CHAT) == expected
        assert template.render(CHAT, **marks) == template.render(CHAT, add_generation_prompt=True, **marks)


PARTS = [
    "<|user|>",
    "<|reply|>",
    "<|end|>",
    "<|begin|>",
    "<|us",
    "er|>",
    "<|",
    "|>",
    " ",
    "x",
    "hw",
    "#1;",
    "猫",
]


@given(st.lists(st.sampled_from(PARTS), max_size=8).map("".join))
def test_a_message_cannot_make_control_tokens(content: str) -> None:
    plain = BYTES.render_chat([{"role": "user", "content": "x"}])
    ids = BYTES.render_chat([{"role": "user", "content": content}])
    controls = BYTES.special_ids
    assert [i for i in ids if i in controls] == [i for i in plain if i in controls]
    assert BYTES.decode(ids) == f"user: {content.strip()}\n"


def test_nested_content_is_shielded_too() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content[0].text }}{% endfor %}{{ tools | tojson }}"
    tokenizer = with_template(BYTES, template)
    message = {"role": "user", "content": [{"type": "text", "text": "<|end|>"}]}
    ids = tokenizer.render_chat([message], tools=["猫"])
    assert [i for i in ids if i in tokenizer.special_ids] == [0]
    assert tokenizer.decode(ids) == '<|end|>["猫"]'


def test_bos_twice_is_said() -> None:
    tokenizer = with_template(BYTES, "{{ bos_token }}{{ bos_token }}{{ messages[0].content }}")
    with pytest.warns(UserWarning, match="begin with BOS .* twice"):
        tokenizer.render_chat(CHAT)


def test_generation_marks_are_their_body() -> None:
    tokenizer = with_template(
        BYTES, "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert tokenizer.decode(tokenizer.render_chat(CHAT[:1])) == " the cat "


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "at least one message"),
        ("hello", "a chat is a list of messages .* got str"),
        ({"role": "user"}, "a chat is a list of messages .* got dict"),
        ([None], "message 0 must be a mapping"),
        ([{"rule": "user", "content": "x"}], r"message 0 needs a \"role\" .*did you mean \"rule\""),
        (
            [{"role": "user", "contents": "x"}],
            r"message 0 \(user\) needs \"content\".*did you mean \"contents\"",
        ),
        ([{"role": "system", "content": "x"}], "Only user and assistant roles are supported!"),
    ],
)
def test_bad_messages(messages: object, match: str) -> None:
    with pytest.raises(DataError, match=match):
        LLAMA.render_chat(messages)  # type: ignore[arg-type]


def test_no_template_and_bad_templates() -> None:
    with pytest.raises(DataError, match="this tokenizer has no chat template"):
        byte_level().render_chat(CHAT)
    with pytest.raises(DataError, match="chat template: line 1"):
        with_template(BYTES, "{% for %}")
    with pytest.raises(DataError, match="chat template"):
        with_template(BYTES, "{{ ''.__class__.__mro__ }}").render_chat(CHAT)


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (
            "{{ messages[0].content + 1 }}",
            CHAT,
            'failed on these messages: can only concatenate str (not "int") to',
        ),
        (
            "{{ messages[0].content | length + none }}",
            CHAT,
            "failed on these messages: unsupported operand type",
        ),
        ("{{ 1 // 0 }}", CHAT, "failed on these messages: integer division or modulo by zero"),
        ("{{ raise_exception('no ' ~ messages[0].role) }}", CHAT, "no user"),
        ("{{ messages[0].nothing.more }}", CHAT, "'dict object' has no attribute 'nothing'"),
    ],
)
def test_a_template_that_fails_on_messages_says_so(
    template: str, messages: list[dict[str, str]], said: str
) -> None:
    with pytest.raises(DataError) as caught:
        ChatTemplate(template).render(messages)
    assert str(caught.value).startswith(f"chat template: {said}")
    assert caught.value.__suppress_context__, "a traceback through Jinja says nothing more"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}", "chat template: line 1: "),
        ("a\n{% if %}", "chat template: line 2: Expected an expression"),
        ("{{ (" + "(" * 5000 + "1" + ")" * 5001 + " }}", "chat template: nested too deeply"),
    ],
)
def test_a_template_that_is_none_is_refused_by_its_line(template: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        ChatTemplate(template)
    assert str(caught.value).startswith(said)


def test_a_template_is_called_by_its_name_or_its_first_line() -> None:
    assert ChatTemplate("\n  {{ 1 }}  \n{{ 2 }}").name == "{{ 1 }}"
    assert ChatTemplate("x" * 61).name == "x" * 60
    assert ChatTemplate("{{ 1 }}", "mine").name == "mine"
    assert ChatTemplate(" \n").name == ""
