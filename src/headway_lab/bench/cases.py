"""What is measured, as a table: one `Case` per line. Nothing here computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway.errors import ConfigError, did_you_mean
from headway.patterns import And, Causal, Global, Or, Pattern, Window

FLOAT32, BFLOAT16 = "float32", "bfloat16"
BOTH = (FLOAT32, BFLOAT16)
CAUSAL = Causal()
FORWARD, TRAIN = "forward", "forward+backward"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure, beside its peers.

    name      what `--case` calls it
    says      what it shows, in one line
    kind      "attention", "decode" (one query after `tokens` cached keys), "longformer" and "longformer-core"
              (a layer of transformers), "mistral" (a training step), which `problems` builds
    layout    what the tokens are: "plain", "global" (the first `globals` are), "packed" (documents of unequal
              lengths in a row), "ragged" (four rows of unequal lengths, padded)
    kv_dtype  what the caches of "decode" hold, unless it is the row's dtype: "int8"
    peers     names of `peers.PEERS`
    against   another case whose time is set beside this one's
    per_pair  compare with `against` per allowed pair, not per call
    ease      factor on the floors of the peers, for shapes on which they are known to be slower
    quick     tokens at which `--quick` measures it; None leaves it out there
    level     CPU level of the native library that is forced, in a process of its own
    """

    name: str
    says: str
    kind: str = "attention"
    pattern: Pattern = CAUSAL
    tokens: int = 8192
    width: int = 64
    heads: int = 8
    kv_heads: int = 8
    batch: int = 1
    layout: str = "plain"
    globals: int = 0
    layers: int = 1
    kv_dtype: str | None = None
    passes: tuple[str, ...] = (FORWARD, TRAIN)
    dtypes: tuple[str, ...] = BOTH
    peers: tuple[str, ...] = ()
    against: str | None = None
    per_pair: bool = False
    ease: float = 1.0
    quick: int | None = None
    level: str | None = None

    def at(self, tokens: int) -> Case:
        """The same case at another length; a window wider than a quarter of it shrinks to that."""
        return replace(
            self,
            tokens=tokens,
            pattern=narrowed(self.pattern, max(1, tokens // 4)),
            globals=min(self.globals, max(1, tokens // 8)),
        )

    def beside(self, peers: Sequence[str]) -> Case:
        """The same case beside these of its peers only."""
        return replace(self, peers=tuple(peer for peer in self.peers if peer in peers))

    def label(self, direction: str) -> str:
        """What a row of this case is called."""
        return f"{self.name} n={self.tokens} {direction}"


def narrowed(pattern: Pattern, reach: int) -> Pattern:
    """`pattern` with no window that reaches further than `reach` positions."""
    if isinstance(pattern, Window):
        most = max(1, reach // pattern.step)
        return Window(min(pattern.before, most), min(pattern.after, most), pattern.step)
    if isinstance(pattern, And | Or):
        return type(pattern)(tuple(narrowed(part, reach) for part in pattern.parts))
    return pattern


LAST, AROUND = Window.last(512), Window.around(256)
LONGFORMER = Case(
    name="longformer",
    says="a self-attention layer of transformers' Longformer with its projections, one global token",
    kind="longformer",
    pattern=AROUND,
    tokens=16384,
    heads=12,
    kv_heads=12,
    globals=1,
    passes=(FORWARD,),
    dtypes=(FLOAT32,),
    peers=("transformers",),
)
LOCAL = replace(LONGFORMER, name="longformer-local", says="the same without a global token", globals=0)

CASES: tuple[Case, ...] = (
    Case(name="causal", says="full causal attention, heads of 64", peers=("sdpa",), quick=2048),
    Case(name="causal-128", says="full causal attention, heads of 128", width=128, peers=("sdpa",)),
    Case(
        name="window",
        says="a causal window of 512",
        pattern=LAST,
        peers=("chunks", "flex", "mask"),
        quick=4096,
    ),
    Case(
        name="window-128",
        says="the same with heads of 128",
        pattern=LAST,
        width=128,
        peers=("chunks", "flex"),
    ),
    Case(
        name="window-narrow",
        says="a causal window of 128",
        pattern=Window.last(128),
        peers=("chunks", "flex"),
        ease=0.4,
    ),
    Case(
        name="window-around",
        says="256 keys on either side",
        pattern=AROUND,
        peers=("chunks", "flex", "mask"),
    ),
    Case(
        name="grouped",
        says="8 query heads over 2 kv heads, window 512: no slower than 8 over 8",
        pattern=LAST,
        kv_heads=2,
        peers=("chunks", "mask"),
        against="window",
    ),
    Case(
        name="global",
        says="16 global tokens besides 256 on either side: what they add to the time",
        pattern=AROUND | Global(),
        layout="global",
        globals=16,
        peers=("mask",),
        against="window-around",
    ),
    Case(
        name="dilated",
        says="a window of 512 keys, 4 apart: cost per pair against no dilation",
        pattern=Window.last(512, step=4),
        peers=("flex", "mask"),
        against="window",
        per_pair=True,
        ease=0.2,
    ),
    Case(
        name="packed",
        says="documents of unequal lengths in one row: cost per pair against one causal row",
        layout="packed",
        against="causal",
        per_pair=True,
    ),
    Case(
        name="ragged",
        says="four padded rows of unequal lengths: cost per pair against one causal row",
        layout="ragged",
        batch=4,
        tokens=4096,
        against="causal",
        per_pair=True,
    ),
    Case(
        name="train-256",
        says="2 rows of 256 tokens with 24 heads, as 48 heads",
        tokens=256,
        heads=48,
        kv_heads=48,
        peers=("sdpa",),
        ease=0.4,
        quick=256,
    ),
    Case(
        name="train-512",
        says="2 rows of 512 tokens with 16 heads, as 32 heads",
        tokens=512,
        heads=32,
        kv_heads=32,
        peers=("sdpa",),
        ease=0.4,
    ),
    Case(
        name="train-1024",
        says="2 rows of 1024 tokens with 12 heads, as 24 heads",
        tokens=1024,
        heads=24,
        kv_heads=24,
        peers=("sdpa",),
        ease=0.4,
    ),
    Case(
        name="decode-4",
        says="one query after 8192 cached keys, 32 query heads over 4 kv heads",
        kind="decode",
        width=128,
        heads=32,
        kv_heads=4,
        passes=(FORWARD,),
        dtypes=(BFLOAT16, FLOAT32),
        peers=("rows", "rows-sdpa", "gqa"),
        quick=8192,
    ),
    Case(
        name="decode-8",
        says="the same over 8 kv heads",
        kind="decode",
        width=128,
        heads=32,
        kv_heads=8,
        passes=(FORWARD,),
        dtypes=(BFLOAT16, FLOAT32),
        peers=("rows", "rows-sdpa", "gqa"),
    ),
    *(
        Case(
            name=f"decode-{kv_heads}-int8",
            says=f"decode-{kv_heads} over an int8 cache, a scale per key and kv head",
            kind="decode",
            width=128,
            heads=32,
            kv_heads=kv_heads,
            kv_dtype="int8",
            passes=(FORWARD,),
            dtypes=(BFLOAT16,),
            peers=("dequantised", "rows", "rows-sdpa", "gqa"),
            against=f"decode-{kv_heads}",
            ease=0.5,
        )
        for kv_heads in (4, 8)
    ),
    LONGFORMER,
    LOCAL,
    replace(
        LOCAL,
        name="longformer-core",
        says="its attention alone, from projected queries, keys and values",
        kind="longformer-core",
    ),
    Case(
        name="mistral",
        says="a training step of a small Mistral of transformers, window 512, 1 x 8192",
        kind="mistral",
        pattern=LAST,
        heads=16,
        kv_heads=4,
        layers=2,
        passes=(TRAIN,),
        dtypes=(FLOAT32, BFLOAT16),
        peers=("transformers",),
    ),
    Case(
        name="causal-avx2",
        says="full causal attention with the AVX2 library forced, against AVX2's own peak",
        passes=(FORWARD,),
        dtypes=(FLOAT32,),
        peers=("sdpa",),
        level="avx2",
    ),
)
NAMES = tuple(case.name for case in CASES)


def named(name: str) -> Case:
    """The case of that name. Raises ConfigError, with the names that there are."""
    for case in CASES:
        if case.name == name:
            return case
    raise ConfigError(f"bench: no case {name!r}{did_you_mean(name, NAMES)}; cases are {', '.join(NAMES)}")


SLOW = ("flex", "mask")
"""Peers that `--quick` has no time for: one is compiled, the other computes every pair."""


def chosen(names: Sequence[str] = (), *, quick: bool = False, tokens: int | None = None) -> list[Case]:
    """The cases to measure: all or those of `names`; `quick` takes its own sizes, `tokens` overrides all."""
    cases = [named(name) for name in names] if names else list(CASES)
    if quick:
        cases = [case.at(case.quick) if case.quick else case for case in cases if names or case.quick]
        cases = [case.beside([peer for peer in case.peers if peer not in SLOW]) for case in cases]
    return [case.at(tokens) if tokens else case for case in cases]
