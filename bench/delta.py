"""A layer of the gated delta rule, forward and backward, beside that of `transformers`; and the bytes of its states
that a step of decoding moves.

    python bench/delta.py rule                            # 16 heads of 128, 4096 tokens: the rule alone, in turns
    python bench/delta.py layer                           # 16 heads of 128, 4096 tokens: time and memory, in turns
    python bench/delta.py length --lengths 4096 131072    # memory by length
    python bench/delta.py decode                          # rows and layers whose states are 256 MiB in all

`layer`: both have the same weights, which are checked to give the same output; each turn is a process of its own, whose
highest memory is told beyond what it had before the first pass (allocations of 1 MiB and more are returned when they
are freed, on both sides: glibc otherwise keeps some of up to 32 MiB in pieces). transformers 5.23 has no kernel for
CPUs: its layer is its loop over chunks in float32. `decode`: bytes read and written per second beside a copy of as
many, in turns.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headway.attention.delta import DeltaSpec, delta_attend
from headway.native import interface as c
from headway.native.loader import library
from headway.nn import GatedDelta

HEADS, SIZE, WIDTH = 16, 128, 2048
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def ours(dtype: torch.dtype) -> GatedDelta:
    """The layer, whose numbers do not depend on the type."""
    torch.manual_seed(0)
    layer = GatedDelta(WIDTH, DeltaSpec(heads=HEADS, key_heads=HEADS, head_dim=SIZE))
    for parameter in layer.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return layer.to(dtype)


def theirs(dtype: torch.dtype) -> nn.Module:
    """The layer of transformers with the weights of `ours`."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    sizes = {"linear_num_value_heads": HEADS, "linear_num_key_heads": HEADS, "linear_conv_kernel_dim": 4}
    sizes |= {"linear_key_head_dim": SIZE, "linear_value_head_dim": SIZE, "hidden_size": WIDTH}
    config = Qwen3_5TextConfig(num_hidden_layers=1, layer_types=["linear_attention"], **sizes)
    layer, source = Qwen3_5GatedDeltaNet(config, 0), ours(torch.float32)
    weights = {
        "in_proj_qkv.weight": torch.cat([source.q_proj.matrix, source.k_proj.matrix, source.v_proj.matrix]),
        "in_proj_z.weight": source.gate_proj.matrix,
        "in_proj_b.weight": source.beta_proj.matrix,
        "in_proj_a.weight": source.decay_proj.matrix,
        "conv1d.weight": torch.cat([source.q_conv, source.k_conv, source.v_conv]).unsqueeze(1),
        "dt_bias": source.decay_bias,
        "A_log": source.log_rate,
        "norm.weight": source.norm.weight,
        "out_proj.weight": source.o_proj.matrix,
    }
    layer.load_state_dict({name: t.detach() for name, t in weights.items()})
    made: nn.Module = layer.to(dtype)
    return made


def memory(name: str) -> float:
    """MiB of this process: VmHWM, the most so far, or VmRSS, now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name + ":"))


def one(side: str, dtype: str, tokens: int, passes: int) -> dict[str, Any]:
    """Median seconds of forward and backward, MiB beyond what there was before, and the output's first numbers."""
    layer = (ours if side == "headway" else theirs)(TYPES[dtype])
    x = torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(1)).to(TYPES[dtype])
    x.requires_grad_()
    layer(x[:, :64]).sum().backward()  # what is set up once
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, seconds = memory("VmRSS"), []
    for _ in range(passes):
        layer.zero_grad(set_to_none=True)
        x.grad = None
        begin = time.perf_counter()
        out = layer(x)
        out.backward(torch.ones_like(out))
        seconds.append(time.perf_counter() - begin)
    some = out[0, -1, :64].detach().float().tolist()
    return {"seconds": statistics.median(seconds), "mib": memory("VmHWM") - before, "out": some}


def in_process(*arguments: str) -> dict[str, Any]:
    """`one` in a process of its own."""
    returns = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, env=returns)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def layer(turns: int, tokens: int, passes: int, threads: int) -> None:
    """Both layers in turns."""
    for dtype in TYPES:
        results: dict[str, list[dict[str, Any]]] = {"headway": [], "transformers": []}
        for _ in range(turns):
            for side, rows in results.items():
                rows.append(in_process("one", side, dtype, str(tokens), str(passes), str(threads)))
        seconds, mib = (
            {side: statistics.median(row[what] for row in rows) for side, rows in results.items()}
            for what in ("seconds", "mib")
        )
        a, b = (torch.tensor(rows[0]["out"]) for rows in results.values())
        apart = float((a - b).abs().max() / b.abs().max())
        print(
            f"{dtype} {tokens} tokens: headway {seconds['headway']:.3f} s {mib['headway']:.0f} MiB, transformers "
            f"{seconds['transformers']:.3f} s {mib['transformers']:.0f} MiB: "
            f"{seconds['transformers'] / seconds['headway']:.1f}x as fast, "
            f"{mib['headway'] / mib['transformers']:.2f}x its memory; outputs {apart:.1e} apart",
            flush=True,
        )


