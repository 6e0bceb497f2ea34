"""What a key-value cache saves, and that it changes nothing. (Shazeer 2019, "Fast Transformer Decoding".)"""

import time
from functools import partial

import torch
from torch import Tensor, nn

from headway.cache import PAGE
from headway.checkpoints.restore import as_decoder
from headway.errors import ConfigError
from headway.models import Decoder, ModelSpec, build, cost
from headway.patterns import Window
from headway_lab.explain.figures import curves, panels
from headway_lab.explain.report import Report, Row, Rows, ranged
from headway_lab.explain.spread import log_gap
from headway_lab.profiling import fastest, flops, one_thread, power

WINDOW, STEPS, SEED = 64, 9, 0  # STEPS: the last ones up to a length, whose times are taken
EQUAL, EXACT = 1e-5, 1e-6
Times = dict[str, list[float]]
SPEC = ModelSpec.of("llama", vocab=256, width=64, layers=2, heads=4, kv_heads=2, hidden=192)


def run(*, context: int = 512) -> Report:
    """Decode one row of `context` tokens one by one, with a whole cache and with that of a window, and again by full
    forwards of some lengths. Raises ConfigError for a context whose eighth is no number of whole pages."""
    if context < 8 * PAGE or context % (8 * PAGE):
        raise ConfigError(
            f"explain cache: --context {context} must be a multiple of {8 * PAGE}, eight times a page"
        )
    full, window = model(SPEC), model(SPEC.with_patterns(Window.last(WINDOW)))
    ids = torch.randint(SPEC.vocab, (1, context), generator=torch.Generator().manual_seed(SEED))
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


def measure(full: Decoder, window: Decoder, ids: Tensor) -> tuple[list[Row], Times, float]:
    """The steps of four lengths; the seconds of one core in the steps up to the last of them, by
    way; and the largest difference of any logit from the full forward's, relative."""
    count = ids.shape[1]
    growing, bounded = full.make_cache(1), window.make_cache(1)
    ways = {"cache": partial(full, cache=growing), "window": partial(window, cache=bounded)}
    logits: dict[str, list[Tensor]] = {name: [] for name in ways}

    def again(row: Tensor) -> Tensor:
        return full.logits(full.hidden(row)[:, -1:])

    rows: list[Row] = []
    times: Times = {name: [] for name in (*ways, "no cache")}
    for length, new in enumerate(ids.split(1, 1), start=1):
        row = ids[:, :length]
        if length in (count // 8, count // 4, count // 2, count):
            counts = {name: flops(partial(way, new)) for name, way in ways.items()}
            whole, _ = flops(partial(again, row))
            for name, (_, seen) in counts.items():
                logits[name].append(seen)
            rows.append(
                {
                    "T": length,
                    **{f"{name} (FLOPs)": attention_flops(done, 1) for name, (done, _) in counts.items()},
                    "no cache (FLOPs)": attention_flops(whole, length),
                    "model, no cache / cache": whole / counts["cache"][0],
                    "window slots": bounded.slots[0],
                    **{
                        column: ms
                        for name, taken in times.items()
                        for column, ms in ranged(f"{name} (ms)", [1e3 * x for x in taken[-STEPS:]]).items()
                    },
                }
            )
            continue
        near = any(0 < end - length <= STEPS for end in (count // 8, count // 4, count // 2, count))
        for name, way in ways.items():
            began = time.process_time()
            logits[name].append(way(new))
            times[name].append(time.process_time() - began)
        if near:
            times["no cache"].append(fastest(partial(again, row), 1, time.process_time))
    expected = {"cache": full(ids), "window": window(ids)}
    off = [
        float((torch.cat(got, 1) - expected[name]).abs().max() / expected[name].abs().max())
        for name, got in logits.items()
    ]
    return rows, {name: taken[-STEPS:] for name, taken in times.items()}, max(off)


def attention_flops(whole: int, tokens: int) -> float:
    """A step's operations without the products with weights: those of `tokens` tokens, and the output layer for one."""
    return whole - 2.0 * (tokens * cost.matrix_weights(SPEC) + SPEC.width * SPEC.vocab)


def judge(rows: Rows, times: Times, off: float) -> Report:
    """The verdict: equal logits; attention grows with exponent 1 with the cache, 2 without, and not with the window
    once it is full; and, each on its own, the time of a step."""
    full = [row for row in rows if row["T"] >= WINDOW]
    powers = {
        name: power([row["T"] for row in some], [row[f"{name} (FLOPs)"] for row in some])
        for name, some in (("cache", rows), ("no cache", rows), ("window", full))
    }
    saved, windowed = (
        log_gap(times[name], times[other]) for name, other in (("cache", "no cache"), ("window", "cache"))
    )
    return Report(
        rows=tuple(rows),
        claims={
            "equal": off <= EQUAL,
            "cache": abs(powers["cache"] - 1) < EXACT,
            "no cache": abs(powers["no cache"] - 2) < EXACT,
            "window": abs(powers["window"]) < EXACT and all(row["window slots"] <= WINDOW for row in rows),
            "time": saved.lower,
        },
        values={"off": off, "powers": powers, "saved": saved, "windowed": windowed},
    )


FORMS = {"no cache": "o- red", "cache": "o- blue", "window": "o- green"}
WORK, TIME = ({f"{name} ({unit})": form for name, form in FORMS.items()} for unit in ("FLOPs", "ms"))
draw = panels(
    curves("T", WORK, "attention in step T", "operations", log="xy"),
    curves("T", TIME, "time of step T", f"ms of one core\n(median, range of {STEPS} steps)", log="xy"),
)
