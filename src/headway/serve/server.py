"""The state of a server: its models, the worker that runs them, its settings, and its metrics.

Prometheus metrics have vLLM's names if it has the metric, `headway_...` otherwise; llama.cpp's names are added."""

import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headway.errors import ConfigError
from headway.serve.bodies import ModelRequest
from headway.serve.models import Models
from headway.serve.served import Decoding, Served
from headway.serve.visits import Visit, prompts_of
from headway.serve.worker import Worker

S = TypeVar("S", bound=Served)
MODEL = ("model_name",)
FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
COUNTS = {
    "vllm:prompt_tokens": "Tokens of prompts",
    "vllm:generation_tokens": "New tokens",
    "vllm:prefix_cache_queries": "Tokens of prompts that were looked for among what is stored",
    "vllm:prefix_cache_hits": "Of these, those that were stored",
}
TIMES = {
    "vllm:time_to_first_token_seconds": ("From the request to its first token", SLOW),
    "vllm:inter_token_latency_seconds": ("From a token to the next", FAST),
    "vllm:request_time_per_output_token_seconds": ("Of a text, the mean from a token to the next", FAST),
    "vllm:e2e_request_latency_seconds": ("From the request to the last token", SLOW),
}
NOW = {
    "vllm:num_requests_running": "Texts that are written",
    "vllm:num_requests_waiting": "Texts that wait",
    "vllm:kv_cache_usage_perc": "Of pages, those that texts use",
}
"""The gauges of each engine."""
_FIRST = "vllm:time_to_first_token_seconds_sum"
LLAMA: dict[str, tuple[str, ...]] = {
    "prompt_tokens_total": ("vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total"),
    "prompt_tokens_cached_total": ("vllm:prefix_cache_hits_total",),
    "prompt_seconds_total": (_FIRST,),
    "tokens_predicted_total": ("vllm:generation_tokens_total",),
    "tokens_predicted_seconds_total": ("vllm:e2e_request_latency_seconds_sum", _FIRST),
    "n_decode_total": ("headway_engine_steps_total",),
    "n_tokens_max": ("headway_longest_text",),
    **{f"spec_decode_num_{of}_total": ("nothing",) for of in ("draft_tokens", "accepted_tokens", "drafts")},
    "requests_processing": ("vllm:num_requests_running",),
    "requests_deferred": ("vllm:num_requests_waiting",),
}
"""llama.cpp's name -> metrics that are summed over all models; the first minus the others."""
RATES = {
    "prompt_tokens_seconds": ("prompt_tokens_total", "prompt_seconds_total"),
    "predicted_tokens_seconds": ("tokens_predicted_total", "tokens_predicted_seconds_total"),
    "n_busy_slots_per_decode": ("tokens_predicted_total", "n_decode_total"),
}
"""llama.cpp's rates: the quotient of two metrics' increases since the last scrape."""
GAUGES = (*RATES, "requests_processing", "requests_deferred")
LLAMA_NAME = "llamacpp:"


