"""What the settings of every kind of run have in common: fields that describe themselves, and strict reading.

    TrainConfig.of({"data": "text/", "steps": 1000}, where="run.yaml")   # ConfigError names key and file

Imports no torch, so that `--help` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headway.errors import ConfigError
from headway.train.config_checks import explain
from headway.train.setting_aliases import known_as


def setting(default: Any, description: str, *, group: str, unit: str | None = None, **limits: Any) -> Any:
    """A field with its one description, its unit and the group under which `--help` lists it."""
    extra: dict[str, Any] = {"group": group} | ({"unit": unit} if unit else {})
    return Field(default, description=description, json_schema_extra=extra, **limits)


class Settings(BaseModel):
    """Settings of one run. Every field says what it does and in which unit; an unknown key is an error.

    Attributes:
        command: of the command line, whose run this is.
        keeps_bits: fields that may be set differently when a run goes on, which then ends with the same bits.
        may_change: fields that may be, with other bits. What is in neither is refused: it decides weights, data, or the
            optimizer's state.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
    command: ClassVar[str]
    keeps_bits: ClassVar[frozenset[str]] = frozenset(
        ("out", "log_every", "eval_every", "save_every", "keep_last")
    )
    may_change: ClassVar[frozenset[str]] = frozenset(("threads",))

    if TYPE_CHECKING:  # every kind of run declares these, in the group and the order of its own
        max_seconds: float | None
        clip: float
        dtype: Any
        threads: int | None
        seed: int
        out: str
        log_every: int
        eval_every: int | None
        save_every: int | None
        keep_last: int

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "the settings") -> Self:
        """Validate a mapping. ConfigError lists every problem: the key, what was given, what is asked for."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} must be a mapping of settings, not a {type(values).__name__}")
        unknown = [str(key) for key in values if key not in cls.model_fields]
        if unknown:
            said = ", ".join(f'"{key}"{known_as(key, cls.model_fields)}' for key in unknown)
            raise ConfigError(
                f"{where}: unknown setting {said}; `headway {cls.command} --help` lists them all"
            )
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(f"{where}: " + "; ".join(explain(error, cls.model_fields))) from None
