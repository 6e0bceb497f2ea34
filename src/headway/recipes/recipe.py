"""A recipe's YAML file: settings of all stages, and the stages.

out: runs/evolution
depth: 4                      # settings of `headway train`, for every stage whose task has them ...
seeds: [0, 1, 2]              # all stages are run for each seed, in OUT/seed-N
stages:
  - name: llama
    data: wikitext.txt        # ... and settings of this stage alone
  - name: short
    from: llama               # the stage whose model this one begins with [default: the stage before]; null: none
    surgery: {gqa: {kv_heads: 2, pool: mean}}
    moments: keep             # optimizer state: keep that of `from`, or zero
    task: chat
    published: {loss: 1.73}   # published figures, shown in the table next to ours
    small: {steps: 2}         # these settings replace others with --small
claims:
  pooling the mean is better than nothing: short.val_loss < llama.val_loss
columns: [val_loss]           # measures in the table
decode: 512                   # also measure the decoding speed of decoders after prompts of this many tokens
test_source: test.en          # also measure the BLEU of translators: greedy translations of these sentences
test_target: test.de          # against these references
small: {depth: 1, steps: 2}   # settings of all stages with --small
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from headway.errors import ConfigError, check_known, did_you_mean
from headway.recipes.claims import Claim
from headway.recipes.surgery import check_surgery
from headway.train.config import TrainConfig
from headway.train.config_io import SMALL, STAGES, parse_overrides, read_yaml
from headway.train.rows_config import FROM_SCRATCH
from headway.train.tasks import settings_of

Moments = Literal["keep", "zero"]
RECIPE_KEYS = ("out", "seed", "seeds", "claims", "columns", "decode", "test_source", "test_target")
STAGE_KEYS = ("name", "from", "surgery", "moments", "published", SMALL)
OF_RECIPE = ("out", "seed", "seeds")
"""Settings of the whole recipe that no stage may have."""
KINDS = {"seeds": list | tuple, "columns": list | tuple, "claims": dict, "published": dict, SMALL: dict}
FIRST_ONLY = (*FROM_SCRATCH, "layers", "order", "model", "tokenizer", "units", "vocab")
"""Settings of all stages that only stages with fresh weights use: stages with a source take its model and tokenizer."""


@dataclass(frozen=True)
class Stage:
    """One run of a recipe.

    Attributes:
        settings: settings of the run, without `out`, `seed`, and, with a source, `model`.
        source: name of the stage whose trained model it begins with; None for an independent run.
        surgery: operations on that model before training, as (name, options), in order.
        moments: initial state of the optimizer: "keep" takes that of the source's last step, "zero" a fresh one.
        published: published figures, by column of the table.
    """

    name: str
    settings: Mapping[str, Any]
    source: str | None = None
    surgery: tuple[tuple[str, Any], ...] = ()
    moments: Moments = "zero"
    published: Mapping[str, Any] = field(default_factory=dict)

    def config(
        self, out: Path, seed: int, model: Path | None = None, moments: Path | None = None
    ) -> TrainConfig:
        """Returns the settings of its run in the folder `out`. Raises ConfigError, with the stage's name, for invalid
        ones."""
        values = {**self.settings, "out": str(out), "seed": seed}
        values |= {} if model is None else {"model": str(model)}
        values |= {} if moments is None else {"moments": str(moments)}
        return settings_of(values.get("task")).of(values, f"stage {self.name}")


@dataclass(frozen=True)
class Recipe:
    """Stages that are run in order for each seed.

    columns: measures in the table; if empty, the usual ones and those of the tasks.
    decode: length of the prompts after which the decoding speed of decoders is measured; None: it is not measured.
    tests: files of sentences and their translations, for the BLEU of translators; None: it is not measured.
    """

    out: Path
    stages: tuple[Stage, ...]
    seeds: tuple[int, ...] = (0,)
    claims: tuple[Claim, ...] = ()
    columns: tuple[str, ...] = ()
    decode: int | None = None
    tests: tuple[Path, Path] | None = None

    def stage_folder(self, stage: Stage, seed: int) -> Path:
        """Returns the folder of a stage's run for a seed."""
        return self.out / f"seed-{seed}" / f"{self.stages.index(stage) + 1}-{stage.name}"


