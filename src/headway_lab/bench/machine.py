"""Where and with what a row was measured."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from headway import hardware
from headway.native.loader import search


@cache
def _versions() -> dict[str, str | None]:
    return {name: _version(name) for name in ("headway", "torch", "transformers")}


def machine() -> dict[str, Any]:
    """Processor, threads and versions of this process, in JSON's types."""
    found = search().library
    return {
        "cpu": hardware.cpu_name(),
        "cores": hardware.cores(),
        "level": hardware.cpu_level(),
        "native": found.level if found is not None else None,
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **_versions(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
