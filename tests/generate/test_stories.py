"""Real weights through the library's own loop: the published greedy text, however it is generated."""

import re
from pathlib import Path

import pytest

import headway
from headway.api import LanguageModel
from headway.checkpoints import convert
from headway.text import Tokenizer
from tests.data import data_path


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    source = data_path("weights/stories260K")
    folder = tmp_path_factory.mktemp("stories") / "hf"
    convert(source / "stories260K.bin", folder, tokenizer=Tokenizer.load(source / "tok512.bin"))
    return headway.load(folder)


@pytest.fixture(scope="module")
def published() -> str:
    text = (data_path("weights/stories260K") / "stories260K.md").read_text()
    match = re.search(r"-t 0\.0\n(.*?)\n```", text, re.DOTALL)
    assert match
    return match[1]


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"prefill_chunk": 3}], ids=str)
def test_the_published_text(lm: LanguageModel, published: str, options: dict[str, int]) -> None:
    generation = lm.generate("", max_new_tokens=256, eos=[1], **options)  # type: ignore[call-overload]
    assert generation.text == published


def test_it_goes_on_from_any_place(lm: LanguageModel, published: str) -> None:
    """A batch of prefixes of the text, cut between tokens: each is continued to the same end."""
    assert lm.tokenizer is not None
    ids = [1, *lm.generate("", max_new_tokens=256, eos=[1]).ids]
    prompts = [ids[:n] for n in (2, 100)]
    for prompt, generation in zip(prompts, lm.generate(prompts, max_new_tokens=255, eos=[1]), strict=True):
        whole = lm.tokenizer.decode([*prompt, *generation.ids])
        assert whole.startswith(published)


def test_a_stop_string(lm: LanguageModel, published: str) -> None:
    generation = lm.generate("", max_new_tokens=256, stop=["Lily's mom", " ball."])
    assert generation.finish_reason == "stop"
    assert generation.text == min(
        (published.split(s)[0] for s in ("Lily's mom", " ball.") if s in published), key=len
    )


def test_a_saved_model_generates_the_same(lm: LanguageModel, tmp_path: Path) -> None:
    lm.save(tmp_path / "m")
    again = headway.load(tmp_path / "m").generate("Once upon", max_new_tokens=40)
    assert again.ids == lm.generate("Once upon", max_new_tokens=40).ids