def read_recipe(
    path: str | Path,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    *,
    small: bool = False,
) -> Recipe:
    """Reads a recipe. In order of increasing precedence, settings come from: `defaults` (the environment), the file's
    settings for all stages, a stage's own, with `small` those under `small:` (of the recipe, then of the stage),
    `KEY=VALUE` overrides and flags for all stages, `STAGE.KEY=VALUE` overrides.

    Raises ConfigError, before anything is run, for settings that no stage's task has, stage names that are not unique,
    a source that is no earlier stage, unknown operations, malformed claims, and for `small` if the file has no settings
    under that key."""
    values = {**(defaults or {}), **read_yaml(path)}
    entries = values.pop(STAGES, None)
    if not (isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries)):
        raise ConfigError(f"{path}: stages must be a list of one or more mappings")
    names = [str(entry.get("name", "")) for entry in entries]
    if len({*names}) < len(names) or not all(map(str.isidentifier, names)):
        raise ConfigError(f"{path}: every stage needs its own name of letters, digits and _, got {names}")
    for_all: dict[str, Any] = {}
    for_one: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in {**parse_overrides(overrides), **(flags or {})}.items():
        name, dot, setting = key.partition(".")
        if dot:
            check_known(name, for_one, f"{key}: there is no stage")
            for_one[name][setting] = value
        else:
            for_all[key] = value
    if small and not any(SMALL in part for part in (values, *entries)):
        raise ConfigError(f"--small needs settings under `{SMALL}:`, and {path} has none")
    _check_kinds(values, path)
    for entry, name in zip(entries, names, strict=True):
        _check_kinds(entry, f"{path}: stage {name}")
    small_settings = values.pop(SMALL, None) or {}
    of_all = [values, dict(small_settings) if small else {}, for_all]  # later ones win
    recipe = {key: layer.pop(key) for layer in of_all for key in RECIPE_KEYS if key in layer}
    _check_kinds(recipe, path)
    one_seed, seed_list = recipe.get("seed"), recipe.get("seeds")
    if one_seed is not None and seed_list is not None:
        raise ConfigError(
            f"{path}: seed {one_seed} and seeds {seed_list} are given; give one of them (seeds=[{one_seed}])"
        )
    seeds = tuple(seed_list or [one_seed or 0])
    merged = {key: value for layer in of_all for key, value in layer.items()}
    tasks = {merged.get("task"), *(entry.get("task", merged.get("task")) for entry in entries)}
    for key in merged:
        _check_known(key, tasks, path)
    stages: list[Stage] = []
    for entry, name in zip(entries, names, strict=True):
        stage_settings = {key: value for key, value in entry.items() if key not in STAGE_KEYS}
        of_one = [stage_settings, (entry.get(SMALL) or {}) if small else {}, for_one[name]]
        stages.append(_stage(entry, of_all, of_one, [s.name for s in stages], f"{path}: stage {name}"))
    claims = tuple(Claim.read(text, rule, names) for text, rule in (recipe.get("claims") or {}).items())
    columns, out = tuple(recipe.get("columns") or ()), Path(str(recipe.get("out") or "runs/recipe"))
    sides = [str(recipe[key]) for key in ("test_source", "test_target") if recipe.get(key)]
    if len(sides) == 1:
        raise ConfigError(f"{path}: test_source and test_target belong together; give both, or none")
    tests = (Path(sides[0]), Path(sides[1])) if sides else None
    if tests is not None and not any("target" in settings_of(task).model_fields for task in tasks):
        raise ConfigError(f"{path}: test_source and test_target are for translators, but no stage trains one")
    parsed = Recipe(out, tuple(stages), seeds, claims, columns, recipe.get("decode"), tests)
    for stage in stages:  # every setting is validated before anything is run
        model = None if stage.source is None else Path(stage.source)
        stage.config(parsed.stage_folder(stage, seeds[0]), seeds[0], model)
    return parsed


def _stage(
    entry: Mapping[str, Any],
    of_all: Sequence[Mapping[str, Any]],
    of_one: Sequence[Mapping[str, Any]],
    earlier: Sequence[str],
    where: str,
) -> Stage:
    """Returns the stage of an entry. `of_all` and `of_one` are layers of settings of all stages and of this one, in
    order of increasing precedence; at the same place, the stage's own layer wins."""
    source = entry.get("from", earlier[-1] if earlier and "model" not in entry else None)
    if source is not None:
        check_known(source, earlier, f"{where}: from: there is no earlier stage")
    moments = entry.get("moments", "zero")
    check_known(moments, get_args(Moments), f"{where}: there are no moments")
    surgery = entry.get("surgery", {})
    if source is None and (surgery or moments == "keep"):
        raise ConfigError(
            f"{where}: surgery and moments: keep need the model of an earlier stage (from: NAME)"
        )
    stage_settings, _, for_one = of_one
    small_settings = entry.get(SMALL) or {}
    keys = stage_settings.keys() | small_settings.keys() | for_one.keys()
    if wrong := sorted(keys & {*OF_RECIPE, *(["model"] if source is not None else [])}):
        why = "belongs to the whole recipe" if wrong[0] in OF_RECIPE else f"is that of stage {source}"
        raise ConfigError(f"{where}: {wrong[0]} {why}; leave it out")
    layers = [layer for both in zip(of_all, of_one, strict=True) for layer in both]
    task = next((layer["task"] for layer in reversed(layers) if "task" in layer), None)
    fields = settings_of(task).model_fields
    for key in (*small_settings, *for_one):
        _check_known(key, [task], where)
    settings = {
        key: value
        for layer in layers
        for key, value in layer.items()
        if layer is stage_settings or (key in fields and not (source is not None and key in FIRST_ONLY))
    }
    operations = tuple(check_surgery(surgery, where))
    return Stage(
        str(entry["name"]), settings, source, operations, moments, dict(entry.get("published") or {})
    )


def _check_kinds(values: Mapping[str, Any], where: str | Path) -> None:
    """Raises ConfigError for a value that is no list, or no mapping, where the recipe needs one."""
    for key, kind in KINDS.items():
        if not isinstance(value := values.get(key), kind | None):
            raise ConfigError(
                f"{where}: {key} must be a {'mapping' if kind is dict else 'list'}, got {value!r}"
            )


def _check_known(key: str, tasks: Collection[str | None], where: str | Path) -> None:
    """Raises ConfigError for a setting that none of the tasks has."""
    names = {key for task in tasks for key in settings_of(task).model_fields}
    if key not in names:
        named = ", ".join(sorted(task or "text" for task in tasks))
        raise ConfigError(
            f"{where}: no stage has a setting {key}{did_you_mean(key, names)}; their tasks: {named}"
        )
