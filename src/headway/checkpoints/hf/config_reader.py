"""Typed access to a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from sys import float_info
from typing import Any

from headway.checkpoints.hf.size_limits import checked_sizes
from headway.errors import ConfigError


class ConfigReader:
    """Typed access to a config, with the family's defaults for what is absent."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.config, self.defaults = config, defaults

    def get(self, key: str) -> Any:
        return self.config[key] if key in self.config else self.defaults.get(key)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f'config.json lacks "{key}"')
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f'config.json: "{key}" must be a positive whole number, got {value!r}')
        return checked_sizes({key: value})[key]

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f'config.json lacks "{key}"')
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= float_info.max:
            raise ConfigError(f'config.json: "{key}" must be a number of at least 0, got {value!r}')
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value not in (True, False, None):
            raise ConfigError(f'config.json: "{key}" must be true or false, got {value!r}')
        return bool(value)

    def switch(self, switch: bool | str) -> bool:
        return self.flag(switch) if isinstance(switch, str) else switch

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key) or default
        if not isinstance(value, str):
            raise ConfigError(f'config.json: "{key}" must be text, got {value!r}')
        return value
