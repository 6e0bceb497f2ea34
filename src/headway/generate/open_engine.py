"""An engine that stays open for the calls of one model.

Calls of several threads are read together, and what their texts stored is found by those that begin as they did.
"""

import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headway.cache import kv_dtype
from headway.generate.config import GenerationConfig
from headway.generate.drafts import Draft
from headway.generate.engine import Engine
from headway.generate.ranks import reader_of
from headway.generate.sequences import Job
from headway.hardware import memory_total
from headway.models import Decoder, EncoderDecoder

SHARE = 16
"""Of the memory of the machine the 16th is kept for prefixes, unless told otherwise."""
SAMPLES = 8
"""Numbers of each weight that are looked at."""


class OpenEngine:
    """Writes texts with one engine for all calls, as long as the model computes what it did (`weights_of`).

    Any thread may call. Calls with other `session_options` than the one before open another engine, and those with a
    draft have engines of their own.

    Args:
        model: of which texts are asked.
        keep: bytes of keys and values that stay for texts that begin as earlier ones did (`prefix_cache`); a 16th of
            the machine's memory unless given. It may hold twice as much.
        once: it serves a single call, for which the weights need not be looked at.
    """

    def __init__(
        self, model: Decoder | EncoderDecoder, keep: int | None = None, *, once: bool = False
    ) -> None:
        self.model, self._once = model, once
        self.keep = memory_total() // SHARE if keep is None else keep
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._of: Hashable = None

    def run(self, jobs: Sequence[Job], draft: Draft | None = None, most: int | None = None) -> Iterator[None]:
        """As `Engine.run`."""
        config = jobs[0].request.config
        is_own = self._once or draft is not None
        engine = self._make(config, draft) if is_own else self.engine(config)
        return engine.run(jobs, most)

    def engine(self, config: GenerationConfig) -> Engine:
        """The engine that is open, where it fits."""
        of = tuple(config.session_options.items()), weights_of(self.model)
        with self._lock:
            if self._engine is None or self._of != of:
                self._engine, self._of = self._make(config), of
            return self._engine

    def _make(self, config: GenerationConfig, draft: Draft | None = None) -> Engine:
        """An engine for requests of this config; one with a draft serves a single call, and keeps nothing."""
        dtype, keep = kv_dtype(config.kv_cache_dtype), self.keep if draft is None else 0
        how = {"use_cache": config.use_cache, "kv_dtype": dtype, "keep": keep, "exact": config.exact}
        reader = reader_of(self.model, **how)
        return Engine(reader, step_tokens=config.prefill_chunk, draft=draft)

    def close(self) -> None:
        """Gives its memory back, when the calls that run have ended. A later call opens it again."""
        with self._lock:
            self._engine = self._of = None

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenEngine, (self.model, self.keep)


def weights_of(model: nn.Module) -> Hashable:
    """What tells whether a model computes what it did before: its tensors, how often torch changed them, and some
    numbers of each (what is written by way of `.data` or from outside of torch is not counted); which adapters are
    added and which hooks are there."""
    parts: list[Hashable] = []
    samples: list[Tensor] = []
    for module in model.modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        parts.append((id(module), getattr(module, "active", None), tuple(map(id, hooks))))
        for t in (*module._parameters.values(), *module._buffers.values()):
            if t is None:
                continue
            parts.append((t.data_ptr(), tuple(t.shape), 0 if t.is_inference() else t._version))
            flat = t.detach().flatten() if t.is_contiguous() else t.detach().reshape(-1)
            samples.append(flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].double())
    return tuple(parts), tuple(torch.cat(samples).tolist()) if samples else ()
