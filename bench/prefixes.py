"""Time to the first token of a prompt whose beginning another request has left in the cache, beside a short cold one.

    python bench/prefixes.py                    # LLaMAs of 1.1 B parameters in bf16: full, window and linear attention
    python bench/prefixes.py 32m --exact
    python bench/prefixes.py 1.1b --kinds full --exact
    python bench/prefixes.py 32m --serve --llama-server PATH    # through HTTP, beside llama.cpp where it has the model

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
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from headway.attention.linear_attention import LinearAttentionSpec
from headway.cache import PAGE
from headway.checkpoints import save_folder
from headway.generate import Reader
from headway.models import Decoder, ModelSpec, build
from headway.patterns import Causal, Window
from headway_lab.bench.client import Ask
from headway_lab.bench.models import DECODERS, Written, words_of
from headway_lab.bench.serving import asked, body, llama_server, ours, served

PROMPT, STORED = 2050, 31 * PAGE
KINDS = {
    "full": {},
    "window": {"patterns": Window.last(512)},
    "linear": {"mixers": LinearAttentionSpec()},
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


def through_http(
    spec: ModelSpec, folder: Path, common: list[int], ends: Sequence[list[int]], llama: str | None
) -> None:
    """Asks `headway serve`, and llama-server where it has the model, for the first token of the same prompts."""
    save_folder(folder / "served", build(spec, dtype=torch.bfloat16, seed=0), tokenizer=words_of(spec.vocab))
    sides = {"headway": (ours, folder / "served")}
    if llama is not None and len(spec.softmax_layers) == spec.layers and {*spec.patterns} == {Causal()}:
        sides["llama-server"] = llama_server(llama), Written("full", folder, spec).served("bf16")
    for name, (command, file) in sides.items():
        with served(command, file, 1, 4096) as port:
            asked(port, [Ask(body(common, 1))], 1)  # a conversation up to the end of a message
            whole, *_ = asked(port, [Ask(body((common + ends[0])[::-1], 1))], 1).told
            hits, colds = [], []
            for end in ends[1:]:
                warm, cold = asked(port, [Ask(body(common + end, 1)), Ask(body(end[::-1], 1))], 1).told
                assert warm.cached >= STORED - 1, f"{warm.cached} tokens were found, not {STORED}"
                hits.append(warm.first)
                colds.append(cold.first)
        tell(name, whole.first, statistics.median(hits), statistics.median(colds), f"{warm.cached} cached")


def tell(name: str, whole: float, hit: float, cold: float, more: str) -> None:
    print(
        f"{name:7} {PROMPT} tokens cold {whole:.3f} s; {STORED} of them stored {hit:.3f} s, {PROMPT - STORED} cold "
        f"{cold:.3f} s: {hit / cold:.2f}x; {more}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="1.1b", choices=DECODERS)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=KINDS)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--llama-server")
    args = parser.parse_args()
    for kind in args.kinds:
        spec = replace(DECODERS[args.model], trained_context=4096, **KINDS[kind])
        draw = torch.Generator().manual_seed(0)
        common, *ends = (
            torch.randint(spec.vocab, (n,), generator=draw).tolist()
            for n in (STORED, *[PROMPT - STORED] * (args.turns + 1))
        )
        if args.serve:
            print(f"{kind}:", flush=True)
            with TemporaryDirectory(prefix="headway-bench-") as folder:
                through_http(spec, Path(folder), common, ends, args.llama_server)
            continue
        model = build(spec, dtype=torch.bfloat16, seed=0).eval()
        assert isinstance(model, Decoder)
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
        tell(kind, whole, statistics.median(hits), statistics.median(colds), f"logits differ by {error:.3g}")


if __name__ == "__main__":
    main()
