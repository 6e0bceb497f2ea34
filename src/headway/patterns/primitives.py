"""The tests on a pair of tokens that compiled kernels know: a leaf of a pattern may be lowered to one.

The table of kinds; csrc/headway.h repeats their numbers, csrc/mask.h evaluates them.
"""

from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """An instruction. With k and q the indices of a key and a query of one document, a pair is allowed where

    FULL            always
    CAUSAL          k <= q
    WINDOW          first <= k - q <= last, and step divides k - q
    SINK            first <= k < last
    GLOBAL_KEYS     the key is global
    GLOBAL_QUERIES  the query is global
    CHUNK           k and q lie in one of the stretches of `last` indices that begin at 0
    AND, OR         both, or one, of the two results before allow it
    """

    FULL = 0
    CAUSAL = 1
    WINDOW = 2
    SINK = 3
    GLOBAL_KEYS = 4
    GLOBAL_QUERIES = 5
    CHUNK = 6
    AND = 7
    OR = 8


class Primitive(NamedTuple):
    """A kind with its numbers; those that it does not read are 0, 0 and 1."""

    kind: Kind
    first: int = 0
    last: int = 0
    step: int = 1
