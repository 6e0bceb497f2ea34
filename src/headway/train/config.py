"""The settings of a training run, which define the flags of `headway train` and the keys of its YAML file.

    config = TextConfig.of({"data": "text/", "steps": 1000}, where="run.yaml")   # ConfigError names key and file

Each task has a settings class (`headway.train.tasks`); this module has what they share. It does not import torch, so
that `headway train --help` starts fast.
"""

from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, model_validator
from pydantic.fields import FieldInfo

from headway.errors import ConfigError, near_file
from headway.report import described
from headway.threads import MOST_THREADS
from headway.train.foreign_names import known_as

GROUPS = ("Task", "Data", "Model", "Adapter", "Batch", "Length", "Optimizer", "Machine", "Output")
REMOTE = "hf://"


def setting(
    default: Any,
    *,
    group: str | None = None,
    unit: str | None = None,
    on_resume: Literal["fixed", "same bits", "other bits"] | None = None,
    is_path: bool = False,
    **limits: Any,
) -> Any:
    """Returns a field of a settings class. Its text in `--help` and config.yaml is in the docstring of the class
    (`Settings`).

    Args:
        group: heading in `--help` and config.yaml [default: the group of the class].
        unit: unit of its value, shown in `--help` and config.yaml.
        on_resume: whether a resumed run may change the value: no ("fixed"; for what determines weights, data or
            optimizer state), or yes, and it ends with the "same bits" or "other bits". The default is "fixed", and
            "same bits" in the group Output.
        is_path: whether the value is the path of a file or folder to read, or an hf:// address.
        limits: constraints of the value, as in `pydantic.Field`.
    """
    extra: dict[str, Any] = {"group": group, "on_resume": on_resume, "is_path": is_path}
    extra |= {"unit": unit} if unit else {}
    return Field(default, json_schema_extra=extra, **limits)


def extra(field: FieldInfo) -> dict[str, Any]:
    """Returns what `setting` adds to pydantic's properties of a field: group, on_resume, is_path, and unit if any."""
    assert isinstance(field.json_schema_extra, dict), "fields of settings are made by `setting`"
    return field.json_schema_extra


