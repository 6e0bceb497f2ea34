"""The pattern Chunk in caches (pages are released at the end of a chunk), and that few files depend on a leaf."""

import re
from pathlib import Path

import headway
from headway.cache import PAGE, CacheSpec, PageClass, PagedCache, choose_cache
from headway.native.build import SOURCES
from headway.patterns import FATES, Causal, Chunk, PerHead, Sink, draw, fates, parse
from headway.tokens import Tokens


def test_pages_are_released_where_a_chunk_ends() -> None:
    """No page is left after a chunk has ended, while a window of as many keys always holds one or more."""
    size = 3 * PAGE
    kind = PageClass((Chunk(size) & Causal()).retention, 1)
    assert [kind.held(n) for n in (1, PAGE, size - 1, size, size + 1, size + PAGE + 1)] == [1, 1, 3, 0, 1, 2]
    cache = PagedCache(CacheSpec(kv_heads=1, head_dim=4), [Chunk(size) & Causal()])
    text, held = cache.pool.open(), []
    for _ in range(7):
        cache.pool.extend(text, [1] * PAGE)
        cache.pool.settle(text)
        held.append([page is not None for page in text.pages[0]].count(True))
    assert held == [1, 2, 0, 1, 2, 0, 1]


def test_it_is_told_and_drawn() -> None:
    pattern = Chunk(3) & Causal()
    assert str(pattern) == "Chunk(3) & Causal()"
    assert parse("Chunk(3)&Causal") == pattern
    assert draw(pattern, 5).splitlines() == ["# . . . .", "# # . . .", "# # # . .", ". . . # .", ". . . # #"]
    assert "no earlier keys but the last 2 of a chunk of 3" in choose_cache(pattern).why
    at = Tokens.range(5)
    rows_of_fates = [[FATES[fate] for fate in row] for row in fates(pattern, at, at)[0, 0].tolist()]
    assert rows_of_fates[1] == ["seen", "seen", "later", "later", "later"]
    assert rows_of_fates[3] == ["released", "released", "released", "seen", "later"]


def test_what_another_head_sees_is_kept() -> None:
    pattern, at = PerHead(Chunk(4) & Causal(), Sink(1) & Causal()), Tokens.range(5)
    states = [[FATES[fate] for fate in row] for row in fates(pattern, at, at)[0, 1].tolist()]
    assert states[3] == ["seen", "kept", "kept", "kept", "later"]
    assert states[4] == ["seen", "released", "released", "released", "kept"]


def test_few_places_know_of_it() -> None:
    """A leaf is a class, a number, and a test of a pair in each language; all other code asks the pattern."""
    root = Path(headway.__file__).parent
    names = r"Kind\.CHUNK\b|HEADWAY_CHUNK\b|\bCHUNK = 6\b|class Chunk\(Pattern\)|headway\.patterns.* import .*\bChunk\b"
    files = {
        str(path.relative_to(root))
        for path in (*root.rglob("*.py"), *SOURCES.iterdir())
        if re.search(names, path.read_text())
    }
    assert files == {
        "__init__.py",
        "patterns/__init__.py",
        "patterns/leaves.py",
        "patterns/primitives.py",
        "patterns/program.py",
        "patterns/text.py",
        "attention/backends/native/plan_arrays.py",
        "attention/backends/triton/kernel.py",
        "integrations/transformers/interface.py",
        "native/csrc/headway.h",
        "native/csrc/mask.h",
    }
