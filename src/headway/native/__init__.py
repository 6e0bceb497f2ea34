"""The native kernels: C++ compiled once per CPU level, the best one opened at run time.

`library()` is the open library or None, `why_missing()` says why there is none and what to do, `threads()` is how
many threads a kernel may use. Names are looked up on first use, so that building imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.native.build import LEVELS as LEVELS
    from headway.native.loader import Library as Library
    from headway.native.loader import library as library
    from headway.native.loader import threads as threads
    from headway.native.loader import why_missing as why_missing

_HOME_OF = {
    "LEVELS": "build",
    "Library": "loader",
    "library": "loader",
    "threads": "loader",
    "why_missing": "loader",
}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f"headway.native.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'headway.native' has no attribute {name!r}")