class Server(Collector):
    """What the routes share. Counts finished requests; gauges are read from the engines when Prometheus asks.

    strict: whether unknown fields are refused; otherwise a warning says that they have no effect.
    ending: whether new requests are refused.   open: requests that are being answered.
    """

    def __init__(self, models: Models, worker: Worker, strict: bool = False) -> None:
        self.models, self.worker, self.strict = models, worker, strict
        self.ending, self.open, self.begun = False, set[Visit](), time.time()
        self.registry = CollectorRegistry()
        args: dict[str, Any] = {"registry": self.registry}
        self._counts = {name: Counter(name, about, MODEL, **args) for name, about in COUNTS.items()}
        times = TIMES.items()
        self._times = {name: Histogram(name, about, MODEL, buckets=to, **args) for name, (about, to) in times}
        reasons = (*MODEL, "finished_reason")
        self._ended = Counter("vllm:request_success", "Texts that ended, and by what", reasons, **args)
        self._answers = Counter("headway_answers", "Answers over HTTP", ("route", "status"), **args)
        self._longest = 0
        self._before: dict[str, float] = {}  # llama.cpp's metrics at the last scrape
        self.registry.register(self)

    async def begin(self, asked: ModelRequest, kind: type[S], *tasks: str) -> tuple[S, list[str]]:
        """Returns the model of a request, found as by `Models.find`, and warnings about unknown fields. Raises what
        `Models.find` raises, and if strict ConfigError for unknown fields."""
        if asked.unknown and self.strict:
            raise ConfigError(f"unknown fields: {', '.join(asked.unknown)}; leave them out")
        warnings = [f"{name} is unknown and was ignored" for name in asked.unknown]
        return await self.models.find(asked.model, kind, *tasks), warnings

    def metrics(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        sums: dict[str, float] = defaultdict(float)
        for metric in self.registry.collect():
            for sample in metric.samples:
                sums[sample.name] += sample.value
        now = {
            name: sums[first] - sum(sums[each] for each in subtracted)
            for name, (first, *subtracted) in LLAMA.items()
        }
        now["requests_deferred"] += len(self.worker.waiting)
        for rate, names in RATES.items():
            count, over = (now[name] - self._before.get(name, 0) for name in names)
            now[rate] = count / over if over else 0.0
        self._before = now
        llama = "".join(
            f"# HELP {LLAMA_NAME}{name} {' '.join([*LLAMA.get(name, ()), *RATES.get(name, ())])}\n"
            f"# TYPE {LLAMA_NAME}{name} {'gauge' if name in GAUGES else 'counter'}\n{LLAMA_NAME}{name} {value}\n"
            for name, value in now.items()
        )
        return generate_latest(self.registry) + llama.encode()

    def count(self, visit: Visit) -> None:
        """Adds a finished request to the metrics."""
        self._answers.labels(visit.route, visit.status).inc()
        for name, texts in visit.texts:
            read, written, looked_for, stored = (count.labels(name) for count in self._counts.values())
            for tokens, cached in prompts_of(texts):
                read.inc(tokens)
                looked_for.inc(tokens)
                stored.inc(cached)
            for text in texts:
                times = [delta.seconds for delta in text.deltas if delta.token is not None]
                written.inc(len(times))
                self._longest = max(self._longest, len(text.tokens))
                reason = text.deltas[-1].finish_reason if text.deltas else None
                self._ended.labels(name, {"eos": "stop", None: "abort"}.get(reason, reason)).inc()
                if times:
                    first, between, mean, whole = (self._times[kind].labels(name) for kind in TIMES)
                    first.observe(times[0])
                    whole.observe(times[-1])
                    for earlier, later in pairwise(times):
                        between.observe(later - earlier)
                    if len(times) > 1:
                        mean.observe((times[-1] - times[0]) / (len(times) - 1))

    def collect(self) -> Iterator[Metric]:
        """Yields the running and waiting requests and the pages of each engine, and whether each model is loaded."""
        now = {name: GaugeMetricFamily(name, about, labels=MODEL) for name, about in NOW.items()}
        pages = GaugeMetricFamily("headway_page_bytes", "Bytes of pages", labels=(*MODEL, "state"))
        loaded = GaugeMetricFamily("headway_model_loaded", "1 where a model is loaded", labels=MODEL)
        restarts, steps = self.worker.restarts, self.worker.steps
        yield CounterMetricFamily(
            "headway_engine_restarts", "Times that the engines' thread came back", restarts
        )
        yield CounterMetricFamily("headway_engine_steps", "Steps of all engines", steps)
        yield GaugeMetricFamily("headway_longest_text", "Tokens of the longest text", self._longest)
        for name, place in self.models.places.items():
            loaded.add_metric((name,), float(place.model is not None))
            if isinstance(place.model, Decoding) and place.base is None:
                engine = place.model.engine
                pool = engine.reader.cache.pool
                used = pool.held - pool.idle
                usage = used / max(pool.held if pool.budget is None else pool.budget, 1)
                numbers = len(engine.running), len(engine.waiting), usage
                for gauge, number in zip(now.values(), numbers, strict=True):
                    gauge.add_metric((name,), number)
                pages.add_metric((name, "used"), used)
                pages.add_metric((name, "kept"), pool.idle)
        yield from (*now.values(), pages, loaded)
