"""What a KV cache saves, and that it changes nothing. (Shazeer 2019, "Fast Transformer Decoding".)"""

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

WINDOW, STEPS, SEED = 64, 9, 0  # STEPS: number of steps before each measured length that are timed
EQUAL, EXACT = 1e-5, 1e-6
Times = dict[str, list[float]]
SPEC = ModelSpec.of("llama", vocab=256, width=64, layers=2, heads=4, kv_heads=2, hidden=192)


def run(*, context: int = 512) -> Report:
    """Decodes one row of `context` tokens one by one, with a full cache and with that of a window, and also by full
    forwards at some lengths. Raises ConfigError for a context whose eighth is not a whole number of pages."""
    if context < 8 * PAGE or context % (8 * PAGE):
        raise ConfigError(f"explain cache: --context {context} must be a multiple of {8 * PAGE}")
    full, window = model(SPEC), model(SPEC.with_patterns(Window.last(WINDOW)))
    ids = torch.randint(SPEC.vocab, (1, context), generator=torch.Generator().manual_seed(SEED))
    with one_thread(), torch.no_grad():
        return judge(*measure(full, window, ids))


def model(spec: ModelSpec) -> Decoder:
    """Returns a small decoder with weights large enough that attention matters; scores are computed in full ("dense"),
    so that the counted operations are those of the formula."""
    decoder = as_decoder(build(spec, seed=SEED, backend="dense").eval())
    source = torch.Generator().manual_seed(SEED)
    for parameter in decoder.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=spec.width**-0.5, generator=source)
    return decoder


def measure(full: Decoder, window: Decoder, ids: Tensor) -> tuple[list[Row], Times, float]:
    """Returns the rows of the steps at four lengths; the seconds of one core of the timed steps before the last of
    them, by way; and the largest relative difference of any logit from the full forward's."""
    count = ids.shape[1]
    growing, bounded = full.make_cache(1), window.make_cache(1)
    ways = {"cache": partial(full, cache=growing), "window": partial(window, cache=bounded)}
    logits: dict[str, list[Tensor]] = {name: [] for name in ways}

    def without_cache(row: Tensor) -> Tensor:
        return full.logits(full.hidden(row)[:, -1:])

    rows: list[Row] = []
    times: Times = {name: [] for name in (*ways, "no cache")}
    for length, new in enumerate(ids.split(1, 1), start=1):
        row = ids[:, :length]
        if length in (count // 8, count // 4, count // 2, count):
            counts = {name: flops(partial(way, new)) for name, way in ways.items()}
            uncached_flops, _ = flops(partial(without_cache, row))
            for name, (_, step_logits) in counts.items():
                logits[name].append(step_logits)
            rows.append(
                {
                    "T": length,
                    **{
                        f"{name} (FLOPs)": attention_flops(step_flops, 1)
                        for name, (step_flops, _) in counts.items()
                    },
                    "no cache (FLOPs)": attention_flops(uncached_flops, length),
                    "model, no cache / cache": uncached_flops / counts["cache"][0],
                    "window slots": bounded.slots[0],
                    **{
                        column: ms
                        for name, step_seconds in times.items()
                        for column, ms in ranged(
                            f"{name} (ms)", [1e3 * x for x in step_seconds[-STEPS:]]
                        ).items()
                    },
                }
            )
            continue
        timed = any(0 < end - length <= STEPS for end in (count // 8, count // 4, count // 2, count))
        for name, way in ways.items():
            began = time.process_time()
            logits[name].append(way(new))
            times[name].append(time.process_time() - began)
        if timed:
            times["no cache"].append(fastest(partial(without_cache, row), 1, time.process_time))
    expected = {"cache": full(ids), "window": window(ids)}
    differences = [
        float((torch.cat(way_logits, 1) - expected[name]).abs().max() / expected[name].abs().max())
        for name, way_logits in logits.items()
    ]
    return rows, {name: step_seconds[-STEPS:] for name, step_seconds in times.items()}, max(differences)


def attention_flops(whole: int, tokens: int) -> float:
    """Returns a step's operations minus the products with weights: those of `tokens` tokens, and of the output layer
    for one."""
    return whole - 2.0 * (tokens * cost.matrix_weights(SPEC) + SPEC.width * SPEC.vocab)


def judge(rows: Rows, times: Times, off: float) -> Report:
    """Returns the verdict: equal logits; attention grows with exponent 1 with the cache, 2 without, and 0 with the
    window once it is full; and, as its own claim, the time of a step."""
    full = [row for row in rows if row["T"] >= WINDOW]
    powers = {
        name: power([row["T"] for row in way_rows], [row[f"{name} (FLOPs)"] for row in way_rows])
        for name, way_rows in (("cache", rows), ("no cache", rows), ("window", full))
    }
    saved, windowed = (
        log_gap(times[name], times[baseline])
        for name, baseline in (("cache", "no cache"), ("window", "cache"))
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
