"""Masked tokens: how many there are, what replaces them, and what the draw depends on (row 87)."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.data import (
    MaskedRows,
    Masking,
    TokenFile,
    encode_corpus,
    pack,
)
from headway.errors import ConfigError, DataError
from headway.nn import IGNORE_INDEX
from headway.text import Tokenizer, train_bpe, train_characters, train_words
from tests.datasets.test_tokenfile import token_file

TEXT = "黛玉笑道：“宝玉，你来了。”\n宝玉笑道：“我来了，妹妹可好？” one two three, four-five 1234\n"
SPECIALS = 5


@pytest.fixture(scope="module")
def characters() -> Tokenizer:
    return train_characters([TEXT], SPECIALS + 256 + len(set(TEXT)))


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "walk", "##ing", "##er", "s", "the", ".", "##s"]
    path = tmp_path_factory.mktemp("v") / "vocab.txt"
    path.write_text("\n".join(pieces) + "\n", encoding="utf-8")
    return Tokenizer.load(path.parent)


def plain(vocab: int, specials: int = SPECIALS, share: float = 0.15) -> Masking:
    """Returns a masking in which [MASK] is 4 and ids below `specials` are special."""
    special = np.arange(vocab) < specials
    return Masking(4, special, np.flatnonzero(~special).astype(np.int64), share)


def within(actual: int, count: int, p: float) -> bool:
    """Returns whether a count is within six standard deviations of a binomial: exceeded once in 5e8 (normal tail)."""
    return abs(actual - count * p) <= 6 * math.sqrt(count * p * (1 - p))


@pytest.mark.parametrize("share", [0.15, 0.4])
def test_row_87_the_shares_are_those_of_the_paper(share: float) -> None:
    """15 % are chosen, and of them 80 / 10 / 10. A random token is the right one by chance 1 time in V - 5."""
    vocab, n, rows = 1000, 500, 800
    masking = plain(vocab, share=share)
    ids = np.random.default_rng(0).integers(0, vocab, (rows, n))
    masked_rows = [masking(row, key) for key, row in enumerate(ids)]
    inputs, targets = np.stack([a for a, _ in masked_rows]), np.stack([b for _, b in masked_rows])
    chosen = targets != IGNORE_INDEX
    ordinary = int((ids >= SPECIALS).sum())
    count = int(chosen.sum())
    assert within(count, ordinary, share)
    assert not chosen[ids < SPECIALS].any()
    assert np.array_equal(targets[chosen], ids[chosen])
    assert np.array_equal(inputs[~chosen], ids[~chosen])
    by_chance = 0.1 / (vocab - SPECIALS)
    masked = int((inputs[chosen] == 4).sum())
    stayed = int((inputs[chosen] == ids[chosen]).sum())
    assert within(masked, count, 0.8)
    assert within(stayed, count, 0.1 + by_chance)
    assert within(count - masked - stayed, count, 0.1 - by_chance)
    random_tokens = inputs[chosen & (inputs != 4) & (inputs != ids)]
    assert random_tokens.min() >= SPECIALS
    expected = len(random_tokens) / (vocab - SPECIALS)
    counts = np.bincount(random_tokens, minlength=vocab)[SPECIALS:]
    chi = float(((counts - expected) ** 2 / expected).sum())  # mean k, variance 2 k, k = V - 6
    assert abs(chi - (vocab - SPECIALS - 1)) <= 6 * math.sqrt(2 * (vocab - SPECIALS - 1))


def test_tokens_are_chosen_one_by_one_in_every_slot() -> None:
    """Each slot is chosen at the same rate, and neighbours independently of each other."""
    n, rows = 64, 4000
    chosen = np.stack([plain(50)(np.full(n, 9), key)[1] != IGNORE_INDEX for key in range(rows)])
    assert all(within(int(slot_count), rows, 0.15) for slot_count in chosen.sum(0))
    both = int((chosen[:, 1:] & chosen[:, :-1]).sum())
    p = 0.15**2  # pairs overlap: the variance is at most 3 times that of independent ones
    assert abs(both - rows * (n - 1) * p) <= 6 * math.sqrt(3 * rows * (n - 1) * p)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(0, 2**64 - 1))
def test_a_mask_is_a_function_of_the_key_and_undoes_itself(tokens: list[int], key: int) -> None:
    ids = np.array(tokens)
    masking = plain(31)
    a, b = masking(ids, key), masking(ids, key)
    assert np.array_equal(a[0], b[0])
    assert np.array_equal(a[1], b[1])
    assert np.array_equal(np.where(a[1] == IGNORE_INDEX, a[0], a[1]), ids)


def test_special_tokens_of_a_tokenizer_are_never_chosen(characters: Tokenizer) -> None:
    masking = Masking.of(characters, share=0.99)
    ids = np.array(characters.encode(TEXT))
    for key in range(200):
        _, targets = masking(ids, key)
        assert targets[0] == targets[-1] == IGNORE_INDEX
    assert set(masking.ordinary.tolist()).isdisjoint(characters.special_ids)
    assert len(masking.ordinary) == characters.vocab_size - SPECIALS


def words_of(masking: Masking, ids: list[int]) -> list[int]:
    assert masking.words is not None
    return np.unique(masking.words(np.array(ids)), return_inverse=True)[1].tolist()


def test_whole_words_of_wordpieces(wordpiece: Tokenizer) -> None:
    masking = Masking.of(wordpiece, whole_words=True)
    ids = wordpiece.encode("the walkings s walker.")
    names = [wordpiece.token(i) for i in ids]
    assert names == ["[CLS]", "the", "walk", "##ing", "##s", "s", "walk", "##er", ".", "[SEP]"]
    assert words_of(masking, ids) == [0, 1, 2, 2, 2, 3, 4, 4, 5, 6]


def test_whole_words_of_bytes_and_of_chinese() -> None:
    """A Chinese token is a word; so are a character that is split into bytes, and a sequence of letters."""
    texts = ["one two three four five " * 3, "黛玉笑道"]
    bytewise = train_bpe(texts, 262, special_tokens=["[MASK]"])
    masking = Masking.of(bytewise, whole_words=True)
    pieces = bytewise.encode("two one\nsix 笑玉", bos=False)
    text = [bytewise.decode([i]) for i in pieces]
    word_ids = words_of(masking, pieces)
    for i in range(1, len(pieces)):
        inside = text[i][:1].isalnum() and text[i - 1][-1:].isalnum() and text[i].isascii()
        if text[i].isascii() and text[i - 1].isascii():
            assert (word_ids[i] == word_ids[i - 1]) == inside, (text, word_ids)
    whole = train_words([TEXT] * 5, SPECIALS + 256 + 49)
    ids = whole.encode("黛玉笑道鑫宝玉", bos=False)
    whole_ids = words_of(Masking.of(whole, whole_words=True), ids)
    byte_slots = [k for k, i in enumerate(ids) if whole.token(i).startswith("<0x")]
    assert len(byte_slots) == 3
    assert len({whole_ids[k] for k in byte_slots}) == 1
    assert len(set(whole_ids)) == len(ids) - 2


def test_whole_words_are_masked_as_a_whole_at_the_same_rate(wordpiece: Tokenizer) -> None:
    masking = Masking.of(wordpiece, whole_words=True)
    assert masking.words is not None
    ids = np.array(wordpiece.encode("the walkings s walker. " * 20))
    first, rows = masking.words(ids), 400
    chosen = np.stack([masking(ids, key)[1] != IGNORE_INDEX for key in range(rows)])
    assert np.array_equal(chosen, chosen[:, first])
    begins = np.unique(first)[1:-1]  # without the template's tokens
    assert within(int(chosen[:, begins].sum()), rows * len(begins), 0.15)


def test_what_cannot_be_masked_is_refused(characters: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"this tokenizer has no mask token \(it has bos, eos\)"):
        Masking.of(train_bpe([TEXT], 259))
    with pytest.raises(ConfigError, match=r"masking: share must be above 0 and below 1, got 1.0"):
        Masking.of(characters, share=1.0)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\none\n", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"whole_words needs .*none of these 6 tokens begins with ##; set whole_words=no"
    ):
        Masking.of(Tokenizer.load(tmp_path), whole_words=True)


lengths_of_documents = st.lists(st.integers(0, 40), max_size=12)


@given(lengths_of_documents, st.integers(3, 20), st.integers(0, 2), st.booleans())
def test_rows_hold_every_token_once(lengths: list[int], length: int, around: int, packed: bool) -> None:
    rows = list(pack(lengths, length, around, alone=not packed))
    spans = [span for row in rows for span in row]
    tokens = [(span.document, t) for span in spans for t in range(span.start, span.stop)]
    assert tokens == [(d, t) for d, n in enumerate(lengths) for t in range(n)]
    sizes = [sum(span.stop - span.start + around for span in row) for row in rows]
    assert all(size <= length for size in sizes)
    assert all(span.stop > span.start for span in spans)
    if packed:
        assert all(size >= length - around for size in sizes[:-1])
    else:
        assert all(len(row) == 1 for row in rows)


def unmasked(rows: MaskedRows, i: int) -> tuple[NDArray[np.int64], list[int]]:
    row = rows[i]
    return np.where(row.targets == IGNORE_INDEX, row.ids, row.targets), row.lengths


@pytest.mark.parametrize("packed", [True, False])
def test_every_part_has_its_template(tmp_path: Path, packed: bool) -> None:
    file = token_file(tmp_path / "t", [[10, 11, 12], [20], [*range(30, 45)]])
    rows = MaskedRows(file, 8, plain(100), prefix=[2], suffix=[3], packed=packed)
    unmasked_rows = [unmasked(rows, i) for i in range(len(rows))]
    parts: list[NDArray[np.int64]] = []
    for ids, lengths in unmasked_rows:
        assert sum(lengths) == len(ids) <= 8
        parts += np.split(ids, np.cumsum(lengths)[:-1])
    assert all(part[0] == 2 and part[-1] == 3 and len(part) > 2 for part in parts)
    assert np.concatenate([part[1:-1] for part in parts]).tolist() == file.tokens.tolist()
    assert [len(lengths) for _, lengths in unmasked_rows] == ([2, 1, 1, 1] if packed else [1, 1, 1, 1, 1])
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_a_row_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    """Nor does it depend on when it is read; another draw, seed or row has another mask."""
    file = token_file(tmp_path / "t", [[*range(10, 60)] * 8])
    rows = MaskedRows(file, 40, plain(100), prefix=[2], suffix=[3], seed=7, draw=0)
    together = rows.batch(range(len(rows)))
    valid = together.inputs["tokens"].valid.expand(together.targets.shape)
    for i in range(len(rows)):
        inputs, targets = rows.batch([i])
        assert torch.equal(inputs["ids"][0], together.inputs["ids"][i])
        assert torch.equal(targets[0], together.targets[i])
        assert inputs["tokens"].valid.sum() == valid[i].sum()
    assert not valid.all()
    assert (together.targets[~valid] == IGNORE_INDEX).all()
    again = rows.drawn(1).batch(range(len(rows)))
    assert not torch.equal(again[1], together[1])
    assert torch.equal(rows.drawn(1).drawn(0).batch([2, 1])[1], together[1][[2, 1]])
    other = MaskedRows(file, 40, rows.masking, prefix=[2], suffix=[3], seed=8, draw=0)
    assert not torch.equal(other.batch([0])[1], together[1][:1])


def test_rows_say_what_is_wrong(tmp_path: Path, characters: Tokenizer) -> None:
    file = token_file(tmp_path / "t", [[2, 10, 3]])
    with pytest.raises(DataError, match=r"its documents begin with \[2\], .*encode the text with bos=False"):
        MaskedRows(file, 8, plain(100), prefix=[2], suffix=[3])
    with pytest.raises(DataError, match="rows of 2 tokens have no room for text beside the template's 2"):
        MaskedRows(file, 2, plain(100), prefix=[1], suffix=[3])


def test_text_is_encoded_without_its_template(tmp_path: Path, characters: Tokenizer) -> None:
    (tmp_path / "x.txt").write_text(TEXT, encoding="utf-8")
    encode_corpus(tmp_path / "x.txt", characters, tmp_path / "x", bos=False, eos=False)
    template = characters.template
    rows = MaskedRows(
        TokenFile(tmp_path / "x"), 200, Masking.of(characters), prefix=template.prefix, suffix=template.suffix
    )
    assert [unmasked(rows, i)[0].tolist() for i in range(len(rows))] == [characters.encode(TEXT)]
