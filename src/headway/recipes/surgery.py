"""Changes of a stage to its model before training: operations of `headway surgery`, and changes of the spec alone."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from headway.checkpoints import Folder, load_adapter, load_folder, merged_state
from headway.checkpoints.bases import base_of, is_adapter, with_adapters
from headway.checkpoints.heads import counts_heads
from headway.checkpoints.rewriting import Change, Measured, rewrite
from headway.checkpoints.saving import TokenizerFiles
from headway.errors import ConfigError, check_known
from headway.models import ModelSpec
from headway.patterns import parse
from headway.storage.lazy import lazy
from headway.surgery import make_longformer, pool_heads, put_window, stretch_context
from headway.train.checkpoint import MOMENTS, state_tensors

State = Mapping[str, Tensor]
Changed = tuple[ModelSpec, dict[str, Tensor]]
KEY_VALUE = (".k_proj.", ".v_proj.")


def _context(spec: ModelSpec, state: State, tokens: int, method: str | None = None) -> Changed:
    """Rows of `tokens` tokens: with `method` as `stretch_context`, else with the positions as they are."""
    if method is None:
        return replace(spec, trained_context=tokens), dict(state)
    untyped: Any = method
    return stretch_context(spec, state, untyped, tokens / spec.trained_context)


def _patterns(spec: ModelSpec, state: State, layers: str) -> Changed:
    """Other patterns with the same weights: one per layer, repeated, separated by ';'."""
    return spec.with_patterns([parse(part) for part in layers.split(";")]), dict(state)


OPERATIONS: Mapping[str, tuple[Callable[..., Changed], tuple[str, ...]]] = {
    "gqa": (pool_heads, ("kv_heads", "pool", "seed")),
    "window": (put_window, ("keys", "sinks", "layers")),
    "context": (_context, ("tokens", "method")),
    "longformer": (make_longformer, ("context", "window")),
    "patterns": (_patterns, ("layers",)),
}
"""name -> the pure function (spec, state, ..) -> (spec, state), and its options; a value that is no mapping is the
first option's."""


def check_surgery(operations: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The operations as (name, options). Raises ConfigError for anything else."""
    if not isinstance(operations, Mapping):
        raise ConfigError(f"{where}: surgery is a mapping of operations, got {operations!r}")
    for name, value in operations.items():
        check_known(name, OPERATIONS, f"{where}: there is no operation")
        known = OPERATIONS[name][1]
        options = dict(value) if isinstance(value, Mapping) else {known[0]: value}
        for option in options:
            check_known(option, known, f"{where}: {name} has no option")
        if known[0] not in options:
            raise ConfigError(f"{where}: {name} needs {known[0]}")
        yield name, options


def operated(spec: ModelSpec, state: State, operations: tuple[tuple[str, Any], ...]) -> Changed:
    """The model after the operations, one after the other."""
    changed = spec, dict(state)
    for name, options in operations:
        changed = OPERATIONS[name][0](*changed, **options)
    return changed


def opened(path: Path, base: Path | None = None) -> Folder:
    """A trained model's folder; of an adapter, that of its base (in the folder `base`, or the one that the adapter
    names) with the adapter in the weights."""
    if not is_adapter(path):
        return load_folder(path)
    folder = with_adapters(load_folder(base or base_of(path)), [path])
    weights = lazy(merged_state(folder.tensors, [load_adapter(path, folder.spec)]))
    return replace(folder, tensors=weights, quantized={}, adapters=())


def write_model(
    source: Path, target: Path, operations: tuple[tuple[str, Any], ...], base: Path | None = None
) -> list[str]:
    """Write the model of `source`, operated on, at `target`; returns lines on the changes. `base` as in `opened`."""
    folder = opened(source, base)
    spec, state = operated(folder.spec, folder.tensors, operations)
    change = Change(spec, state, tokenizer=TokenizerFiles(folder, spec.trained_context))
    done = rewrite(
        folder, target, change, lambda path: Measured(), context=spec.trained_context, overwrite=True
    )
    return [f"{name}: {before} -> {after}" for name, before, after in done.changed]


def moments_after(
    checkpoint: Path, before: ModelSpec, operations: tuple[tuple[str, Any], ...]
) -> dict[str, Tensor]:
    """The optimizer's state in a checkpoint, or in a file of it, for the model after the operations; before them it had
    the spec `before`.

    The gradient of a key/value head that n heads were pooled into is the sum of theirs. So is its mean over steps, and
    its square is at most n times the sum of theirs (Cauchy-Schwarz), which is what the second moment becomes:

        m' = m_1 + ... + m_n        v' = n (v_1 + ... + v_n)

    Moments of heads that were drawn anew are left out; a parameter whose moments are not here begins with zeros."""
    tensors = dict(state_tensors(checkpoint, MOMENTS))
    for name, options in operations:
        if name == "gqa":
            tensors = _pooled(tensors, before, options["kv_heads"], fresh=options.get("pool") == "random")
            before = replace(before, kv_heads=options["kv_heads"])
    return tensors


def _pooled(tensors: dict[str, Tensor], spec: ModelSpec, kv_heads: int, *, fresh: bool) -> dict[str, Tensor]:
    n = spec.kv_heads // kv_heads
    pooled = {}
    for key, value in tensors.items():
        if not (any(part in key for part in KEY_VALUE) and counts_heads(spec, key)):
            pooled[key] = value
        elif not fresh:
            grouped = value.unflatten(0, (kv_heads, n, -1)) if value.dim() else value
            summed = grouped.sum(1).flatten(0, 1) if value.dim() else value
            pooled[key] = n * summed if key.endswith("/exp_avg_sq") else summed
    return pooled
