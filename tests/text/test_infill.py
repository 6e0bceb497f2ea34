"""Filling a gap: the tokens of a vocabulary, in the order of its family, and text that never becomes one of them."""

import pytest

from headway.errors import DataError
from headway.text import Tokenizer, infill, train_bpe
from headway.text.infill import FILE, FORMS
from tests.text.conftest import CORPUS, byte_level


def marked(*marks: str) -> Tokenizer:
    return train_bpe(CORPUS, 330, special_tokens=list(marks))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form[0]))
def test_each_family_has_its_order(form: tuple[str, ...]) -> None:
    marks = [part for part in form if part not in ("before", "behind")]
    tokenizer = marked(*marks)
    ids = infill(tokenizer, "the cat ", f"sat{marks[0]}")
    texts = {"before": "the cat ", "behind": f"sat{marks[0]}"}
    bos = "" if not tokenizer.begins_with_bos else tokenizer.token(tokenizer.need("bos"))
    assert tokenizer.decode(ids, special=True) == bos + "".join(texts.get(part, part) for part in form)
    for mark in marks:
        assert ids.count(tokenizer.backend.token_to_id(mark)) == 1, "text of a user is text"


def test_other_files_stand_before() -> None:
    marks = [part for part in FORMS[0] if part not in ("before", "behind")]
    files = [("a.py", "x"), ("b.py", "y")]
    with_mark, without = marked(*marks, FILE), marked(*marks)
    text = with_mark.decode(infill(with_mark, "1", "2", files), special=True)
    assert text.endswith(f"{FILE}a.py\nx{FILE}b.py\ny{marks[0]}1{marks[1]}2{marks[2]}")
    text = without.decode(infill(without, "1", "2", files[:1]), special=True)
    assert text.endswith(f"\n\n--- snippet ---\n\nx{marks[0]}1{marks[1]}2{marks[2]}")


def test_a_vocabulary_without_such_tokens_refuses() -> None:
    with pytest.raises(DataError, match=r"none of the tokens <\|fim_prefix\|>, "):
        infill(byte_level(), "a", "b")
