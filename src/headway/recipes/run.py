"""Running a recipe, from its first stage to its report. Each stage is a training run of its own; an interrupted one is
resumed."""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import headway
from headway.api.translator import bleu
from headway.checkpoints.folder import FINAL
from headway.data.datasets import made_by
from headway.data.pairs import read_pairs
from headway.errors import ConfigError, check_known, listed, near_file
from headway.fonts import fonts
from headway.generate import GenerationConfig, generate
from headway.language import language_of_environment
from headway.models import Decoder, cost
from headway.recipes.recipe import Recipe, Stage
from headway.recipes.report import RecipeReport, draw_panels, panels, translation
from headway.recipes.surgery import moments_after, opened, write_model
from headway.report import no_pictures
from headway.storage.files import atomic_write, json_text
from headway.storage.reading import read_json
from headway.storage.safetensors import write_safetensors
from headway.train.checkpoint import checkpoints, moved_along, read_record
from headway.train.config import TrainConfig
from headway.train.lock import LOCK, locked
from headway.train.metrics import METRICS, read_metrics
from headway.train.microbatch_pool import DTYPES, choose_precision
from headway.train.run import train

DONE, START, MOMENTS = "stage.json", "start", "moments.safetensors"
REPORT = "report"
OF_THE_PLACE = {
    "out",
    "threads",
    "workers",
    "gradient_checkpointing",
    "log_every",
    "save_every",
    "keep_last",
    "report",
}
"""Settings that do not change a stage's measures, except for rounding."""


def run_recipe(recipe: Recipe, *, resume: str = "never", quiet: bool = False) -> RecipeReport:
    """Runs all stages for all seeds, and returns the report, which is also written to the recipe's folder: report.json,
    report.md and, if the recipe has claims, report.png. Its language is that of the environment (`headway.language`),
    except for report.json.

    resume: "never" (the folder must be empty) or "auto": finished stages are kept, and an interrupted stage is resumed,
    bit for bit as `headway train` does. The folder may have been moved as a whole, and the recipe may have more or
    fewer seeds than before.

    Raises what `train` does; ConfigError for another `resume`, for a folder that is not empty or is in use by another
    run, for missing files, and if a finished stage had other settings."""
    check_known(resume, ("never", "auto"), "a recipe has no resume")

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    with locked(recipe.out) as remark:
        if resume == "never" and any(path.name != LOCK for path in recipe.out.iterdir()):
            raise ConfigError(
                f"{recipe.out} is not empty; resume it with --resume auto, or choose another folder with --out"
            )
        if remark is not None:
            say(remark)
        _check_files(recipe)
        records = [
            [_stage(recipe, stage, seed, say=say, quiet=quiet) for stage in recipe.stages]
            for seed in recipe.seeds
        ]
        language = language_of_environment()
        report = RecipeReport(recipe, tuple(map(tuple, records)), language)
        atomic_write(recipe.out / f"{REPORT}.json", json.dumps(report.plain(), indent=1) + "\n")
        drawn = list(panels(recipe.claims, report.measured))
        if drawn and (why := no_pictures()) is not None:
            say(f"{REPORT}.png is not drawn: {why}")
            drawn = []
        if drawn:
            draw_panels(drawn, recipe.out / f"{REPORT}.png", _with_a_font(language, say))
        compared = translation(language)("what the claims compare")
        picture = f"\n![{compared}]({REPORT}.png)\n" if drawn else ""
        atomic_write(recipe.out / f"{REPORT}.md", report.markdown() + picture)
        return report


def _with_a_font(language: str, say: Callable[[str], None]) -> str:
    """Returns the language of a figure's labels: this one, or English (with a remark) if no font has its characters."""
    try:
        fonts(language)
    except ConfigError as why:
        say(f"{REPORT}.png is labelled in English: {why}")
        return "en"
    return language


def _check_files(recipe: Recipe) -> None:
    """Raises ConfigError for all missing files that the tests and the unfinished stages name."""
    missing: dict[str, dict[str, None]] = {}
    for test in recipe.tests or ():
        if not test.exists():
            missing[f"{test}: no such file{near_file(test) or made_by(test)}"] = {"tests": None}
    for seed, stage in itertools.product(recipe.seeds, recipe.stages):
        if not ((folder := recipe.stage_folder(stage, seed)) / DONE).exists():
            for line in stage.config(folder, seed, _begins_with(recipe, stage, seed)).missing(made_by):
                missing.setdefault(line, {})[stage.name] = None
    if missing:
        named = [f"{listed([*stages])}: {line}" for line, stages in missing.items()]
        raise ConfigError("\n".join([*named, f"Paths are relative to {Path.cwd()}"]))


