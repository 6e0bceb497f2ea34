"""Facts about the machine are consistent; rates are positive and cached; nothing here asserts a speed."""

import ctypes
import mmap
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch

from headway import hardware, processor
from headway.errors import BackendError


def test_memory_numbers_agree() -> None:
    assert 0 < hardware.memory_available() <= hardware.memory_total()


def test_peak_rss_counts_bytes_that_were_held() -> None:
    before = hardware.peak_rss()
    held = torch.ones(100 << 20, dtype=torch.uint8) * 2
    after = hardware.peak_rss()
    assert after >= held.numel()  # in bytes, not in kilobytes
    assert before <= after < hardware.memory_total() * 2


FAULTS = """
import resource, sys, torch
from headway import hardware
kept = sys.argv[1] == "keep" and hardware.keep_freed_memory()
def step():
    for _ in range(4):
        torch.ones(16 << 20)  # 64 MiB, 16384 pages
for _ in range(10):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's malloc")
def test_kept_memory_takes_no_page_faults() -> None:
    page_faults = {}
    for mode in ("as it is", "keep"):
        process = subprocess.run(
            [sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True
        )
        kept, faults = process.stdout.split()
        assert kept == str(mode == "keep")
        page_faults[mode] = int(faults)
    assert page_faults["keep"] < 100 < page_faults["as it is"]


def test_elsewhere_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert hardware.keep_freed_memory() is False


def test_large_pages_are_asked_for_inside_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    class Library:
        def madvise(self, begin: Any, length: Any, advice: Any) -> None:
            calls.append((begin.value, length.value))

    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    t = torch.empty(9 << 20, dtype=torch.uint8)
    hardware.large_pages([t, torch.empty(100), torch.empty(9 << 20, device="meta")])
    ((begin, length),) = calls
    assert begin % hardware.LARGE_PAGE == length % hardware.LARGE_PAGE == 0
    assert t.data_ptr() <= begin
    assert begin + length <= t.data_ptr() + t.nbytes
    assert length >= t.nbytes - 2 * hardware.LARGE_PAGE


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("AMD EPYC 9654 96-Core Processor", "AMD EPYC 9654 96-Core Processor"),
        ("AMD EPYC", "AMD EPYC, family 25 model 17"),
    ],
)
def test_a_name_without_numbers_is_told_by_family_and_model(
    monkeypatch: pytest.MonkeyPatch, model: str, name: str
) -> None:
    text = f"processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: {model}\n\nprocessor\t: 1\nmodel\t: 18\n"
    monkeypatch.setattr(processor, "read", lambda path: text)
    assert processor.cpu_name.__wrapped__() == name


@pytest.mark.parametrize(
    ("flags", "bf16", "fp16"),
    [
        ({"avx2", "fma", "avx512f"}, False, False),
        ({"avx512f", "avx512_bf16"}, True, False),
        ({"amx_bf16"}, True, False),
        ({"avx512_fp16"}, False, True),
        ({"amx_fp16"}, False, True),
        ({"asimd"}, False, False),
        ({"asimd", "bf16"}, True, False),
        ({"asimd", "asimdhp", "bf16"}, True, True),
    ],
)
def test_products_in_hardware_follow_from_the_flags(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], bf16: bool, fp16: bool
) -> None:
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset(flags))
    assert tuple(map(hardware.multiplies, (torch.bfloat16, torch.float16))) == (bf16, fp16)


@pytest.mark.parametrize(
    ("text", "flags", "vendor"),
    [
        ("vendor_id\t: AuthenticAMD\nflags\t\t: avx2 fma\n", {"avx2", "fma"}, "AuthenticAMD"),
        ("Features\t: asimd bf16\n", {"asimd", "bf16"}, ""),
        ("processor\t: 0\n", set(), ""),
    ],
)
def test_flags_and_vendor_are_those_that_the_system_names(
    monkeypatch: pytest.MonkeyPatch, text: str, flags: set[str], vendor: str
) -> None:
    monkeypatch.setattr(processor, "read", lambda path: text)
    assert processor.cpu_flags.__wrapped__() == flags
    assert processor.cpu_vendor() == vendor


def test_rates_are_measured_once() -> None:
    assert hardware.gemm_peak(torch.float32) > 1e8
    assert hardware.gemm_peak(torch.float32) == hardware.gemm_peak(torch.float32)
    assert hardware.read_bandwidth() == hardware.read_bandwidth() > 1e7


def test_integers_have_no_gemm_peak() -> None:
    with pytest.raises(BackendError, match=r"not torch\.int8; ask for float32 or bfloat16"):
        hardware.gemm_peak(torch.int8)
