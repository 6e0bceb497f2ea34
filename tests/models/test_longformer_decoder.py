"""Longformer's claims, row 111: a decoder with windows, dilation and global tokens decodes token by token."""

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

DECODED: list[tuple[Pattern, int]] = [  # patterns, and how far back their windows reach
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
    """Returns which tokens are global: different ones in each row, all in its first page."""
    index = torch.arange(count)
    return torch.stack([(index % (7 + 4 * row) == 3 + row) & (index < 60) for row in range(rows)])


SPLITS = {"steps": [1] * LONG, "prompt": [167, *[1] * 33], "chunks": [5, 122, 31, 1, 3, 38]}
LAYERS = {
    str([pattern for pattern, _ in layers]): layers for layers in (*([d] for d in DECODED), DECODED[:2])
}


@chequered("patterns,split", list(LAYERS), list(SPLITS), of=3)
def test_row_111_decoding_from_pages_is_the_full_forward(patterns: str, split: str) -> None:
    """Tokens are marked global as they come (`next_tokens(n).with_global(mask)`) and stay so in the cache, which holds
    only the pages of the window and of the global tokens, however long the row gets."""
    layers, splits = LAYERS[patterns], SPLITS[split]
    model, row, glob = decoder([pattern for pattern, _ in layers]), ids(2, LONG), global_mask(2, LONG)
    cache, parts, start = model.make_cache(2), [], 0
    with torch.no_grad():
        full = model(row, tokens=Tokens.range(LONG).with_global(glob))
        for n in splits:
            tokens = cache.next_tokens(n).with_global(glob[:, start : start + n])
            parts.append(model(row[:, start : start + n], tokens=tokens, cache=cache))
            start += n
    assert off(torch.cat(parts, 1), full) < EXACT
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
        marked = model(row, tokens=Tokens.range(20).with_global(mark))
        unmarked = model(row)
        assert off(marked[:, :3], unmarked[:, :3]) < EXACT
        assert off(marked[:, 9:], unmarked[:, 9:]) > 1e-3
        cache = model.make_cache(1)
        model(row[:, :10], tokens=cache.next_tokens(10).with_global(mark[:, :10]), cache=cache)
        continued = model(row[:, 10:], cache=cache)  # marks of the past are not given again
    assert off(continued, marked[:, 10:]) < EXACT
