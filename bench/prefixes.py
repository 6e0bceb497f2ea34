"""Time to the first token of a prompt whose beginning another request has left in the cache, beside a short cold one.

    python bench/prefixes.py                    # LLaMAs of 1.1 B parameters in bf16: full, window and linear attention
    python bench/prefixes.py 32m --exact
    python bench/prefixes.py 1.1b --kinds full --exact

A prompt of 2050 tokens finds its first 1984, 31 pages, so that 66 are read: what a cold prompt of 66 tokens takes is
what it can reach. Hit and cold prompt are timed in turns; the logits behind the hit are compared with those of a reader
that has stored nothing, which are the same bits with --exact.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headway.attention.linear_attention import LinearAttentionSpec
from headway.cache import PAGE
from headway.generate import Reader
from headway.models import Decoder, build
from headway.patterns import Window
from headway_lab.bench.models import DECODERS

PROMPT, STORED = 2050, 31 * PAGE
KINDS = {
    "full": {},
    "window": {"patterns": Window.last(512)},
    "linear": {"linear": LinearAttentionSpec()},
}


def first_token(reader: Reader, ids: Sequence[int], *, share: bool = True) -> tuple[float, int, Tensor]:
    """Seconds to the logits behind a prompt, how much of it was stored, and the logits."""
    begin = time.perf_counter()
    table = reader.open(ids, shares=share)
    stored = len(table)
    for end in sorted({*(mark for mark in table.marks if mark > stored), len(ids)}):
        rest = ids[len(table) : end]
        wanted = [len(rest) - 1] if end == len(ids) else []
        logits = reader.read([(table, rest)], [wanted]).clone()
        reader.end()
    took = time.perf_counter() - begin
    reader.cache.pool.close(table)
    return took, stored, logits


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="1.1b", choices=DECODERS)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=KINDS)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    for kind in args.kinds:
        spec = replace(DECODERS[args.model], trained_context=4096, **KINDS[kind])
        model = build(spec, dtype=torch.bfloat16, seed=0).eval()
        assert isinstance(model, Decoder)
        draw = torch.Generator().manual_seed(0)
        common, *ends = (
            torch.randint(spec.vocab, (n,), generator=draw).tolist()
            for n in (STORED, *[PROMPT - STORED] * (args.turns + 1))
        )
        reader = Reader(model, keep=1 << 32, exact=args.exact)
        first_token(reader, common)  # a conversation up to the end of a message
        _, stored, logits = first_token(reader, common + ends[0])
        whole, _, cold_logits = first_token(reader, common + ends[0], share=False)
        assert stored == STORED, f"{stored} tokens were found, not {STORED}"
        error = (logits - cold_logits).abs().max().item()
        hits, colds = [], []
        for end in ends[1:]:
            hits.append(first_token(reader, common + end)[0])
            colds.append(first_token(reader, end, share=False)[0])
        hit, cold = statistics.median(hits), statistics.median(colds)
        print(
            f"{kind:7} {len(common) + len(ends[0])} tokens cold {whole:.3f} s; {STORED} of them stored {hit:.3f} s, "
            f"{len(ends[0])} cold {cold:.3f} s: {hit / cold:.2f}x; logits differ by {error:.3g}",
            flush=True,
        )


if __name__ == "__main__":
    main()
