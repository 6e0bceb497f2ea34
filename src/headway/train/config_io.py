"""Reading the settings of a run from a YAML file, `key=value` overrides and flags, and writing them as YAML; and the
settings with which `headway eval MODEL --task TASK` measures a trained model as its training measures held-out data."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from headway.errors import ConfigError, check_known, listed
from headway.train.config import TrainConfig, extra
from headway.train.rows_config import PackedConfig
from headway.train.tasks import find_task, settings_of, tasks_with

if TYPE_CHECKING:
    from headway.models import ModelSpec

STAGES, SMALL = "stages", "small"  # keys that are no settings: of a recipe's file, and of any file
SHIPPED = (
    Path(__file__).parents[1] / "recipes" / "shipped"
)  # the project's recipes; only wheels have this folder


def read_config(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    *,
    small: bool = False,
) -> TrainConfig:
    """Reads settings from these sources, each of which may be absent; later ones take precedence: `defaults` (the
    environment), a YAML file, with `small` the settings under its key `small`, `key=value` overrides, flags. The
    setting `task` selects the settings class.

    Raises ConfigError for a file that is no YAML mapping, a malformed override, a setting that is given both as an
    override and as a flag, a setting of another task, and as `TrainConfig.of`.
    """
    values = read_yaml(path) if path is not None else {}
    in_toy_size = values.pop(SMALL, None)
    if small and not isinstance(in_toy_size, dict):
        given = "no --config is given" if path is None else f"{path} has none"
        raise ConfigError(f"--small needs settings under `{SMALL}:` in the YAML file of --config; {given}")
    values |= in_toy_size if small and in_toy_size else {}
    parsed, flags = parse_overrides(overrides), flags or {}
    for key in sorted(parsed.keys() & flags.keys()):
        raise ConfigError(f"{key} is given twice: as {key}=... and as a flag; give it once")
    sources = [str(path)] if path is not None else []
    sources += ["the command line"] if parsed or flags or not sources else []
    merged, where = values | parsed | dict(flags), " + ".join(sources)
    task = merged.get("task")
    settings_class = settings_of(task)
    for key in merged:
        if key not in settings_class.model_fields and (other_tasks := tasks_with(key)):
            raise ConfigError(
                f"{where}: {key} is a setting of task {listed(other_tasks)}, but the task is {task or 'text'}; "
                f"give task={other_tasks[0]} (--task {other_tasks[0]}), or leave {key} out"
            )
    known_defaults = {
        name: value for name, value in (defaults or {}).items() if name in settings_class.model_fields
    }
    return settings_class.of(known_defaults | merged, where)


def config_yaml(config: TrainConfig) -> str:
    """Returns the resolved settings as commented YAML, which `read_config` can read."""
    lines: list[str] = []
    group = None
    for name, field in type(config).grouped().items():
        properties = extra(field)
        if properties["group"] != group:
            group = properties["group"]
            lines += ["", f"# {group}"] if lines else [f"# {group}"]
        value = getattr(config, name)
        plain = list(value) if isinstance(value, tuple) else value
        text = yaml.safe_dump({name: plain}, allow_unicode=True, default_flow_style=True, width=10**6)
        unit = f" [{properties['unit']}]" if "unit" in properties else ""
        lines.append(f"{text.strip()[1:-1]:<34}  # {field.description}{unit}")
    return "\n".join(lines) + "\n"


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads a YAML mapping of settings. If there is no file `recipes/NAME.yaml` here, that path means the recipe which
    is shipped with the package.

    Raises ConfigError, which names the file, and the line if it is not YAML."""
    shipped = SHIPPED / Path(path).name
    use_shipped = Path(path).parent == Path("recipes") and shipped.exists() and not Path(path).exists()
    try:
        text = (shipped if use_shipped else Path(path)).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the settings {path}: {reason}") from None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold `name: value` lines, but holds a {type(values).__name__}")
    return {str(key): value for key, value in values.items()}


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Parses overrides such as `["lr=1e-3", "tied=false"]` into a mapping; values are read as YAML.

    Raises ConfigError for an override without key or `=`, and for a key that is given twice."""
    values: dict[str, Any] = {}
    for item in overrides:
        key, equals, text = item.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise ConfigError(f"{item!r} is not an override; write key=value, for example lr=1e-3")
        if key in values:
            raise ConfigError(f"{key} is given twice: {values[key]!r} and {text!r}; give it once")
        try:
            values[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            values[key] = text  # not YAML: for example a pattern
    return values


LONGEST = 2048


def measuring_settings(name: str, spec: "ModelSpec", values: Mapping[str, Any]) -> TrainConfig:
    """Returns the settings with which a task measures a model of this spec: `values`, and defaults for the others. The
    default row length is the model's trained context, at most `LONGEST` tokens if rows are packed.

    Raises ConfigError for a model that the task does not measure, for values that only matter in training, for rows
    longer than the model can take, and as `TrainConfig.of`."""
    task = find_task(name)
    if (reason := task.unsupported(spec)) is not None:
        raise ConfigError(f"task {name}: {reason}; leave --task out, or choose another model")
    allowed, limit = task.measured_by, spec.context_limit
    for key in values if allowed else ():
        check_known(key, allowed, f"eval of task {name} has no setting", are="it has")
    longest = spec.usual_context
    if issubclass(task.settings, PackedConfig):  # packed rows are always filled up to `context`
        longest = min(longest, LONGEST)
    defaults = {"context": longest} if "context" in allowed else {}
    merged: dict[str, Any] = {"task": name, **defaults, **values}
    length = merged.get("context")
    if limit is not None and isinstance(length, int) and length > limit:
        raise ConfigError(
            f"context {length} is more than the {limit} tokens that this model can take; lower it"
        )
    if length is not None and "batch_tokens" in task.settings.model_fields:
        merged["batch_tokens"] = max(length, task.settings.model_fields["batch_tokens"].default)
    return task.settings.of(merged)
