"""The driver that repeats recorded calls: on this machine, whose kernels were recorded, it finds what they wrote, and
it reports what is wrong."""

import ctypes
import os
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from headway.errors import BuildError
from headway.native import build, interface, loader
from headway.native.linear import linear
from headway.native.panels import Panels
from headway.quantization import quantize_weights
from tests.native.arm.calls import Unknown, taken
from tests.native.arm.decode import changes
from tests.native.arm.files import CaseFile
from tests.native.arm.record import Recorded, Recording
from tests.native.arm.run import HERE, missing
from tests.native.conftest import BASES, Use


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("arm") / "driver"
    try:
        command = [*build.compiler(), "-std=c++17", "-Wall", "-Werror", str(HERE / "driver.cpp"), "-ldl"]
    except BuildError as error:
        pytest.skip(str(error))
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


def made_again(driver: Path, cases: Path) -> tuple[int, str]:
    library = loader.search().library
    assert library is not None
    result = subprocess.run([driver, library.path, cases], capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def recorded(monkeypatch: pytest.MonkeyPatch, path: Path, off: float = 0.0) -> None:
    """Records products of two matrices as one case; `off` is added to the expected numbers of one product."""
    recording, library = Recording(), loader.search().library
    assert library is not None
    with monkeypatch.context() as patch:
        stub = loader.Library(library.level, library.path, Recorded(library.dll, recording))  # type: ignore[arg-type]
        patch.setattr(loader, "search", lambda: loader.Found(stub))
        x, w = torch.randn(3, 64), torch.randn(20, 64)
        plain, packed = linear(x, [w, Panels.pack(quantize_weights(w, 8, None))])
    recording.compare("plain", plain, x.double() @ w.double().T + off, torch.full((3, 20), 1e-4).double())
    recording.compare("codes", packed.clone(), packed.double(), torch.full((3, 20), 1e-9).double())
    assert not recording.left
    with CaseFile(path) as cases:
        recording.write(cases, "products")
    assert (cases.cases, cases.calls, cases.checks, cases.numbers) == (1, 1, 2, 120)


def test_a_recorded_call_writes_the_same_again(
    use: Use, driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(BASES[0])
    recorded(monkeypatch, tmp_path / "cases")
    code, output = made_again(driver, tmp_path / "cases")
    assert code == 0, output
    assert "1 cases, 1 calls, 2 checks of 120 numbers, 0 tokens, 0 failed" in output


def test_what_is_off_is_said(use: Use, driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(BASES[0])
    recorded(monkeypatch, tmp_path / "cases", off=1e-3)
    code, output = made_again(driver, tmp_path / "cases")
    assert code == 1
    assert "FAILED products headway_linear plain: 60 of 60 numbers" in output
    assert "1 failed, at most 10 of what is allowed" in output


def test_a_file_that_ends_early_and_a_library_that_is_none_are_errors(driver: Path, tmp_path: Path) -> None:
    (tmp_path / "cases").write_bytes(b"R" + struct.pack("<3q", 0, 0, 100) + bytes(50))
    for library, message in (("libc.so.6", "ends within a command"), ("nowhere.so", "nowhere.so")):
        result = subprocess.run([driver, str(library), tmp_path / "cases"], capture_output=True, text=True)
        assert result.returncode == 2
        assert message in result.stderr


def test_an_address_that_no_tensor_has_is_refused() -> None:
    call = interface.GateStruct(1, 1, 16, 0, 0, 4096)
    with pytest.raises(Unknown, match=r"GateStruct\.gate"):
        taken("headway_gate_rows", (ctypes.byref(call),))


def test_changes_are_whole_words() -> None:
    old = np.arange(8, dtype=np.int32)
    new = old.copy()
    new[[1, 2, 6]] += 256
    assert [*changes(old.tobytes(), new.tobytes())] == [(4, 8), (24, 4)]
    assert [*changes(b"12345", b"12346")] == [(4, 1)]
    assert not [*changes(b"12345", b"12345")]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert "aarch64-linux-gnu-g++ is not in PATH" in missing()
