"""Tokenizer folders as people have them: ids, pairs and token types of `transformers`, from their files and from those
that we save."""

import shutil
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, processors

from headway.errors import DataError
from headway.text import Tokenizer
from headway.text.template import BARE, Template
from tests.text.folders import READ_BY_BOTH, SAVED_BY_US, SLOW, TEXTS, TRAINED, put


def marked(kinds: Iterable[str]) -> list[Any]:
    return [pytest.param(kind, marks=[pytest.mark.slow] if kind in SLOW else []) for kind in kinds]


KINDS = marked([*READ_BY_BOTH, *TRAINED, *SAVED_BY_US])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


@cache
def both(kind: str) -> tuple[Tokenizer, Any]:
    """Returns our tokenizer, read from the published files, and theirs, read from what ours saves."""
    from transformers import AutoTokenizer

    folder = put(Path(mkdtemp()), kind)
    ours = Tokenizer.load(folder)
    ours.save(folder / "saved")
    return ours, AutoTokenizer.from_pretrained(folder / "saved")


def without_control_tokens(ours: Tokenizer, text: str) -> None:
    """Rejects texts with control tokens: transformers makes tokens of them everywhere, here that must be requested."""
    assume(not any(ours.token(i) in text for i in ours.special_ids))


def encode_pair(tokenizer: Tokenizer, a: str, b: str) -> tuple[list[int], list[int]]:
    (inputs,) = tokenizer.inputs([(a, b)])
    return inputs.ids, inputs.token_types


def same(ours: Tokenizer, theirs: Any, text: str, other: str) -> None:
    assert ours.encode(text) == theirs(text)["input_ids"], text
    assert ours.encode(text, bos=False) == theirs(text, add_special_tokens=False)["input_ids"], text
    ids, types = encode_pair(ours, text, other)
    pair = theirs(text, other, return_token_type_ids=True)
    assert (ids, types) == (pair["input_ids"], pair["token_type_ids"]), (text, other)
    assert ours.encode(text, other) == ids


@pytest.mark.parametrize("kind", marked([*READ_BY_BOTH, *TRAINED]))
def test_ids_are_those_of_transformers_from_the_same_files(kind: str, root: Path) -> None:
    from transformers import AutoTokenizer

    folder = put(root / kind, kind)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    for text in TEXTS:
        same(ours, theirs, text, "b")
        assert ours.decode(ours.encode(text)) == theirs.decode(
            theirs(text)["input_ids"], skip_special_tokens=True
        )


@pytest.mark.parametrize("kind", KINDS)
def test_what_we_save_transformers_and_we_read_with_equal_ids(kind: str) -> None:
    ours, theirs = both(kind)
    for text in TEXTS:
        same(ours, theirs, text, TEXTS[0])
    for role in ("bos", "eos", "cls", "sep", "mask", "pad", "unk"):
        assert getattr(theirs, f"{role}_token_id") == getattr(ours, role), role
    again = Tokenizer.load(theirs.name_or_path)
    assert again.fingerprint == ours.fingerprint
    assert again.inputs([(t, "b") for t in TEXTS]) == ours.inputs([(t, "b") for t in TEXTS])


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXT, other=TEXT.filter(bool))  # transformers takes an empty second text for none
def test_any_text(kind: str, text: str, other: str) -> None:
    ours, theirs = both(kind)
    without_control_tokens(ours, text + other)
    same(ours, theirs, text, other)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXT)
def test_offsets_are_places_of_the_text(kind: str, text: str) -> None:
    ours, theirs = both(kind)
    without_control_tokens(ours, text)
    (inputs,) = ours.inputs([(text, "b c")])
    expected = theirs(text, "b c", return_offsets_mapping=True)
    assert inputs.ids == expected["input_ids"]
    assert [o or (0, 0) for o in inputs.offsets] == expected["offset_mapping"]
    assert inputs.texts == expected.sequence_ids()
    assert all((o is None) == (which is None) for o, which in zip(inputs.offsets, inputs.texts, strict=True))


