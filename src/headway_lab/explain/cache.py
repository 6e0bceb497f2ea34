"""What a key-value cache saves, and that it changes nothing. (Shazeer 2019, "Fast Transformer Decoding".)"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from headway.checkpoints.restore import as_decoder
from headway.draw import BLUE, GREEN, RED
from headway.models import Decoder, ModelSpec, build, cost
from headway.patterns import Window
from headway_lab.explain.report import LOG_LOG, Figure, Report, Row, Rows, curves, panels
from headway_lab.profiling import again, fastest, one_thread, power

LENGTHS = (64, 128, 256, 512)
WINDOW, REPEATS, SEED = 64, 9, 0
EQUAL = 1e-5
SPEC = ModelSpec.of("llama", vocab=256, width=64, layers=2, heads=4, kv_heads=2, hidden=192)

FORMULA = """attention's operations in step T, with L layers of H heads of D, and the seconds of the whole step:
with a cache, q is of the last token only, k and v are kept: 4 D H L T
without, all T tokens are computed again: 4 D H L T^2
the logits are equal: keys and values of earlier tokens do not depend on later ones (the mask is causal)
with a window of w a ring of w slots is enough: 4 D H L min(T, w)"""


def run() -> Report:
    """Decode one row token by token, with a growing cache and with a ring, and again by full forwards."""
    full, window = model(SPEC), model(SPEC.with_patterns(Window.last(WINDOW)))
    ids = torch.randint(SPEC.vocab, (1, LENGTHS[-1]), generator=torch.Generator().manual_seed(SEED))
    with one_thread(), torch.no_grad():
        return judge(*measure(full, window, ids))


def model(spec: ModelSpec) -> Decoder:
    """A small decoder with weights large enough that attention decides; scores are computed whole ("dense"),
    so that the counted operations are those of the formula."""
    decoder = as_decoder(build(spec, seed=SEED, backend="dense").eval())
    source = torch.Generator().manual_seed(SEED)
    for parameter in decoder.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=spec.width**-0.5, generator=source)
    return decoder


def measure(full: Decoder, window: Decoder, ids: Tensor) -> tuple[list[Row], float]:
    """The steps of `LENGTHS`, and the largest difference of any logit from the full forward's, relative."""
    growing, ring = full.make_cache(1), window.make_cache(1)
    rows: list[Row] = []
    logits: tuple[list[Tensor], list[Tensor]] = [], []
    for length, new in enumerate(ids.split(1, 1), start=1):
        if length not in LENGTHS:
            logits[0].append(full(new, cache=growing))
            logits[1].append(window(new, cache=ring))
            continue
        cached, seen = counted(full, new, cache=growing)
        ringed, seen_ring = counted(window, new, cache=ring)
        logits[0].append(seen)
        logits[1].append(seen_ring)
        row, last = ids[:, :length], slice(length - 1, length)
        whole, _ = counted(full, row, logits_for=last)
        rows.append(
            {
                "T": length,
                "cache (FLOPs)": attention_flops(cached, 1),
                "no cache (FLOPs)": attention_flops(whole, length),
                "ring (FLOPs)": attention_flops(ringed, 1),
                "model, no cache / cache": whole / cached,
                "cache (ms)": 1e3 * min(again(full, new, growing) for _ in range(REPEATS)),
                "no cache (ms)": 1e3 * fastest(partial(full, row, logits_for=last), REPEATS),
                "ring slots": ring[0].slots,
            }
        )
    off = [
        float((torch.cat(got, 1) - want).abs().max() / want.abs().max())
        for got, want in zip(logits, (full(ids), window(ids)), strict=True)
    ]
    return rows, max(off)


def counted(decoder: Decoder, ids: Tensor, **rest: Any) -> tuple[float, Tensor]:
    """Operations of a forward, and its logits."""
    with FlopCounterMode(display=False) as counter:
        logits: Tensor = decoder(ids, **rest)
    return float(counter.get_total_flops()), logits


def attention_flops(flops: float, tokens: int) -> float:
    """A step's operations without the products with weights: those of `tokens` tokens, and the output layer for one."""
    return flops - 2.0 * (tokens * cost.matrix_weights(SPEC) + SPEC.width * SPEC.vocab)


def judge(rows: Rows, off: float) -> Report:
    """The verdict: equal logits; attention grows with exponent 1 with the cache, 2 without, 0 with the ring."""
    lengths, last = [row["T"] for row in rows], rows[-1]
    with_cache, without, with_ring = (
        power(lengths, [row[f"{name} (FLOPs)"] for row in rows]) for name in ("cache", "no cache", "ring")
    )
    right = max(abs(with_cache - 1), abs(without - 2), abs(with_ring)) < 1e-6
    return Report(
        rows=tuple(rows),
        seen=off <= EQUAL and right and all(row["ring slots"] <= WINDOW for row in rows),
        setting=(
            f"one row of {last['T']} tokens, {SPEC.layers} layers of width {SPEC.width}, {SPEC.heads} query and "
            f"{SPEC.kv_heads} kv heads, random weights, window {WINDOW}, float32, one thread, seed {SEED}"
        ),
        finding=(
            f"the logits of all {last['T']} steps equal the full forward's within {off:.1e} (growing cache and "
            f"ring); the attention of step T grows as T^{with_cache:.2f} with a cache, T^{without:.2f} without and "
            f"T^{with_ring:.2f} with a ring; step {last['T']} takes {last['cache (ms)']:.1f} ms instead "
            f"of {last['no cache (ms)']:.1f} ms"
        ),
    )


def draw(figure: Figure, report: Report) -> None:
    """Left: operations of a step's attention against T. Right: the measured time of a step."""
    left, right = panels(figure, 9, 3.8)
    work = {
        "no cache": ("no cache (FLOPs)", "o-", RED),
        "cache": ("cache (FLOPs)", "o-", BLUE),
        "ring": ("ring (FLOPs)", "o-", GREEN),
    }
    time = {"no cache": ("no cache (ms)", "o-", RED), "cache": ("cache (ms)", "o-", BLUE)}
    curves(left, report, "T", work, "attention in step T", "T", "operations", **LOG_LOG)
    curves(right, report, "T", time, "time of step T", "T", "ms", **LOG_LOG)
