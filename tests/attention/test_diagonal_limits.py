"""What the diagonal backend refuses: keys at other slots than the queries, documents whose tokens are not in order."""

import pytest
import torch

from headway import Tokens
from headway.attention import KeyValues
from headway.attention.backends.diagonal import limits
from headway.attention.call import Call
from headway.heads import Heads
from headway.patterns import Causal

ORDER = "the tokens of a document must be contiguous, in order and unique"
SLOTS = "queries and keys must be the same slots"
ROW = Tokens.range(4)


def why(q: Tokens, *keys: Tokens) -> str | None:
    sets = tuple(KeyValues(*(torch.zeros(1, 1, k.count, 2),) * 2, tokens=k) for k in keys)
    return limits(Call(torch.zeros(1, 1, q.count, 2), q, sets, Causal(), Heads(1, 1), 1.0), "cpu")


def packed(index: list[int], documents: list[int]) -> Tokens:
    return Tokens(torch.tensor([index]), torch.tensor([documents]))


def test_one_set_of_keys_at_the_slots_of_the_queries() -> None:
    assert why(ROW, ROW) is None
    assert why(ROW, ROW, ROW) == "it takes one set of keys"
    assert why(ROW, Tokens.range(5)) == SLOTS
    assert why(ROW, Tokens(torch.tensor([[0, 1, 2, 4]]))) == SLOTS
    assert why(packed([0, 1, 0, 1], [0, 0, 1, 1]), packed([0, 1, 0, 1], [0, 0, 1, 2])) == SLOTS


@pytest.mark.parametrize(
    ("index", "documents", "said"),
    [
        ([0, 1, 2, 3], [0, 0, 0, 0], None),
        ([5, 6, 7, 8], [0, 0, 0, 0], None),
        ([0, 1, 0, 1], [0, 0, 1, 1], None),
        ([0, -1, 2, 3], [0, 0, 0, 0], None),  # an empty slot keeps its index
        ([0, -1, 1, 2], [0, 0, 0, 0], ORDER),
        ([0, 2, 1, 3], [0, 0, 0, 0], ORDER),
        ([0, 1, 1, 2], [0, 0, 0, 0], ORDER),
        ([0, 0, 2, 2], [0, 1, 0, 1], None),  # indices are as far apart as the slots
        ([0, 0, 1, 1], [0, 1, 0, 1], ORDER),
        ([0, 1, 0, 2], [0, 0, 1, 1], ORDER),
    ],
)
def test_documents_are_side_by_side_and_in_order(
    index: list[int], documents: list[int], said: str | None
) -> None:
    tokens = packed(index, documents)
    assert why(tokens, tokens) == said