class Settings(BaseModel):
    """Base class of settings; an unknown key is an error. The docstring of a subclass must have a line "name: text" for
    each field that it declares, and for each inherited field with another meaning.

    group    default group of the fields that a class declares
    usual    changed defaults of inherited fields
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
    group: ClassVar[str]
    usual: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for name in cls.model_fields.keys() & cls.__annotations__.keys():
            properties = extra(cls.model_fields[name])
            properties["group"] = properties["group"] or cls.group
            properties["on_resume"] = properties["on_resume"] or (
                "same bits" if properties["group"] == "Output" else "fixed"
            )
        for name, text in described(cls)[1].items():
            cls.model_fields[name].description = text
        if usual := cls.__dict__.get("usual"):
            for name, value in usual.items():
                cls.model_fields[name].default = value
            cls.model_rebuild(force=True)

    def contradictions(self) -> Iterable[str]:
        """Returns descriptions of contradictions between values that are valid by themselves. Every class checks only
        fields that it declares: those of its bases are checked by their own `contradictions`."""
        return ()

    def present(self, names: Iterable[str]) -> list[str]:
        """Returns the settings among `names` that have a value (neither None nor empty)."""
        return [name for name in names if getattr(self, name) not in (None, ())]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        classes: list[Any] = [class_ for class_ in type(self).__mro__ if "contradictions" in vars(class_)]
        if problems := [problem for class_ in classes for problem in class_.contradictions(self)]:
            raise ValueError("; ".join(problems))
        return self


class MachineSettings(Settings):
    """Settings of the machine, and of how a run computes.

    dtype: number format of the matrix products; weights and optimizer stay fp32. auto: bf16 if the CPU has
        instructions for it, else fp32. fp16 is refused on a CPU
    gradient_checkpointing: what the backward pass recomputes instead of keeping its activations: whole
        blocks, or one part of each block
    backend: attention backend; an error if it cannot run, never a fallback
    threads: CPU threads [default: torch's]
    mesh: what the processes of the run share: dp=N, the micro batches of a step; fsdp=N, these and all
        weights; expert=N, these and the experts of each layer; tp=N, each layer; cp=N, the tokens of each row;
        dp=2,cp=4 for 8 processes [default: dp, with all processes]
    patience: how long processes wait for each other before the run ends
    seed: seed of weights, order of the data and dropout
    """

    group = "Machine"

    dtype: Literal["auto", "bf16", "fp32", "fp16"] = setting("auto")
    gradient_checkpointing: Literal["none", "block", "attention", "feed_forward"] = setting(
        "none", on_resume="other bits"
    )
    backend: str = setting("auto")
    threads: int | None = setting(None, ge=1, le=MOST_THREADS, on_resume="other bits")
    mesh: str | None = setting(None, on_resume="same bits")
    patience: float = setting(600.0, unit="s", gt=0, on_resume="same bits")
    seed: int = setting(0, ge=0, lt=2**63)


class OutputSettings(Settings):
    """Settings of a run's output: progress, evaluations, checkpoints.

    out: folder of the run
    log_every: a progress line every N steps
    eval_every: evaluate every N steps [default: only at the end]
    eval_at_start: also evaluate before the first step
    keep_best: the trained model is the evaluated one that is best on held-out data by `best_by`; its
        checkpoint is kept; needs eval_every
    best_by: measure on held-out data by which models are compared, named as in metrics.jsonl after val_:
        loss, accuracy, f1, ...; lower is better for losses and bits_per_byte, higher for others
    save_every: write a checkpoint every N steps [default: only at the end]
    keep_last: checkpoints to keep
    checkpoints: format of checkpoints: folder, a Hugging Face folder that one process writes; shards, a part
        from each process. auto: shards if weights are sharded (mesh) or saved in the background, else folder
    save_in_background: copy a checkpoint's content to memory, and train on while it is written (checkpoints:
        shards)
    report: also send the lines of metrics.jsonl to tensorboard, wandb or trackio
    average: the trained model is the mean of the last N checkpoints (Vaswani et al. 2017, section 6.1); needs
        save_every, and keep_last of N or more
    """

    group = "Output"

    out: str = setting("runs/train")
    log_every: int = setting(10, unit="steps", ge=1)
    eval_every: int | None = setting(None, unit="steps", ge=1)
    eval_at_start: bool = setting(False)
    keep_best: bool = setting(False)
    best_by: str = setting("loss")
    save_every: int | None = setting(None, unit="steps", ge=1)
    keep_last: int = setting(2, unit="checkpoints", ge=1)
    checkpoints: Literal["auto", "folder", "shards"] = setting("auto")
    save_in_background: bool = setting(False)
    report: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = setting(())
    average: int = setting(1, unit="checkpoints", ge=1)


class TrainConfig(MachineSettings, OutputSettings):
    """Settings that the runs of all tasks have. An unknown key is an error.

    task: what is trained: causal-lm (the next token), masked-lm (masked tokens), translation, chat,
        preference, classify, tag, answer, embed, or MODULE:CLASS of your own; on text, the default is the
        task of the model; `--task NAME --help` lists the settings of a task
    max_seconds: end the run after this time
    early_stopping_patience: end the run after N evaluations in a row without an improvement of `best_by`;
        needs eval_every
    clip: largest norm of a step's gradient; inf for no clipping
    moments: a checkpoint of another run, or its optimizer.safetensors, whose optimizer moments this run
        begins with if names and shapes match [default: zeros]
    """

    task: str | None = setting(None, group="Task")
    max_seconds: float | None = setting(None, group="Length", unit="s", gt=0, on_resume="same bits")
    early_stopping_patience: int | None = setting(
        None, group="Length", unit="evaluations", ge=1, on_resume="same bits"
    )
    clip: float = setting(1.0, group="Optimizer", gt=0)
    moments: str | None = setting(None, group="Optimizer", is_path=True)

    def contradictions(self) -> Iterable[str]:
        if self.average > 1 and (self.save_every is None or self.keep_last < self.average):
            yield f"average {self.average} needs save_every, and keep_last of {self.average} or more"
        if self.eval_every is None and self.watches:
            yield "keep_best and early_stopping_patience compare evaluations during training; give eval_every"
        if self.best_by != "loss" and not self.watches:
            yield "best_by needs keep_best or early_stopping_patience; give one of them, or leave best_by out"
        if self.average > 1 and self.keep_best:
            yield f"average {self.average} and keep_best both choose the final model; give one of them"
        if self.save_in_background and self.checkpoints == "folder":
            yield "checkpoints=folder cannot be saved in the background; leave out checkpoints, or save_in_background"

    @property
    def watches(self) -> bool:
        """Whether the run compares its models by held-out data (`headway.train.ending`)."""
        return self.keep_best or self.early_stopping_patience is not None

    @property
    def paths(self) -> dict[str, str]:
        """Files, folders and hf:// addresses that the settings name, by setting."""
        names = [name for name, field in self.grouped().items() if extra(field)["is_path"]]
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def missing(self, made_by: Callable[[Path], str] = lambda path: "") -> list[str]:
        """Returns a line for each missing file that the settings name. It suggests a file with a similar name; if there
        is none, it ends with `made_by(path)`."""
        return [
            f"{name} {value}: no such file or folder{near_file(Path(value)) or made_by(Path(value))}"
            for name, value in self.paths.items()
            if not value.startswith(REMOTE) and not Path(value).exists()
        ]

    @field_serializer("clip", when_used="json")
    def _in_json(self, clip: float) -> float | str:
        """Returns infinity as a string: JSON has none."""
        return clip if isfinite(clip) else str(clip)

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "the settings") -> Self:
        """Validates a mapping of settings. Raises ConfigError that lists every problem: the key, its value, and what is
        expected."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} must be a mapping of settings, not a {type(values).__name__}")
        try:
            return cls.model_validate({str(key): _at_home(value) for key, value in values.items()})
        except ValidationError as error:
            raise ConfigError(f"{where}: " + "; ".join(_explained(error, cls.model_fields))) from None

    @classmethod
    def grouped(cls) -> dict[str, FieldInfo]:
        """Returns the fields, in the order of their groups."""
        place = {group: i for i, group in enumerate(GROUPS)}
        groups = {name: extra(field)["group"] for name, field in cls.model_fields.items()}
        order = sorted(groups, key=lambda name: place.get(groups[name], len(GROUPS)))
        return {name: cls.model_fields[name] for name in order}


def _at_home(value: Any) -> Any:
    """Expands a leading ~/ as the shell does: neither YAML nor `--out=~/runs` does, and a folder named "~" would be
    created."""
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value


def _explained(error: ValidationError, fields: Mapping[str, FieldInfo]) -> Iterable[str]:
    """Yields pydantic's errors as text: the setting, its value, and what is expected."""
    for item in error.errors():
        if not item["loc"]:
            yield item["msg"].removeprefix("Value error, ")
            continue
        name = str(item["loc"][0])
        if item["type"] == "extra_forbidden":
            yield f'unknown setting "{name}"{known_as(name, fields)}; `headway train --help` lists them all'
            continue
        if item["type"] == "missing":
            yield f"{name} is missing: {fields[name].description}"
            continue
        unit = extra(fields[name]).get("unit")
        message = item["msg"][0].lower() + item["msg"][1:]
        yield f"{name} = {item['input']!r}: {message}" + (f" ({unit})" if unit else "")
