"""The tests on a pair of tokens that compiled kernels implement, to which leaves of a pattern are lowered.

This table defines the kinds; csrc/headway.h repeats their numbers, csrc/mask.h evaluates them.
"""

from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """An instruction. With k and q the indices of a key and a query in one document, it allows a pair if

    FULL            always
    CAUSAL          k <= q
    WINDOW          first <= k - q <= last, and step divides k - q
    SINK            first <= k < last
    GLOBAL_KEYS     the key is global
    GLOBAL_QUERIES  the query is global
    CHUNK           floor(k / last) = floor(q / last)
    AND, OR         both, or at least one, of the two previous results allow it
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
    """A kind and its numbers; numbers that the kind does not use are 0, 0 and 1."""

    kind: Kind
    first: int = 0
    last: int = 0
    step: int = 1
