"""What the scripts that wrote these folders and the tests that read them share."""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from headway.hardware import cpu_flags
from headway.models import EncoderDecoder
from headway.native.loader import library
from headway.tokens import Tokens

HERE = Path(__file__).parent
CHOOSE_KERNELS = ("ATEN_", "ONEDNN_", "DNNL_", "MKL_ENABLE", "MKL_CBWR", "MKL_DEBUG")
"""How names of variables begin by which torch's libraries are told which kernels to run."""


def inputs(model: Any) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Arguments of a call: ids [1, 8], of which slots 0 and 3 are global, and types where there are any."""
    spec = model.spec
    draw = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 20, (1, 8), generator=draw)
    if isinstance(model, EncoderDecoder):
        return (ids, ids[:, 2:]), {}
    marked = Tokens.range(8).with_global([0, 3])
    types = {"types": torch.arange(8)[None] % spec.token_types} if spec.token_types else {}
    return (ids,), {"tokens": marked, **types}


def kernels() -> dict[str, str]:
    """What the bits of a result depend on besides the source: where it is the same, results are equal to the bit."""
    flags = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:16]
    found = library()
    chosen = sorted(
        f"{name}={value}" for name, value in os.environ.items() if name.startswith(CHOOSE_KERNELS)
    )
    return {
        "cpu": flags,
        "torch": str(torch.__version__),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "native": "none" if found is None else found.level,
        "environment": " ".join(chosen),
    }
