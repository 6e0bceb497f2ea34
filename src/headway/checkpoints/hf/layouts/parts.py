"""Parts of a config that several families have, each both read and written."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from headway.checkpoints.hf.config_keys import ConfigReader, Inexpressible
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.rope import SCALINGS
from headway.checkpoints.hf.windows import (
    FULL,
    SLIDING,
    Bases,
    Kinds,
    from_foreign,
    layer_types,
    read_rope_by_kind,
    window_keys,
    write_rope_by_kind,
)
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.patterns import Causal, Pattern
from headway.positions import Learned, NoPositions, PerLayer, PositionScheme

Windows = Literal["none", "all", "layer", "late"]
"""The layers in which `transformers` has windows: none; all (`sliding_window`); those that `layer_types` lists
("layer"); as "layer", or by `use_sliding_window` and `max_window_layers` ("late")."""

WINDOW_KEYS: Mapping[Windows, Mapping[str, Any]] = {
    "none": {},
    "all": {"sliding_window": 4096},
    "layer": {"sliding_window": 4096},
    "late": {"sliding_window": 4096, "use_sliding_window": None, "max_window_layers": None},
}
FIRST_WINDOW = 28
"""Default of `max_window_layers`."""


def learned(rows: int, key: str = "max_position_embeddings", offset: int = 0) -> Part:
    """Returns the part of a learned position table: its size is `key` (default `rows`), position 0 is row `offset`."""

    def read(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        size = config.whole(key)
        return {"positions": Learned(size, offset=offset), "trained_context": size}

    return Part({key: rows}, read, lambda spec: {key: table_size(spec)})


def table_size(spec: ModelSpec) -> int:
    """Returns the size of a learned position table; without one, the trained context, as reading it again shows."""
    return spec.positions.size if isinstance(spec.positions, Learned) else spec.trained_context


def scaled_embedding(usual: bool | None, key: str = "scale_embedding") -> Part:
    """Returns the part of embeddings that are multiplied by sqrt(M) if `key` is true, `usual` being its default."""
    return Part(
        {key: usual},
        lambda config, fields: {"embedding_scale": fields["width"] ** 0.5 if config.flag(key) else 1.0},
        lambda spec: {key: spec.embedding_scale != 1.0},
    )


def stated(family: str) -> Part:
    """Returns a part that requires a stated rotary scaling, since transformers has a default for `family`."""

    def read(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        if not any(config.get(key) for key in SCALINGS):
            raise ConfigError(
                f"config.json lacks rope_parameters, for which transformers has a default of its own in {family}; add "
                "them as transformers saves them"
            )
        return {}

    return Part(read=read)


def windows(
    where: Windows, usual: Kinds | None = None, *, unused: int | None = None, heads_divide: bool = False
) -> Part:
    """Returns the part of windows.

    `usual` are the kinds of layers if there is no `layer_types`, `unused` is the width to write without windows,
    `heads_divide` is whether transformers requires a width that is a multiple of the heads."""

    def read(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"patterns": _read_windows(config, where, fields["layers"], usual)}

    return Part(
        {"layer_types": None, **WINDOW_KEYS[where]},
        read,
        partial(_write_windows, where=where, unused=unused, heads_divide=heads_divide),
    )


def _read_windows(
    config: ConfigReader, where: Windows, layers: int, usual: Kinds | None
) -> tuple[Pattern, ...]:
    kinds = config.get("layer_types")
    if kinds is not None:
        kinds = layer_types(kinds, layers)
    elif usual is not None:
        kinds = usual(config, layers)
    if where in ("none", "all") and set(kinds or [FULL]) != {FULL}:
        raise ConfigError(
            f"config.json: transformers ignores layer_types for model_type {config.get('model_type')} (it lists "
            f"{', '.join(sorted(set(kinds or ())))}); remove it, or use model_type ministral, qwen2 or qwen3"
        )
    size, switch = config.get("sliding_window"), config.get("use_sliding_window")
    if where == "late" and not config.flag("use_sliding_window"):
        size = None
    windowed = from_foreign("sliding_window", size)
    if where != "late" and switch is False and size is not None:
        raise ConfigError(
            f"config.json: use_sliding_window is false, but transformers ignores it in this family and applies "
            f"sliding_window {size}; set sliding_window to null for no window"
        )
    if where in ("none", "all") or (where == "layer" and kinds is None):
        return (windowed,) * layers
    if kinds is None:
        first = config.whole("max_window_layers", FIRST_WINDOW, least=0)
        return tuple(windowed if i >= first else Causal() for i in range(layers))
    if SLIDING in kinds and size is None:
        raise ConfigError(
            "config.json: layer_types has sliding_attention layers, but no window is set "
            f"(sliding_window {config.get('sliding_window')!r}, use_sliding_window {switch!r})"
        )
    return tuple(windowed if kind == SLIDING else Causal() for kind in kinds)


def _write_windows(spec: ModelSpec, where: Windows, unused: int | None, heads_divide: bool) -> dict[str, Any]:
    if heads_divide and spec.width % spec.heads:
        raise Inexpressible("head_dim")
    keys = window_keys(spec, unused)
    kinds = keys["layer_types"]
    if where == "none" and SLIDING not in kinds:
        return {}
    if where == "none" or (where == "all" and len({*kinds}) > 1):
        raise Inexpressible("windows")
    if where == "all":
        return {"sliding_window": keys["sliding_window"]}
    if where == "late":
        keys["use_sliding_window"] = SLIDING in kinds
        # for readers without layer_types: equivalent if the layers with windows come last
        keys["max_window_layers"] = kinds.index(SLIDING) if SLIDING in kinds else len(kinds)
    return keys


def rope_by_kind(bases: Bases, *, old: bool = True) -> Part:
    """Returns the part of rotary positions for each kind of layer (windows or none); `old` adds keys of old files."""

    def read(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        kinds = [FULL if pattern == Causal() else SLIDING for pattern in fields["patterns"]]
        return read_rope_by_kind(config, kinds, fields["head_dim"], bases)

    def write(spec: ModelSpec) -> dict[str, Any]:
        keys = write_rope_by_kind(spec, window_keys(spec)["layer_types"], bases)
        return {key: value for key, value in keys.items() if key not in former or old}

    former = ("rope_theta", "rope_scaling", *(key for key, _ in bases.values()))
    return Part(dict.fromkeys(("rope_parameters", *(former if old else ()))), read, write)


def in_windows(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads positions of a model whose layers with full attention have none."""
    each: list[PositionScheme] = [
        NoPositions() if pattern == Causal() else fields["positions"] for pattern in fields["patterns"]
    ]
    return {"positions": PerLayer.of(each)}


IN_WINDOWS = Part(read=in_windows)
