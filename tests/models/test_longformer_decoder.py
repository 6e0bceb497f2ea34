"""Longformer's claims, row 111: a decoder with windows, dilation and global tokens goes on one token at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.cache import PAGE
from headway.models import Decoder, ModelSpec, build, cost
from headway.patterns import Causal, GlobalKeys, Pattern, PerHead, Window
from headway.tokens import Tokens
from tests.checkpoints.hf import off
from tests.models.longformer_rows import EXACT, HEADS, SIZE, ids
from tests.pairwise import chequered

DECODED: list[tuple[Pattern, int]] = [  # and how far back its window reaches
    (Window.last(4) | (Causal() & GlobalKeys()), 3),
    (Window(3, 0, 2) | (Causal() & GlobalKeys()), 6),
    (PerHead(*(Window.last(i + 2, step=i + 1) for i in range(HEADS))) | (Causal() & GlobalKeys()), 16),
    (Window(2, 0, 3), 6),
]


def decoder(patterns: Pattern | Sequence[Pattern]) -> Decoder:
    spec = ModelSpec.of("llama", **{**SIZE, "layers": 2, "kv_heads": 2, "patterns": patterns})
    return build(spec, seed=3, dtype=torch.float64).eval()


LONG = 200


def global_mask(rows: int, count: int) -> Tensor:
    """Which tokens are global: others in each row, in its first page."""
    at = torch.arange(count)
    return torch.stack([(at % (7 + 4 * row) == 3 + row) & (at < 60) for row in range(rows)])


SPLITS = {"steps": [1] * LONG, "prompt": [167, *[1] * 33], "chunks": [5, 122, 31, 1, 3, 38]}
LAYERS = {
    str([pattern for pattern, _ in layers]): layers for layers in (*([d] for d in DECODED), DECODED[:2])
}


@chequered("patterns,split", list(LAYERS), list(SPLITS), of=3)
def test_row_111_decoding_from_pages_is_the_full_forward(patterns: str, split: str) -> None:
    """Tokens are marked global as they come (`next_tokens(n).with_global(mask)`), and stay so in the cache, which
    holds the pages of the window and of the global tokens: no more, however long the row gets."""
    layers, splits = LAYERS[patterns], SPLITS[split]
    model, row, glob = decoder([pattern for pattern, _ in layers]), ids(2, LONG), global_mask(2, LONG)
    cache, parts, at = model.make_cache(2), [], 0
    with torch.no_grad():
        whole = model(row, tokens=Tokens.range(LONG).with_global(glob))
        for n in splits:
            tokens = cache.next_tokens(n).with_global(glob[:, at : at + n])
            parts.append(model(row[:, at : at + n], tokens=tokens, cache=cache))
            at += n
    assert off(torch.cat(parts, 1), whole) < EXACT
    for i, (pattern, reach) in enumerate(layers * (2 // len(layers))):
        pages = 1 + (reach > LONG - 3 * PAGE) + pattern.retention.globals
        assert cache.slots[i] == PAGE * pages, (
            "the last page, one before it, and the first one, of global tokens"
        )
        assert cost.cache_slots(model.spec, 10**6 // PAGE * PAGE)[i] == PAGE


def test_row_111_marks_matter_and_cannot_come_later() -> None:
    model, row = decoder(DECODED[1][0]), ids(1, 20)
    mark = torch.zeros(1, 20, dtype=torch.bool)
    mark[0, 2] = True
    with torch.no_grad():
        with_it = model(row, tokens=Tokens.range(20).with_global(mark))
        without = model(row)
        assert off(with_it[:, :3], without[:, :3]) < EXACT
        assert off(with_it[:, 9:], without[:, 9:]) > 1e-3
        cache = model.make_cache(1)
        model(row[:, :10], tokens=cache.next_tokens(10).with_global(mark[:, :10]), cache=cache)
        rest = model(row[:, 10:], cache=cache)  # nothing is said of the past again
    assert off(rest, with_it[:, 10:]) < EXACT
