"""The built-in chat templates write what their models were trained on."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.data.record_kinds import Chat
from headway.data.records import read_records
from headway.errors import DataError
from headway.text.chat import BUILT_IN, ChatTemplate
from tests.data import data_path
from tests.text.conftest import byte_level
from tests.text.templates import in_parts
from tests.text.test_chat import CHAT

STANFORD = {  # stanford_alpaca, train.py
    "prompt_input": (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
    ),
    "prompt_no_input": (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:"
    ),
}


@pytest.mark.parametrize("about", ["", "x\ny"])
def test_alpaca_is_stanfords(about: str, tmp_path: Path) -> None:
    row = {"instruction": "Say {it}.", "input": about, "output": "yes"}
    (tmp_path / "x.json").write_text(json.dumps([row]))
    (record,) = read_records(tmp_path / "x.json", Chat)
    assert isinstance(record, Chat)
    source = STANFORD["prompt_input" if about else "prompt_no_input"].format_map(row)
    pieces = byte_level().with_chat_template("alpaca").chat_pieces(record.messages, bos_token="")
    assert pieces == [source, "yes<|end|>", ""]


def vicuna(turns: Sequence[Mapping[str, str]]) -> str:
    """Returns what FastChat's conversation.py writes: `get_prompt` of vicuna_v1.1 (ADD_COLON_TWO)."""
    system = (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions."
    )
    roles, seps = {"human": "USER", "gpt": "ASSISTANT"}, (" ", "</s>")
    ret = system + seps[0]
    for i, turn in enumerate(turns):
        role, message = roles[turn["from"]], turn["value"]
        ret += role + ": " + message + seps[i % 2] if message else role + ":"
    return ret


def test_vicuna_is_fastchats() -> None:
    """500 conversations, as training writes them and as generation does (with a last answer that is still empty)."""
    file = data_path("conversations/dummy_conversation.json")
    tokenizer = byte_level().with_chat_template("vicuna")
    rows = json.loads(file.read_text())
    for row, record in zip(rows, read_records(file, Chat), strict=True):
        assert isinstance(record, Chat)
        turns = row["conversations"]
        options = {"bos_token": "", "eos_token": "</s>"}
        assert "".join(tokenizer.chat_pieces(record.messages, **options)) == vicuna(turns)
        prompt = tokenizer.chat_pieces(record.messages[:-1], add_generation_prompt=True, **options)
        assert "".join(prompt) == vicuna([*turns[:-1], {"from": "gpt", "value": ""}])


def meta(dialog: Sequence[Mapping[str, str]]) -> str:
    """Returns what Meta's llama/generation.py writes: `chat_completion`, with BOS and EOS as text."""
    b_inst, e_inst, b_sys, e_sys = "[INST]", "[/INST]", "<<SYS>>\n", "\n<</SYS>>\n\n"
    if dialog[0]["role"] == "system":
        content = b_sys + dialog[0]["content"] + e_sys + dialog[1]["content"]
        dialog = [{"role": dialog[1]["role"], "content": content}, *dialog[2:]]
    text = ""
    for prompt, answer in zip(dialog[::2], dialog[1::2], strict=False):
        text += f"<s>{b_inst} {(prompt['content']).strip()} {e_inst} {(answer['content']).strip()} </s>"
    return text + f"<s>{b_inst} {(dialog[-1]['content']).strip()} {e_inst}"


SAID = st.text(st.sampled_from("a \n\t"), max_size=5)


@given(
    system=st.none() | SAID, said=st.lists(SAID, min_size=1, max_size=5).filter(lambda turns: len(turns) % 2)
)
@example(system="Be brief.", said=["\n  hi "])
@example(system="", said=["hi"])
def test_llama2_is_metas(system: str | None, said: list[str]) -> None:
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(said)]
    dialog = turns if system is None else [{"role": "system", "content": system}, *turns]
    template = ChatTemplate.find("llama2")
    assert template.render(dialog, bos_token="<s>", eos_token="</s>") == meta(dialog)


def test_templates_are_found_by_name_text_or_file(tmp_path: Path) -> None:
    tokenizer = byte_level()
    named = tokenizer.with_chat_template("vicuna")
    assert tokenizer.chat_template is None
    assert named.chat_template is not None
    (tmp_path / "x.jinja").write_text(named.chat_template.source)
    for template in (named.chat_template.source, tmp_path / "x.jinja", str(tmp_path / "x.jinja")):
        assert tokenizer.with_chat_template(template).render_chat(CHAT) == named.render_chat(CHAT)
    with pytest.raises(
        DataError, match=r'vicunna: neither a built-in chat template \(did you mean "vicuna"\?\), nor a file'
    ):
        tokenizer.with_chat_template("vicunna")
    (tmp_path / "y.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"y\.jinja: 'utf-8' codec"):
        tokenizer.with_chat_template(tmp_path / "y.jinja")
    for name in BUILT_IN:
        with pytest.raises(DataError, match=f"{name} writes text only"):
            tokenizer.with_chat_template(name).render_chat(in_parts(CHAT))
