"""Compiles the native kernels while the package is built, as HEADWAY_BUILD asks: auto, require or off.

Without HEADWAY_LEVELS it is the level of this machine alone, which takes minutes; wheels for others have
HEADWAY_LEVELS=all. A wheel takes freshly compiled libraries with it and is tagged for its platform; without them it is
a pure one.
An editable install keeps them beside the sources, where `python -m headway.native.build` renews them.
"""

import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        sys.path.insert(0, str(Path(self.root, "src")))
        from headway.errors import BuildError
        from headway.native import build

        how = build.mode()
        if how == "off":
            self.app.display_info("HEADWAY_BUILD=off: no native kernels")
            return
        editable = version == "editable"
        self.scratch = None if editable else tempfile.TemporaryDirectory(prefix="headway-wheel-")
        out = Path(self.scratch.name) if self.scratch else build.LIBRARIES
        try:
            only, best = build.asked_levels()
            made = build.build(out, only, best=best, force=not editable, say=self.app.display_info)
        except BuildError as error:
            if how == "require":
                raise
            self.app.display_warning(f"headway is installed without its native kernels: {error}")
            return
        if not editable:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
            build_data["force_include"] |= {str(path): f"headway/native/lib/{path.name}" for path in made}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if getattr(self, "scratch", None):
            self.scratch.cleanup()
