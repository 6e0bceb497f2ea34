"""The table of cases that `headway bench attention` measures; docs/benchmarks.md describes them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from headway.patterns import Causal, Global, Pattern, Window
from headway.patterns.primitives import Kind
from headway.patterns.program import mapped

FLOAT32, BFLOAT16 = "float32", "bfloat16"
BOTH = (FLOAT32, BFLOAT16)
CAUSAL = Causal()
FORWARD, TRAIN = "forward", "forward+backward"
SLOW = ("flex", "mask")
"""Peers that `--quick` skips: one is compiled, the other computes every pair."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case to measure, compared with its peers.

    name          its name for `--case`
    kind          "attention", or "decode" (one query after `tokens` cached keys)
    layout        the tokens: "plain", "global" (the first `globals` are global), "packed" (documents of unequal lengths
                  in a row), "ragged" (four rows of unequal lengths, padded)
    kv_dtype      dtype of the caches of "decode": "int8", or None for the row's dtype
    peers         names of `peers.PEERS`, or of `attention.decode`'s
    against       name of another case, timed in the same turns
    per_pair      whether `against` is compared per allowed pair, not per call
    quick         number of tokens with `--quick`; None leaves the case out there
    """

    name: str
    kind: str = "attention"
    pattern: Pattern = CAUSAL
    tokens: int = 8192
    width: int = 64
    heads: int = 8
    kv_heads: int = 8
    batch: int = 1
    layout: str = "plain"
    globals: int = 0
    kv_dtype: str | None = None
    passes: tuple[str, ...] = (FORWARD, TRAIN)
    dtypes: tuple[str, ...] = BOTH
    peers: tuple[str, ...] = ()
    against: str | None = None
    per_pair: bool = False
    quick: int | None = None

    def at(self, tokens: int) -> "Case":
        """Returns the same case at another length; windows wider than a quarter of it shrink to that."""
        return replace(
            self,
            tokens=tokens,
            pattern=narrowed(self.pattern, max(1, tokens // 4)),
            globals=min(self.globals, max(1, tokens // 8)),
        )

    def with_peers(self, peers: Iterable[str]) -> "Case":
        """Returns the same case with only these of its peers."""
        return replace(self, peers=tuple(peer for peer in self.peers if peer in peers))

    def sized(self, *, quick: bool = False, tokens: int | None = None) -> "Case":
        """Returns the case as `--quick` measures it if `quick`, and at length `tokens` if given."""
        case = self.at(self.quick) if quick and self.quick else self
        case = case.with_peers(set(case.peers) - set(SLOW)) if quick else case
        return case.at(tokens) if tokens else case

    def label(self, direction: str) -> str:
        """Returns the name of a row of this case."""
        return f"{self.name} n={self.tokens} {direction}"


def narrowed(pattern: Pattern, reach: int) -> Pattern:
    """Returns `pattern` with all windows limited to a reach of `reach` positions."""

    def narrow(leaf: Pattern) -> Pattern:
        p = leaf.primitive
        if p is None or p.kind != Kind.WINDOW:
            return leaf
        most = max(1, reach // p.step)
        return Window(min(-p.first // p.step, most), min(p.last // p.step, most), p.step)

    return mapped(pattern, narrow)


LAST, AROUND = Window.last(512), Window.around(256)


TRAINING = Case(name="train", peers=("sdpa",))
DECODE = Case(
    name="decode-4",
    kind="decode",
    width=128,
    heads=32,
    kv_heads=4,
    passes=(FORWARD,),
    dtypes=(BFLOAT16, FLOAT32),
    peers=("rows", "rows-sdpa", "gqa"),
)
DECODE_INT8 = replace(
    DECODE,
    name="decode-4-int8",
    kv_dtype="int8",
    dtypes=(BFLOAT16,),
    peers=("dequantized", *DECODE.peers),
    against="decode-4",
)

_CASES = (
    Case(name="causal", peers=("sdpa",), quick=2048),
    Case(name="causal-128", width=128, peers=("sdpa",)),
    Case(name="window", pattern=LAST, peers=("chunks", "flex", "mask"), quick=4096),
    Case(name="window-128", pattern=LAST, width=128, peers=("chunks", "flex")),
    Case(name="window-narrow", pattern=Window.last(128), peers=("chunks", "flex")),
    Case(name="window-around", pattern=AROUND, peers=("chunks", "flex", "mask")),
    Case(name="grouped", pattern=LAST, kv_heads=2, peers=("chunks", "mask"), against="window"),
    Case(
        name="global",
        pattern=AROUND | Global(),
        layout="global",
        globals=16,
        peers=("mask",),
        against="window-around",
    ),
    Case(
        name="dilated",
        pattern=Window.last(512, step=4),
        peers=("flex", "mask"),
        against="window",
        per_pair=True,
    ),
    Case(name="packed", layout="packed", against="causal", per_pair=True),
    Case(name="ragged", layout="ragged", batch=4, tokens=4096, against="causal", per_pair=True),
    replace(TRAINING, name="train-256", tokens=256, heads=48, kv_heads=48, quick=256),
    replace(TRAINING, name="train-512", tokens=512, heads=32, kv_heads=32),
    replace(TRAINING, name="train-1024", tokens=1024, heads=24, kv_heads=24),
    replace(DECODE, quick=8192),
    replace(DECODE, name="decode-8", kv_heads=8),
    DECODE_INT8,
    replace(DECODE_INT8, name="decode-8-int8", kv_heads=8, against="decode-8"),
)
CASES: Mapping[str, Case] = {case.name: case for case in _CASES}
