"""`accelerate` beside the same model as it was, on this CPU: decoding, and a training step.

    python bench/accelerated.py                     # widths of LLaMA 1.1 B (8 layers of 22), and a LLaMA of 32 M
    python bench/accelerated.py --only decode --layers 22 --rounded

All sides are in one process and share one set of weights (8 and 4 bits lie beside them); they take turns, and every
turn begins with the next side. Ratios are medians over the turns. `transformers` runs as it comes: torch's fused
attention (sdpa), AdamW fused. A token of decoding is what `generate` takes for one more; a training step is forward,
loss, backward and AdamW.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

PLAIN = "transformers"
DECODE = {"width": 2048, "heads": 32, "kv_heads": 4, "hidden": 5632, "vocab": 32000}
TRAIN = {"width": 512, "heads": 8, "kv_heads": 4, "hidden": 1408, "vocab": 8192}
SMALL = {"width": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "vocab": 256}
PROMPT, RATE = 64, 1e-9

Sides = Mapping[str, Callable[[], float]]
"""What a side does in its turn; seconds."""


def llama(sizes: dict[str, int], layers: int, dtype: torch.dtype) -> Any:
    """A LLaMA of transformers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes["vocab"], hidden_size=sizes["width"], intermediate_size=sizes["hidden"],
        num_hidden_layers=layers, num_attention_heads=sizes["heads"], num_key_value_heads=sizes["kv_heads"],
        max_position_embeddings=4096, bos_token_id=1, eos_token_id=None, pad_token_id=0, dtype=dtype,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def sharing(model: nn.Module) -> Any:
    """Another model on the same parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def decode_sides(args: argparse.Namespace) -> Sides:
    from headway.integrations.transformers import accelerate

    sizes = SMALL if args.small else DECODE
    plain = llama(sizes, args.layers, torch.bfloat16).eval()
    models = {PLAIN: plain}
    for weights in (None, "compressed", *(("int8", "int4") if args.rounded else ())):
        models[weights or "accelerated"] = model = sharing(plain)
        accelerate(model, weights)
    ids = torch.randint(2, sizes["vocab"], (args.rows, PROMPT))

    def seconds(model: Any, count: int) -> float:
        begin = time.perf_counter()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return time.perf_counter() - begin

    def token(model: Any) -> Callable[[], float]:
        return lambda: (seconds(model, args.tokens + 2) - seconds(model, 2)) / args.tokens

    return {name: token(model) for name, model in models.items()}


def train_sides(args: argparse.Namespace, dtype: torch.dtype) -> Sides:
    from headway.integrations.transformers import accelerate

    sizes = SMALL if args.small else TRAIN
    plain = llama(sizes, 8, dtype).train()
    models = {PLAIN: plain, "accelerated": sharing(plain)}
    accelerate(models["accelerated"])
    optimizer = torch.optim.AdamW(plain.parameters(), lr=RATE, fused=True)
    ids = torch.randint(2, sizes["vocab"], (8, 32 if args.small else 512))

    def step(model: Any) -> Callable[[], float]:
        def run() -> float:
            begin = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return time.perf_counter() - begin

        return run

    return {name: step(model) for name, model in models.items()}


def table(title: str, sides: Sides, turns: int) -> None:
    """Prints a line for each side: its median, and how many times as fast as transformers it is."""
    for run in sides.values():
        run()
    names, found = [*sides], {name: list[float]() for name in sides}
    for turn in range(turns):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            found[name].append(sides[name]())
    print(f"\n| {title} | ms | times as fast | least and most of the turns |\n|---|---|---|---|")
    for name, times in found.items():
        ratios = [a / b for a, b in zip(found[PLAIN], times, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(
            f"| {name} | {1e3 * statistics.median(times):.1f} | {statistics.median(ratios):.2f} | {spread} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("decode", "train"), help="one of the two")
    parser.add_argument("--layers", type=int, default=8, help="of the model that decodes")
    parser.add_argument(
        "--rounded",
        action="store_true",
        help="decode with weights of 8 and 4 bits, too; they take minutes to make",
    )
    parser.add_argument("--rows", type=int, default=1, help="that are decoded")
    parser.add_argument("--tokens", type=int, default=16, help="of each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="tiny models: does it run?")
    args = parser.parse_args()
    if args.only != "train":
        table(f"decoding, bf16, {args.layers} layers, {args.rows} x 1", decode_sides(args), args.turns)
    if args.only != "decode":
        table("training step, weights in bf16", train_sides(args, torch.bfloat16), args.turns)
        table("training step, autocast in bf16", train_sides(args, torch.float32), args.turns)


if __name__ == "__main__":
    main()
