"""The machine that a plan is for: this one, measured, or a named accelerator, from its data sheet."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from headway import hardware, processor
from headway.errors import ConfigError, check_known

GIB, BF16, FP32 = 1 << 30, torch.bfloat16, torch.float32


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The limits of a machine: `memory` in bytes that can be allocated, `bandwidth` of reads in bytes/s, `peak` of
    matrix products in FLOP/s.

    Attributes:
        native: whether the machine has instructions for products in the dtype of the plan.
        device: "cpu" or "cuda", whose kernels are planned for.
    """

    name: str
    memory: int
    bandwidth: float
    peak: float
    native: bool = True
    device: str = "cpu"

    @staticmethod
    def here(dtype: torch.dtype) -> "Machine":
        """Measures this machine (takes a second or two)."""
        return Machine(
            name=processor.cpu_name(),
            memory=hardware.memory_available(),
            bandwidth=hardware.read_bandwidth(),
            peak=hardware.gemm_peak(dtype),
            native=dtype != torch.bfloat16 or hardware.multiplies(dtype),
        )


class Device(NamedTuple):
    """Data-sheet values: memory in bytes, bandwidth in bytes/s, and the peak FLOP/s of dense products by dtype,
    accumulated in float32, without sparsity and without TF32."""

    memory: int
    bandwidth: float
    peaks: Mapping[torch.dtype, float]


DEVICES: Mapping[str, Device] = {
    "A100-40G": Device(40 * GIB, 1.555e12, {BF16: 312e12, FP32: 19.5e12}),
    "A100-80G": Device(80 * GIB, 2.039e12, {BF16: 312e12, FP32: 19.5e12}),
    "H100-80G": Device(80 * GIB, 3.35e12, {BF16: 989e12, FP32: 67e12}),
    "RTX-3090": Device(24 * GIB, 936e9, {BF16: 71e12, FP32: 35.6e12}),
    "RTX-4090": Device(24 * GIB, 1.008e12, {BF16: 165e12, FP32: 82.6e12}),
}
"""Values of NVIDIA's data sheets: A100 and H100 in SXM form, and the white papers of GA102 and AD102."""


def device_named(name: str, dtype: torch.dtype) -> Machine:
    """Returns the limits of a device from its data sheet; nothing is measured, and real runs are slower.

    Raises ConfigError for a name that is not in `DEVICES`, and for a dtype without a known peak.
    """
    check_known(name, DEVICES, "plan: there is no device")
    device = DEVICES[name]
    if dtype not in device.peaks:
        raise ConfigError(
            f"plan: the peak FLOP/s of {name} is known for bfloat16 and float32, not for {dtype}; choose one of these "
            "with --dtype"
        )
    return Machine(
        name=name, memory=device.memory, bandwidth=device.bandwidth, peak=device.peaks[dtype], device="cuda"
    )