@pytest.mark.parametrize("kind", marked(["gpt2", "roberta", "qwen2", "tiktoken", "llama2", "llama3"]))
@given(text=TEXT)
def test_lossless_kinds_give_the_text_back(kind: str, text: str) -> None:
    ours, _ = both(kind)
    if kind == "qwen2":
        import unicodedata

        text = unicodedata.normalize("NFC", text)
    assert ours.decode(ours.encode(text)) == text.replace("▁", " " if kind == "llama2" else "▁")


def test_an_answer_is_found_by_its_offsets() -> None:
    ours, _ = both("bert")
    context = "The Eiffel Tower, in Paris, was finished in 1889."
    (inputs,) = ours.inputs([("When was it finished?", context)])
    at = [i for i, (o, which) in enumerate(zip(inputs.offsets, inputs.texts, strict=True))
          if which == 1 and o is not None and context[slice(*o)] == "1889"]  # fmt: skip
    assert [ours.token(inputs.ids[i]) for i in at] == ["1889"]


def test_templates() -> None:
    bert, roberta, t5, llama = (both(kind)[0] for kind in ("bert", "roberta", "t5", "llama2c"))
    a, b = bert.encode("a", bos=False), bert.encode("b", bos=False)
    assert encode_pair(bert, "a", "b") == ([101, *a, 102, *b, 102], [0, 0, 0, 1, 1])
    a, b = roberta.encode("a", bos=False), roberta.encode("b", bos=False)
    assert encode_pair(roberta, "a", "b") == ([0, *a, 2, 2, *b, 2], [0] * 6)
    assert t5.encode("a") == [*t5.encode("a", bos=False), 1]
    assert llama.encode("a") == [1, *llama.encode("a", bos=False)]
    for tokenizer in (bert, roberta, t5, llama):
        assert tokenizer.encode("a", eos=False) + list(tokenizer.template.suffix) == tokenizer.encode("a")
        assert list(tokenizer.template.prefix) + tokenizer.encode(
            "a", bos=False, eos=True
        ) == tokenizer.encode("a")
        assert tokenizer.encode_batch(["a", ("a", "b")]) == [
            tokenizer.encode("a"),
            tokenizer.encode("a", "b"),
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_bos_stands_once_whoever_writes_it(kind: str) -> None:
    ours, _ = both(kind)
    if not ours.template.prefix:
        assert ours.encode("the", eos=False) == ours.encode("the", bos=False)
        return
    first = ours.template.prefix[0]
    written = f"{ours.token(first)}the"
    assert ours.encode("the").count(first) == 1
    assert ours.encode(written, special=True)[0] == first
    assert ours.encode(written, special=True).count(first) == 1
    assert ours.inputs([written], special=True)[0].ids.count(first) == 1
    assert first not in ours.encode(written, bos=False)


def test_a_begin_token_before_a_second_text_is_of_its_type() -> None:
    """As transformers' LlamaTokenizerFast.update_post_processor writes it."""
    backend = Backend(models.WordLevel({"<s>": 0, "a": 1, "b": 2}))
    parts = {"single": "<s>:0 $A:0", "pair": "<s>:0 $A:0 <s>:1 $B:1", "special_tokens": [("<s>", 0)]}
    backend.post_processor = processors.TemplateProcessing(**parts)
    llama, bare = Template.of(backend), Template()
    assert bare.beginning(0, True) == llama.beginning(0, True) == llama
    assert llama.beginning(0, False) == bare
    assert [part.type for part in BARE.beginning(0, True).pair] == [
        0
    ] * 4  # for tokenizers without token types


def test_t5_has_sentinels_and_the_first_has_the_highest_id() -> None:
    ours, _ = both("t5")
    assert ours.vocab_size == 32_100
    assert [ours.token(32_099 - k) for k in range(100)] == [f"<extra_id_{k}>" for k in range(100)]
    assert ours.encode("<extra_id_0>", special=True) == [32_099, 1]
    assert max(ours.encode("<extra_id_0>")) < 32_000


def test_a_mask_takes_the_space_before_it() -> None:
    roberta, theirs = both("roberta")
    ids = roberta.encode("a <mask> b", special=True)
    assert [roberta.token(i) for i in ids] == ["<s>", "a", "<mask>", "Ġb", "</s>"]
    assert theirs("a <mask> b")["input_ids"] == ids


def test_starcoder_s_digits_stand_alone(root: Path) -> None:
    folder = put(root / "starcoder", "gpt2")
    (folder / "tokenizer_config.json").unlink()
    (folder / "config.json").write_text('{"model_type": "gpt_bigcode"}')
    ours = Tokenizer.load(folder)
    assert [ours.token(i) for i in ours.encode("x = 1234")] == ["x", "Ġ=", "Ġ", "1", "2", "3", "4"]


def test_tiktoken_s_merges_are_the_ranks_in_order() -> None:
    """The oracle is the definition: in each piece of text the adjacent pair of least joint rank is merged until no pair
    has a rank."""
    import regex

    from headway.text.bytelevel import read_ranks
    from headway.text.rules import SPLIT
    from tests.data import data_path

    ranks = {
        t: i for i, t in enumerate(read_ranks(data_path("tokenizers/small/torchtune_tiktoken_small.model")))
    }
    ours, _ = both("tiktoken")
    for text in TEXTS:
        expected: list[int] = []
        for word in regex.findall(SPLIT, text):
            parts = [bytes([b]) for b in word.encode()]
            while len(parts) > 1:
                joint = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
                at = joint.index(min(joint))
                if joint[at] == len(ranks):
                    break
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            expected += [ranks[part] for part in parts]
        assert ours.encode(text, bos=False) == expected
    assert (ours.bos, ours.eos, ours.token(2006), ours.token(2009)) == (
        2000, 2001, "<|start_header_id|>", "<|eot_id|>",
    )  # fmt: skip


def test_added_tokens_beside_a_vocabulary_have_their_ids(root: Path) -> None:
    folder = put(root / "added", "gpt2")
    (folder / "added_tokens.json").write_text('{"<|user|>": 50257}')
    (folder / "special_tokens_map.json").write_text('{"additional_special_tokens": ["<|reply|>"]}')
    ours = Tokenizer.load(folder)
    assert (ours.backend.token_to_id("<|user|>"), ours.backend.token_to_id("<|reply|>")) == (50257, 50258)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("bert-chinese", "roformer"),
        ("roberta", "longformer"),
        ("t5", "t5"),
        ("llama2", "llama"),
        ("qwen2", "qwen2"),
    ],
)
def test_beside_a_model_s_config_too(kind: str, model: str, root: Path) -> None:
    """transformers picks another class if it knows the model; the ids stay the same."""
    from transformers import CONFIG_MAPPING, AutoTokenizer

    ours = Tokenizer.load(put(root / f"model-{kind}", kind))
    ours.save(root / model)
    CONFIG_MAPPING[model]().save_pretrained(root / model)
    theirs, again = AutoTokenizer.from_pretrained(root / model), Tokenizer.load(root / model)
    for text in TEXTS:
        same(ours, theirs, text, "b")
        assert again.encode(text, "b") == ours.encode(text, "b")
    assert (again.mask, again.pad, again.bos, again.eos) == (ours.mask, ours.pad, ours.bos, ours.eos)


def test_gpt2_is_read_from_the_files_of_its_authors(tmp_path: Path) -> None:
    put(tmp_path / "named", "gpt2")
    (tmp_path / "own").mkdir()
    for ours, theirs in (("vocab.json", "encoder.json"), ("merges.txt", "vocab.bpe")):
        shutil.copyfile(tmp_path / "named" / ours, tmp_path / "own" / theirs)
    renamed, original = (Tokenizer.load(tmp_path / name) for name in ("named", "own"))
    assert original.fingerprint == renamed.fingerprint
    assert [original.encode(text) for text in TEXTS] == [renamed.encode(text) for text in TEXTS]
    (tmp_path / "own" / "vocab.bpe").unlink()
    with pytest.raises(DataError, match=r"no tokenizer in this folder: .* encoder\.json with vocab\.bpe"):
        Tokenizer.load(tmp_path / "own")
    with pytest.raises(DataError, match=r"vocab\.bpe, with the BPE merges, is missing from the folder"):
        Tokenizer.load(tmp_path / "own" / "encoder.json")
