"""Windowed attention, headway against torch with a mask: time, share of the machine's GEMM peak, memory.

    python bench/attention.py --tokens 2048 8192 --window 512 --dtype float32 bfloat16 --threads 1

Work counts what the pattern allows: 4 * D FLOPs per pair and head forward (two products), 2.5 times that backward
(five), so an answer that computes the rest and throws it away earns nothing for it. The peak is the best matrix
product of torch in that dtype at the same thread count, measured in the same run. A time is the median over repeats
that take turns; memory is what a process of its own held at its highest, above what it held before the call.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from headway import hardware
from headway.attention import attend
from headway.patterns import Window, pairs, visible
from headway.report import size, table
from headway.tokens import Tokens


def inputs(tokens: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = (heads, kv_heads, kv_heads)
    return [torch.randn(1, n, tokens, width).to(dtype).requires_grad_() for n in shapes]


def headway_call(qkv: list[Tensor], window: int) -> Callable[[], Tensor]:
    return lambda: attend(*qkv, Window.last(window), backend="banded")


def torch_call(qkv: list[Tensor], window: int) -> Callable[[], Tensor]:
    """The mask is made once, outside of the time, and counts in the memory."""
    at = Tokens.range(qkv[0].shape[2])
    mask = visible(Window.last(window), at, at)
    grouped = qkv[0].shape[1] != qkv[1].shape[1]
    return lambda: F.scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=grouped)


SIDES = {"headway": headway_call, "torch": torch_call}


def once(call: Callable[[], Tensor], qkv: list[Tensor], backward: bool) -> float:
    for t in qkv:
        t.grad = None
    begin = time.perf_counter()
    with torch.set_grad_enabled(backward):
        out = call()
    if backward:
        out.backward(out.detach())
    return time.perf_counter() - begin


def timed(qkv: list[Tensor], window: int, backward: bool, repeats: int) -> dict[str, float]:
    """Median seconds of each side, after one call to warm up."""
    calls = {name: make(qkv, window) for name, make in SIDES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            took = once(call, qkv, backward)
            if repeat:
                seconds[name].append(took)
    return {name: statistics.median(took) for name, took in seconds.items()}


def peak_memory(arguments: argparse.Namespace, side: str, tokens: int, dtype: str) -> int:
    """Bytes that forward + backward holds at its highest, in a process of its own."""
    shape = [str(n) for n in (tokens, arguments.heads, arguments.kv_heads, arguments.width)]
    command = [sys.executable, __file__, "--hold", side, *shape, dtype, str(arguments.window)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def hold(side: str, tokens: str, heads: str, kv_heads: str, width: str, dtype: str, window: str) -> int:
    small = inputs(min(int(tokens), 256), int(heads), int(kv_heads), int(width), getattr(torch, dtype))
    once(SIDES[side](small, int(window)), small, backward=True)
    qkv = inputs(int(tokens), int(heads), int(kv_heads), int(width), getattr(torch, dtype))
    before = hardware.peak_rss()
    once(SIDES[side](qkv, int(window)), qkv, backward=True)
    return hardware.peak_rss() - before


def measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for dtype in arguments.dtype:
        peak = hardware.gemm_peak(getattr(torch, dtype))
        for tokens in arguments.tokens:
            qkv = inputs(tokens, arguments.heads, arguments.kv_heads, arguments.width, getattr(torch, dtype))
            work = 4 * arguments.width * arguments.heads * pairs(Window.last(arguments.window), tokens)
            memory = {side: peak_memory(arguments, side, tokens, dtype) for side in SIDES}
            for backward in (False, True):
                seconds = timed(qkv, arguments.window, backward, arguments.repeats)
                flops = work * (3.5 if backward else 1)
                rows.append(
                    {
                        "dtype": dtype,
                        "tokens": tokens,
                        "pass": "f+b" if backward else "f",
                        "headway ms": seconds["headway"] * 1e3,
                        "torch ms": seconds["torch"] * 1e3,
                        "ratio": seconds["torch"] / seconds["headway"],
                        "headway share": flops / seconds["headway"] / peak,
                        "torch share": flops / seconds["torch"] / peak,
                        "headway memory": memory["headway"] if backward else None,
                        "torch memory": memory["torch"] if backward else None,
                    }
                )
                print(f"measured {dtype} {tokens} {rows[-1]['pass']}", file=sys.stderr)
    return rows


def text(rows: list[dict[str, object]]) -> str:
    def cell(name: str, value: object) -> object:
        if value is None:
            return ""
        if isinstance(value, float):
            return f"{value:.1%}" if name.endswith("share") else f"{value:.1f}"
        return size(value) if isinstance(value, int) and name.endswith("memory") else value

    return table(list(rows[0]), [[cell(name, value) for name, value in row.items()] for row in rows])


def main() -> None:
    if sys.argv[1:2] == ["--hold"]:
        print(hold(*sys.argv[2:]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--window", type=int, default=512, help="keys that a query sees, itself included")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="per head")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows = measure(arguments)
    where = (
        f"{hardware.cpu_name()}, {arguments.threads} threads, torch {torch.__version__}, {platform.system()}"
    )
    if arguments.json:
        print(
            json.dumps({"machine": where, "window": arguments.window, "heads": arguments.heads, "rows": rows})
        )
        return
    print(where)
    print(
        f"window {arguments.window}, {arguments.heads} heads over {arguments.kv_heads}, {arguments.width} wide"
    )
    print(text(rows))


if __name__ == "__main__":
    main()
