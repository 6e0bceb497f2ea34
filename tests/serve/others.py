"""Programs of others that ask a server: in environments of their own, and from their sources, where ours cannot hold
them. `HEADWAY_PEERS` is a folder that keeps what was fetched; without it that is `.peers` beside this repository."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

HOME = Path(os.environ.get("HEADWAY_PEERS") or Path(__file__).parents[2] / ".peers")


def python_of(name: str, *requirements: str) -> Path:
    """The interpreter of an environment that has these requirements; it is made where it is not there."""
    home = HOME / name
    if not (home / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        subprocess.run([home / "bin" / "python", "-m", "pip", "install", "-q", *requirements], check=True)
        (home / "complete").touch()
    return home / "bin" / "python"


def sources_of(package: str, version: str) -> Path:
    """The folder of a package's source distribution."""
    home = HOME / "src" / f"{package.replace('-', '_')}-{version}"
    if not home.is_dir():
        home.parent.mkdir(parents=True, exist_ok=True)
        asked = ["--no-deps", "--no-binary", package, f"{package}=={version}"]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", *asked, "-d", home.parent], check=True)
        with tarfile.open(f"{home}.tar.gz") as packed:
            packed.extractall(home.parent, filter="data")
    return home
