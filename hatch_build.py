"""Compiles the native kernels while the package is built, as HEADWAY_BUILD asks: auto, require or off.

Without HEADWAY_LEVELS it is the level of this machine alone, which takes minutes; wheels for others have
HEADWAY_LEVELS=all, and HEADWAY_MACHINE where CXX compiles for another architecture (packages/wheels.py says all three).
A wheel takes freshly compiled libraries with it and is tagged for its platform; without them it is a pure one. Those of
a folder HEADWAY_KEEP are taken where they are of these sources, and new ones stay there.
An editable install keeps them beside the sources, where `python -m headway.native.build` renews them.
"""

import os
import platform
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
        kept, machine = (
            os.environ.get("HEADWAY_KEEP"),
            os.environ.get("HEADWAY_MACHINE") or platform.machine(),
        )
        self.scratch = None if editable or kept else tempfile.TemporaryDirectory(prefix="headway-wheel-")
        out = build.LIBRARIES if editable else Path(self.scratch.name if self.scratch else str(kept))
        try:
            only, best = build.asked_levels(machine=machine)
            fresh, say = self.scratch is not None, self.app.display_info
            made = build.build(out, only, best=best, machine=machine, force=fresh, say=say)
        except BuildError as error:
            if how == "require":
                raise
            self.app.display_warning(f"headway is installed without its native kernels: {error}")
            return
        if not editable:
            here = sysconfig.get_platform()
            system = here.removesuffix(platform.machine()) + machine if here.startswith("linux") else here
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{system.replace('-', '_').replace('.', '_')}"
            build_data["force_include"] |= {str(path): f"headway/native/lib/{path.name}" for path in made}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if getattr(self, "scratch", None):
            self.scratch.cleanup()
