"""`headway.load`: a folder becomes a model that generates, streams and chats."""

from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway.api import LanguageModel
from headway.checkpoints.saving import save_folder
from headway.errors import CheckpointError, ConfigError, DataError, HeadwayError
from headway.patterns import Causal
from headway.text import Tokenizer
from tests.generate.conftest import small
from tests.text.conftest import byte_level
from tests.text.test_chat import CHAT

TEXTS = ["the cat", "def attend(", "我们", ""]


def test_text_in_text_out(lm: LanguageModel) -> None:
    tokenizer = lm.tokenizer
    assert tokenizer is not None
    generation = lm.generate("the cat", max_new_tokens=8)
    prompt = tokenizer.encode("the cat")
    assert generation.ids == lm.generate(prompt, max_new_tokens=8).ids
    assert generation.ids == lm.generate(torch.tensor(prompt), max_new_tokens=8).ids
    assert str(generation) == generation.text == tokenizer.decode(generation.ids, after=prompt)
    assert generation.prompt_tokens == len(prompt)


def test_lists_of_prompts(lm: LanguageModel) -> None:
    settings = {"max_new_tokens": 9, "temperature": 1.1, "seed": 4}
    generations = lm.generate(TEXTS, **settings)
    assert [g.ids for g in lm.generate(TEXTS, batch_size=2, **settings)] == [g.ids for g in generations]
    assert generations[0].text == lm.generate("the cat", **settings).text
    ids = [lm.tokenizer.encode(t) for t in TEXTS]  # type: ignore[union-attr]
    assert [g.ids for g in lm.generate(ids, **settings)] == [g.ids for g in generations]


def test_stream_is_generate(lm: LanguageModel) -> None:
    settings = {"max_new_tokens": 20, "temperature": 1.3, "stop": ["a"]}
    text = "".join(delta.text for delta in lm.stream("the cat", **settings))
    assert text == lm.generate("the cat", **settings).text
    with pytest.raises(DataError, match="stream takes one prompt"):
        lm.stream(["a", "b"])  # type: ignore[list-item]


def test_chat_goes_through_the_template(lm: LanguageModel) -> None:
    reply = lm.chat(CHAT, max_new_tokens=6)
    assert reply.ids == lm.generate(lm.tokenizer.render_chat(CHAT), max_new_tokens=6).ids  # type: ignore[union-attr]
    assert "".join(d.text for d in lm.stream_chat(CHAT, max_new_tokens=6)) == reply.text
    with pytest.raises(DataError, match=r"messages of a conversation, not prompts; use chat\(messages\)"):
        lm.generate(CHAT)  # type: ignore[call-overload]


def test_transformers_generates_the_same(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_folder(tmp_path / "m", small(Causal()), tokenizer=byte_level())
    lm = headway.load(tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt")
        out = model.generate(**inputs, do_sample=False, max_new_tokens=12, pad_token_id=0)
        ours = lm.generate(text, max_new_tokens=12)
        assert out[0, inputs["input_ids"].shape[1] :].tolist() == ours.ids


def test_eos_is_the_model_s(folder: Path, tmp_path: Path) -> None:
    lm = headway.load(folder)
    assert lm.eos == (1,)
    unstopped = lm.generate("the cat", max_new_tokens=6, eos=()).ids
    for eos in (unstopped[2], [330_000, unstopped[2]]):
        listed = LanguageModel(lm.model, lm.tokenizer, generation={"eos_token_id": eos})
        generation = listed.generate("the cat", max_new_tokens=6)
        assert (generation.ids, generation.finish_reason) == (
            unstopped[: unstopped.index(unstopped[2]) + 1],
            "eos",
        )


def test_ids_without_text_are_never_chosen(folder: Path) -> None:
    """The embedding has more rows than the vocabulary has tokens; its last rows stand for no token."""
    wide = LanguageModel(small(vocab=400), byte_level())
    generations = wide.generate(["a", "b", "c"], max_new_tokens=20, temperature=2.0)
    assert all(i < 330 for g in generations for i in g.ids)
    assert any(
        i >= 330
        for i in LanguageModel(small(vocab=400)).generate([0, 5], max_new_tokens=50, temperature=2.0).ids
    )


def test_a_tokenizer_larger_than_the_embedding(tmp_path: Path) -> None:
    save_folder(tmp_path / "m", small(vocab=329), tokenizer=byte_level())
    with pytest.raises(CheckpointError, match=r"ids up to 329 \(330 tokens\) but .* has 329 rows"):
        headway.load(tmp_path / "m")


def test_without_a_tokenizer(tmp_path: Path) -> None:
    save_folder(tmp_path / "m", small())
    lm = headway.load(tmp_path / "m")
    assert lm.tokenizer is None
    assert len(lm.generate([0, 5], max_new_tokens=3, eos=()).ids) == 3
    for call in (lm.generate, lm.stream):
        with pytest.raises(DataError, match="this model has no tokenizer: give token ids"):
            call("the cat")
    with pytest.raises(DataError, match="no tokenizer"):
        lm.chat(CHAT)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        (None, "the prompt is None; give a text, token ids, or a list of either"),
        ([], "no prompts: the batch is empty"),
        (["a", None], "text 1 must be a str, got NoneType"),
        ([[]], "prompt 0 is empty"),
        ([330], "token id 330 at place 0 is outside the model's vocabulary of 330"),
        (torch.zeros(2), r"ids are an integer tensor \[T\] or \[B, T\], got torch.float32 \[2\]"),
        ("a\ud800", "lone surrogate"),
    ],
)
def test_bad_prompts(lm: LanguageModel, prompt: object, match: str) -> None:
    with pytest.raises(DataError, match=match):
        lm.generate(prompt)  # type: ignore[call-overload]