def _stage(
    recipe: Recipe, stage: Stage, seed: int, *, say: Callable[[str], None], quiet: bool
) -> dict[str, Any]:
    """Runs one stage, or reads the record of a finished one; returns its record."""
    folder, source = recipe.stage_folder(stage, seed), _source(recipe, stage)
    model = _begins_with(recipe, stage, seed)
    moments = folder / MOMENTS if stage.moments == "keep" else None
    config = stage.config(folder, seed, model, moments)
    settings: dict[str, Any] = {
        "settings": config.model_dump(mode="json"),
        "surgery": [list(item) for item in stage.surgery],
    }
    if (folder / DONE).exists():
        record = read_json(folder / DONE)
        done_run = {**record["run"], "settings": moved_along(record["run"]["settings"], settings["settings"])}
        if _compared(done_run) != _compared(settings):
            raise ConfigError(
                f"{folder} was run with other settings than the recipe has now; choose another folder with --out"
            )
        return record
    seed_prefix = f"seed {seed}, " if len(recipe.seeds) > 1 else ""
    say(f"--- {seed_prefix}stage {recipe.stages.index(stage) + 1} of {len(recipe.stages)}: {stage.name}")
    if source is not None and not checkpoints(folder):
        before, base = recipe.stage_folder(source, seed), _begins_with(recipe, source, seed)
        if model == folder / START:
            for line in write_model(before / FINAL, folder / START, stage.surgery, base):
                say(f"surgery: {line}")
        if moments is not None:
            folder.mkdir(parents=True, exist_ok=True)
            moments.unlink(missing_ok=True)
            last = checkpoints(before)[-1]
            write_safetensors(moments, moments_after(last, opened(before / FINAL, base).spec, stage.surgery))
    train(config, resume="auto", quiet=quiet)
    task = read_record(checkpoints(folder)[-1])["config"]["task"]  # settings without a task: the model's
    record = {
        "stage": stage.name,
        "seed": seed,
        "task": task,
        "run": settings,
        "measures": measures(folder, config, recipe),
    }
    atomic_write(folder / DONE, json_text(record))
    return record


def _source(recipe: Recipe, stage: Stage) -> Stage | None:
    return next((s for s in recipe.stages if s.name == stage.source), None)


def _begins_with(recipe: Recipe, stage: Stage, seed: int) -> Path | None:
    """Returns the folder of the model that a stage with a source begins with: START in its own folder if surgery or a
    merged adapter changes the source's model, else the source's. None without a source."""
    source = _source(recipe, stage)
    if source is None:
        return None
    changes = stage.surgery or source.settings.get("adapter") is not None
    return recipe.stage_folder(stage, seed) / START if changes else recipe.stage_folder(source, seed) / FINAL


def _compared(run: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a stage's record that must not differ from the recipe when a finished stage is kept."""
    settings = run["settings"].items()
    return {**run, "settings": {name: value for name, value in settings if name not in OF_THE_PLACE}}


ROWS, NEW_TOKENS, TIMES = 8, 16, 5


def measures(folder: Path, config: TrainConfig, recipe: Recipe) -> dict[str, Any]:
    """Returns the measures of a finished run: those of its last step, the last held-out ones (`val_..`), the held-out
    ones before the first step (`start_..`), the median training speed, and the size of the model; for decoders, if the
    recipe has `decode`, the decoding speed; for translators, if it has `tests`, their BLEU."""
    lines = read_metrics(folder / METRICS)
    steps = [line for line in lines if "loss" in line]
    last = steps[-1] if steps else {}
    names = ("loss", "accuracy", "bits_per_byte", "trained_tokens", "seconds")
    values: dict[str, Any] = {"steps": last.get("step", 0)} | {n: last[n] for n in names if n in last}
    if steps:
        values["tokens_per_s"] = statistics.median(line["tokens_per_s"] for line in steps)
    for line in lines:
        held_out = {name: value for name, value in line.items() if name.startswith("val_")}
        values |= held_out
        if line.get("step") == 0:
            values |= {f"start_{name.removeprefix('val_')}": value for name, value in held_out.items()}
    spec, dtype = opened(folder / FINAL).spec, DTYPES[choose_precision(config.dtype).what]
    values["parameters"] = cost.parameter_count(spec)
    if spec.causal:
        values["kv_bytes_per_token"] = cost.kv_bytes_per_token(spec, dtype)
        if recipe.decode is not None and spec.encoder is None:
            model = headway.load(folder / FINAL, task="causal-lm", dtype=dtype).model
            values["decode_tokens_per_s"] = decoding_speed(model, recipe.decode)
    if recipe.tests is not None and spec.encoder is not None:
        sentences, references = read_pairs(*map(str, recipe.tests))
        translator = headway.load(folder / FINAL, task="translation")
        values["bleu"] = bleu(
            [str(text) for text in translator.translate(sentences, beams=1)], references
        ).score
    return values


def decoding_speed(model: Decoder, prompt: int) -> float:
    """Returns the decoding speed in tokens per second of a batch of `ROWS` sequences, greedy, after prompts of `prompt`
    tokens: the median of `TIMES` runs of `NEW_TOKENS` steps, without the time of the prompts."""
    noise = torch.Generator().manual_seed(0)
    prompts = torch.randint(model.spec.vocab, (ROWS, prompt), generator=noise).tolist()

    def seconds(tokens: int) -> float:
        begin = time.perf_counter()
        generate(model, prompts, GenerationConfig(max_new_tokens=tokens, beyond_context=True))
        return time.perf_counter() - begin

    seconds(2)
    spent = [seconds(NEW_TOKENS + 1) - seconds(1) for _ in range(TIMES)]
    return ROWS * NEW_TOKENS / statistics.median(spent)
