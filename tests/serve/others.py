"""Programs of other projects that call a server: in environments of their own and from their sources, if ours cannot
hold them. `HEADWAY_PEERS` is the folder that keeps what was fetched; by default `.peers` beside this repository."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

HOME = Path(os.environ.get("HEADWAY_PEERS") or Path(__file__).parents[2] / ".peers")


def python_of(name: str, *requirements: str) -> Path:
    """Returns the interpreter of an environment with these requirements, which is made if absent."""
    home = HOME / name
    if not (home / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        subprocess.run([home / "bin" / "python", "-m", "pip", "install", "-q", *requirements], check=True)
        (home / "complete").touch()
    return home / "bin" / "python"


def sources_of(package: str, version: str) -> Path:
    """Returns the folder of a package's source distribution, which is fetched if absent."""
    home = HOME / "src" / f"{package.replace('-', '_')}-{version}"
    if not home.is_dir():
        home.parent.mkdir(parents=True, exist_ok=True)
        options = ["--no-deps", "--no-binary", package, f"{package}=={version}"]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", *options, "-d", home.parent], check=True
        )
        with tarfile.open(f"{home}.tar.gz") as packed:
            packed.extractall(home.parent, filter="data")
    return home
