"""What a server tells of itself to Prometheus: vLLM's names where it has one, `headway_...` for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headway.serve.models import Models
from headway.serve.served import Decoding
from headway.serve.visits import Visit, prompts_of
from headway.serve.worker import Worker

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


class Metrics:
    """Counts what visits came to; what there is now is looked at when it is asked for."""

    def __init__(self, models: Models, worker: Worker) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        self._counts = {name: Counter(name, about, MODEL, **own) for name, about in COUNTS.items()}
        self._times = {
            name: Histogram(name, about, MODEL, buckets=buckets, **own)
            for name, (about, buckets) in TIMES.items()
        }
        reasons = (*MODEL, "finished_reason")
        self._ended = Counter("vllm:request_success", "Texts that ended, and by what", reasons, **own)
        self._answers = Counter("headway_answers", "Answers over HTTP", ("route", "status"), **own)
        self.registry.register(Now(models, worker))

    def tell(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)

    def add(self, visit: Visit) -> None:
        """A visit that is over."""
        self._answers.labels(visit.route, visit.status).inc()
        for name, texts in visit.texts:
            for tokens, stored in prompts_of(texts):
                for which, count in (("prompt_tokens", tokens), ("prefix_cache_queries", tokens)):
                    self._counts[f"vllm:{which}"].labels(name).inc(count)
                self._counts["vllm:prefix_cache_hits"].labels(name).inc(stored)
            for text in texts:
                times = [delta.seconds for delta in text.deltas if delta.token is not None]
                self._counts["vllm:generation_tokens"].labels(name).inc(len(times))
                reason = text.deltas[-1].finish_reason if text.deltas else None
                self._ended.labels(name, {"eos": "stop", None: "abort"}.get(reason, reason)).inc()
                self._add_times(name, times)

    def _add_times(self, name: str, times: list[float]) -> None:
        if not times:
            return
        first, between, mean, whole = (self._times[kind].labels(name) for kind in TIMES)
        first.observe(times[0])
        whole.observe(times[-1])
        for one, other in pairwise(times):
            between.observe(other - one)
        if len(times) > 1:
            mean.observe((times[-1] - times[0]) / (len(times) - 1))


class Now(Collector):
    """What models hold and do at this moment."""

    def __init__(self, models: Models, worker: Worker) -> None:
        self._models, self._worker = models, worker

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        """Of each engine its requests and pages; of each model whether it is loaded."""
        running = GaugeMetricFamily("vllm:num_requests_running", "Texts that are written", labels=MODEL)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Texts that wait", labels=MODEL)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Of pages, those that texts use", labels=MODEL)
        pages = GaugeMetricFamily("headway_page_bytes", "Bytes of pages", labels=(*MODEL, "state"))
        loaded = GaugeMetricFamily("headway_model_loaded", "1 where a model is loaded", labels=MODEL)
        restarts = CounterMetricFamily(
            "headway_engine_restarts", "Times that the thread of engines came back"
        )
        restarts.add_metric((), self._worker.restarts)
        for name, place in self._models.places.items():
            loaded.add_metric((name,), float(place.model is not None))
            if not isinstance(place.model, Decoding) or place.base is not None:
                continue
            engine = place.model.engine
            pool = engine.reader.cache.pool
            used = pool.held - pool.idle
            running.add_metric((name,), len(engine.running))
            waiting.add_metric((name,), len(engine.waiting))
            usage.add_metric((name,), used / max(pool.held if pool.budget is None else pool.budget, 1))
            pages.add_metric((name, "used"), used)
            pages.add_metric((name, "kept"), pool.idle)
        yield from (running, waiting, usage, pages, loaded, restarts)