def test_options_that_are_none(lm: LanguageModel) -> None:
    with pytest.raises(
        ConfigError, match=r"generate has no option 'temprature' \(did you mean \"temperature\"\?\)"
    ):
        lm.generate("a", temprature=1.0)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="top_p must be"):
        lm.generate("a", top_p=2.0)
    with pytest.raises(ConfigError, match="was trained on 64"):
        lm.generate("a", max_new_tokens=64)


def test_control_tokens_in_a_prompt_are_text_unless_asked_for(lm: LanguageModel) -> None:
    plain, special = (
        lm.generate("<|user|>", max_new_tokens=1, special=s).prompt_tokens for s in (False, True)
    )
    assert plain > special == 2


def test_what_cannot_be_loaded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"there is no task 'casual-lm' .did you mean \"causal-lm\""):
        headway.load(folder, task="casual-lm")
    with pytest.raises(ConfigError, match=r"there is no dtype 'flaot32' .did you mean \"float32\""):
        headway.load(folder, dtype="flaot32")
    with pytest.raises(ConfigError, match="revision 'main' applies to Hub ids only"):
        headway.load(folder, revision="main")
    with pytest.raises(CheckpointError, match=r"smal: no such file or folder \(did you mean \"small\"\?\)"):
        headway.load(folder.parent / "smal")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file of unknown format"):
        headway.load(tmp_path / "file")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"owner/name: no such local file or folder, and as a Hugging Face Hub id .*could not be downloaded",
    ):
        headway.load("owner/name")
    with pytest.raises(HeadwayError, match="backend"):
        headway.load(folder, backend="nosuch").generate("a", max_new_tokens=1)


def test_an_id_of_the_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[object] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        requests.append((name, revision, "*.bin" in allow_patterns))
        return str(folder)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert headway.load("owner/name", revision="v1").eos == (1,)
    assert headway.load("owner/name", allow_pickle=True).eos == (1,)
    assert requests == [("owner/name", "v1", False), ("owner/name", None, True)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"source": 5}, r"a model or adapter must be a folder, a file or a Hub id, .* got 5"),
        ({"adapter": [5]}, r"as a str or Path, got 5"),
        ({"adapter": 5}, r"as a str or Path, got 5"),
        (
            {"device": "cuda:99"},
            r"torch cannot use device='cuda:99' here: .*; leave device out",
        ),
        ({"device": "gpu"}, r"device='gpu' here: .*gpu; leave device out for the CPU"),
    ],
)
def test_what_is_no_folder_and_no_device_is_said(given: Any, said: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        headway.load(**{"source": folder, **given})


def test_dtypes(folder: Path) -> None:
    for name, dtype in (
        ("bf16", torch.bfloat16),
        ("float64", torch.float64),
        (torch.bfloat16, torch.bfloat16),
    ):
        lm = headway.load(folder, dtype=name)
        assert lm.model.model.embed_tokens.weight.dtype == dtype
        assert len(lm.generate("the", max_new_tokens=3, eos=()).ids) == 3
    with pytest.warns(UserWarning, match=r"float16 on a CPU: .*several hundred times slower"):
        headway.load(folder, dtype="float16")


def test_a_prompt_stays_open_where_texts_end_with_eos(tmp_path: Path) -> None:
    """A prompt that the model continues has no EOS behind it, whichever way it is given."""
    tokenizer = byte_level()
    with_eos = Tokenizer(tokenizer.backend, bos=0, eos=1, ends_with_eos=True, config=tokenizer.config)
    assert with_eos.encode("the cat")[-1] == 1
    save_folder(tmp_path / "m", small(), tokenizer=with_eos)
    lm = headway.load(tmp_path / "m", task="causal-lm")
    expected = lm.generate(tokenizer.encode("the cat"), max_new_tokens=6, eos=()).ids
    assert lm.generate("the cat", max_new_tokens=6, eos=()).ids == expected
    assert lm.generate(["the cat", "a"], max_new_tokens=6, eos=())[0].ids == expected
    assert [d.token for d in lm.stream("the cat", max_new_tokens=6, eos=())] == expected


def test_what_is_no_prompt_is_named(lm: LanguageModel) -> None:
    for prompt, message in (
        (5, "got 5 of type int"),
        (b"text", "got b'text' of type bytes"),
        (2.5, "got 2.5"),
    ):
        with pytest.raises(DataError, match=f"a prompt is a text, token ids, or a list of either; {message}"):
            lm.generate(prompt, max_new_tokens=1)  # type: ignore[call-overload]
    ids = torch.tensor([3, 4, 5])
    expected = lm.generate(ids, max_new_tokens=3).ids
    assert lm.generate(ids.numpy(), max_new_tokens=3).ids == expected
    assert lm.generate([ids, ids.numpy()], max_new_tokens=3)[1].ids == expected
