"""Changes to a stage's model before training: operations of `headway surgery`, and changes of its spec alone."""

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
    """Sets the trained context to `tokens`: by `stretch_context` with `method`, else with unchanged positions."""
    if method is None:
        return replace(spec, trained_context=tokens), dict(state)
    untyped: Any = method
    return stretch_context(spec, state, untyped, tokens / spec.trained_context)


def _patterns(spec: ModelSpec, state: State, layers: str) -> Changed:
    """Replaces the attention patterns (one per layer, separated by ';' and repeated); weights are unchanged."""
    return spec.with_patterns([parse(part) for part in layers.split(";")]), dict(state)


OPERATIONS: Mapping[str, tuple[Callable[..., Changed], tuple[str, ...]]] = {
    "gqa": (pool_heads, ("kv_heads", "pool", "seed")),
    "window": (put_window, ("keys", "sinks", "layers")),
    "context": (_context, ("tokens", "method")),
    "longformer": (make_longformer, ("context", "window")),
    "patterns": (_patterns, ("layers",)),
}
"""Name of an operation -> (pure function (spec, state, **options) -> (spec, state), names of its options). A value in
the recipe that is no mapping is the first option's."""


def check_surgery(operations: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the operations as (name, options). Raises ConfigError for unknown operations or options, and if the first
    option is missing."""
    if not isinstance(operations, Mapping):
        raise ConfigError(f"{where}: surgery must be a mapping of operations, got {operations!r}")
    for name, value in operations.items():
        check_known(name, OPERATIONS, f"{where}: there is no operation")
        names = OPERATIONS[name][1]
        options = dict(value) if isinstance(value, Mapping) else {names[0]: value}
        for option in options:
            check_known(option, names, f"{where}: {name} has no option")
        if names[0] not in options:
            raise ConfigError(f"{where}: {name} needs {names[0]}")
        yield name, options


def operated(spec: ModelSpec, state: State, operations: tuple[tuple[str, Any], ...]) -> Changed:
    """Applies the operations to a model, in order."""
    model = spec, dict(state)
    for name, options in operations:
        model = OPERATIONS[name][0](*model, **options)
    return model


def opened(path: Path, base: Path | None = None) -> Folder:
    """Opens a trained model's folder. For an adapter, opens its base (the folder `base`, or the one that the adapter
    names) with the adapter merged into the weights."""
    if not is_adapter(path):
        return load_folder(path)
    folder = with_adapters(load_folder(base or base_of(path)), [path])
    weights = lazy(merged_state(folder.tensors, [load_adapter(path, folder.spec)]))
    return replace(folder, tensors=weights, quantized={}, adapters=())


def write_model(
    source: Path, target: Path, operations: tuple[tuple[str, Any], ...], base: Path | None = None
) -> list[str]:
    """Writes the model of `source`, changed by the operations, to `target`; returns lines that describe the changes.
    `base` as in `opened`."""
    folder = opened(source, base)
    spec, state = operated(folder.spec, folder.tensors, operations)
    change = Change(spec, state, tokenizer=TokenizerFiles(folder, spec.trained_context))
    report = rewrite(
        folder, target, change, lambda path: Measured(), context=spec.trained_context, overwrite=True
    )
    return [f"{name}: {before} -> {after}" for name, before, after in report.changed]


def moments_after(
    checkpoint: Path, before: ModelSpec, operations: tuple[tuple[str, Any], ...]
) -> dict[str, Tensor]:
    """Returns the optimizer state of a checkpoint (a folder, or its file), converted to the model after the operations.
    `before` is the model's spec before them.

    The gradient of a key/value head that n heads were pooled into is the sum of theirs, and so is the mean of gradients
    over steps. The square of the sum is at most n times the sum of squares (Cauchy-Schwarz), which is used as the
    second moment:

        m' = m_1 + ... + m_n        v' = n (v_1 + ... + v_n)

    Moments of heads with newly drawn weights are left out; parameters without moments begin with zeros."""
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
            # 4 heads of 8 rows to 2: [32, I] -> [2, 2, 8, I] -> sum over axis 1 -> [16, I]; scalars (step) are kept
            grouped = value.unflatten(0, (kv_heads, n, -1)) if value.dim() else value
            summed = grouped.sum(1).flatten(0, 1) if value.dim() else value
            pooled[key] = n * summed if key.endswith("/exp_avg_sq") else summed
    return pooled
