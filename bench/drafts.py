"""Decoding with n-gram drafts and without, in turns: a text that repeats itself, and one that does not.

    python bench/drafts.py                      # a LLaMA of 1.1 B parameters in bf16, one row
    python bench/drafts.py 32m --tokens 256
    python bench/drafts.py FOLDER --prompt "Once upon a time"

The text that repeats itself is greedy. A folder's model writes what it has learned, more or less often the same; a
model of random weights gets such weights that it writes one passage of 32 tokens again and again, at the cost of any
other, and its ratio is what can be reached. At temperature 1 nothing comes twice. Both sides write the same tokens
(drafts change none), which is checked.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import headway
from headway.generate import GenerationConfig, NgramDraft, Sampling, generate
from headway.models import build
from headway_lab.bench.models import DECODERS

TEXTS = {"does not repeat itself": Sampling(temperature=1.0), "repeats itself": Sampling()}
PASSAGE = range(5, 37)


@torch.no_grad()
def recite(model: Any, passage: Sequence[int]) -> None:
    """Let each token be followed by the next of the passage: blocks add nothing, and the row of an id in the output
    layer is the embedding of the one before it."""
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    embedding, output = (
        model.get_parameter("model.embed_tokens.weight"),
        model.get_parameter("lm_head.weight"),
    )
    output[[*passage[1:], passage[0]]] = embedding[list(passage)]


def opened(args: argparse.Namespace) -> tuple[Any, list[int]]:
    """The model and its prompt."""
    if args.model in DECODERS:
        return build(DECODERS[args.model], dtype=torch.bfloat16, seed=0).eval(), list(PASSAGE)
    language = headway.load(args.model)
    return language.model, language.tokenizer.encode(args.prompt)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="1.1b", help=f"{', '.join(DECODERS)}, or a folder")
    parser.add_argument("--prompt", default="The", help="of a folder's model")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    model, prompt = opened(args)
    print(
        f"{args.model}, {args.tokens} tokens, {torch.get_num_threads()} threads, medians of {args.turns} turns\n"
    )
    print(
        "| text | plain tok/s | drafts tok/s | ratio | drafted | accepted |\n| --- | --- | --- | --- | --- | --- |"
    )
    for name, sampling in TEXTS.items():
        if args.model in DECODERS and not sampling.temperature:
            recite(model, PASSAGE)
        config = GenerationConfig(max_new_tokens=args.tokens, sampling=sampling)
        sides: Mapping[str, NgramDraft | None] = {"plain": None, "drafts": NgramDraft()}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        made = {}
        for _ in range(args.turns):
            for side, draft in sides.items():
                begun = time.perf_counter()
                made[side] = generate(model, [prompt], config, draft=draft)[0]
                seconds[side].append(time.perf_counter() - begun)
        assert made["plain"].ids == made["drafts"].ids
        plain, drafts = (len(made[side].ids) / statistics.median(seconds[side]) for side in sides)
        print(
            f"| {name} | {plain:.1f} | {drafts:.1f} | {drafts / plain:.2f} | {made['drafts'].drafted} "
            f"| {made['drafts'].accepted} |"
        )


if __name__ == "__main__":
    main()