def length(lengths: list[int], threads: int) -> None:
    """Memory and time by length."""
    for dtype in TYPES:
        for tokens in lengths:
            row = in_process("one", "headway", dtype, str(tokens), "1", str(threads))
            print(
                f"{dtype} {tokens:7} tokens: {row['seconds']:.2f} s, {row['mib']:.0f} MiB, "
                f"{row['mib'] * 2**20 / tokens / WIDTH:.1f} bytes for each number of x",
                flush=True,
            )


def rule(dtype: str, turns: int, tokens: int) -> None:
    """The rule alone, forward and backward, beside the function of transformers on the same numbers, in turns."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as their_rule

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, tokens, SIZE).to(TYPES[dtype]).requires_grad_() for _ in range(3))
    decay, beta = -torch.rand(1, HEADS, tokens) / 4, torch.rand(1, HEADS, tokens)
    as_theirs = [t.transpose(1, 2) for t in (q, k, v, decay, beta)]
    sides: dict[str, Callable[[], Tensor]] = {
        "headway": lambda: delta_attend(q, k, v, decay, beta, unit_eps=1e-6).out,
        "transformers": lambda: their_rule(*as_theirs, use_qk_l2norm_in_kernel=True)[0].transpose(1, 2),
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    outs = {}
    for _ in range(turns):
        for side, run in sides.items():
            begin = time.perf_counter()
            outs[side] = run()
            torch.autograd.grad(outs[side], (q, k, v), torch.ones_like(outs[side]))
            seconds[side].append(time.perf_counter() - begin)
    took = {side: statistics.median(some) for side, some in seconds.items()}
    a, b = (out.float() for out in outs.values())
    print(
        f"{dtype} {tokens} tokens, the rule alone: headway {took['headway']:.3f} s, transformers "
        f"{took['transformers']:.3f} s: {took['transformers'] / took['headway']:.1f}x as fast; outputs "
        f"{float((a - b).abs().max() / b.abs().max()):.1e} apart",
        flush=True,
    )


def decode(turns: int, mib: int, threads: int) -> None:
    """A token of each row through each layer's rule, as a step of decoding runs it: rows x layers states of HEADS x
    SIZE x SIZE float32, read and written."""
    kernel = library()
    assert kernel is not None
    state, dtype = HEADS * SIZE * SIZE * 4, torch.bfloat16
    for rows in (1, 8, 32):
        layers = max(1, mib * 2**20 // (state * rows))
        states = [torch.randn(rows, HEADS, SIZE, SIZE) for _ in range(layers)]
        q, k, v, gate, out = (torch.randn(rows, HEADS * SIZE).to(dtype) for _ in range(5))
        beta, decay = (torch.randn(rows, HEADS).to(dtype) for _ in range(2))
        rate, bias, gain = -torch.ones(HEADS), torch.zeros(HEADS), torch.ones(SIZE)
        pages, begins = torch.arange(rows), torch.zeros(rows, dtype=torch.uint8)
        structs = [
            c.DeltaStepStruct(
                rows, HEADS, HEADS, SIZE, SIZE, c.TYPES[dtype], 1, SIZE**-0.5, 1.0, 1e-6, 1e-6, c.ACTIVATIONS["silu"],
                *(t.data_ptr() for t in (q, k, v, beta, decay, gate)), HEADS * SIZE, HEADS, HEADS, HEADS * SIZE,
                *(t.data_ptr() for t in (rate, bias, gain, s)), c.TextsStruct(pages.data_ptr(), begins.data_ptr()),
                out.data_ptr(), HEADS * SIZE,
            )
            for s in states
        ]  # fmt: skip
        ops = (c.OpStruct * layers)(*(c.OpStruct(c.DELTA, ctypes.addressof(struct)) for struct in structs))
        copies, steps = [], []
        target = [torch.empty_like(s) for s in states]
        for _ in range(turns):
            begin = time.perf_counter()
            for to, s in zip(target, states, strict=True):
                to.copy_(s)
            copies.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            code = kernel.dll.headway_step(ops, ctypes.c_int64(layers), ctypes.c_int64(threads))
            steps.append(time.perf_counter() - begin)
            assert code == 0, code
        moved = 2 * state * rows * layers / 1e9
        copy, step = (moved / statistics.median(t) for t in (copies, steps))
        each = statistics.median(steps) / (rows * layers * HEADS) * 1e9
        print(
            f"{rows:2} rows x {layers:3} layers: {step:.1f} GB/s beside a copy of {copy:.1f}: {step / copy:.2f}; "
            f"{each:.0f} ns a head",
            flush=True,
        )


def main() -> None:
    """Runs what is asked for."""
    if sys.argv[1:2] == ["one"]:
        side, dtype, tokens, passes, threads = sys.argv[2:]
        torch.set_num_threads(int(threads))
        print(json.dumps(one(side, dtype, int(tokens), int(passes))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("rule", "layer", "length", "decode"))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536, 131072])
    parser.add_argument("--passes", type=int, default=2, help="of each turn, the median of which counts")
    parser.add_argument("--mib", type=int, default=256, help="of all states")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.what == "rule":
        for dtype in TYPES:
            rule(dtype, options.turns, options.tokens)
    elif options.what == "layer":
        layer(options.turns, options.tokens, options.passes, options.threads)
    elif options.what == "length":
        length(options.lengths, options.threads)
    else:
        decode(options.turns * 4, options.mib, options.threads)


if __name__ == "__main__":
    main()
