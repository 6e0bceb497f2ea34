"""The choice of the dtype that a model runs in, from the dtypes in its file, with the reason.

One rule, for `headway.load` and for every command that runs a model or counts its bytes (generate, eval, plan, ...):

    --dtype (dtype=)    the requested dtype, by a name in `DTYPES`; else
    its file            the dtype of the weights; the narrowest that holds all of a mix; float32 for float16 on a CPU
    no file             for a size of the catalog, or a model family: bfloat16

Training has its own rule (`headway.train.microbatch_pool.choose_precision`): weights are kept in float32.
"""

from collections import Counter
from collections.abc import Mapping
from functools import reduce
from pathlib import Path

import torch

from headway.choice import Choice
from headway.errors import CheckpointError, check_known

USABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

DTYPES = {
    **dict.fromkeys(("float32", "fp32"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16"), torch.float16),
    "float64": torch.float64,
}


def named_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Returns the dtype of a name; None for None and "auto", which mean the file's. Raises ConfigError for an unknown
    name."""
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return None if isinstance(dtype, str) else dtype
    name = dtype.removeprefix("torch.")
    check_known(name, DTYPES, "there is no dtype", are="there are auto,")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Returns `bfloat16` for torch.bfloat16, the spelling of config.json."""
    return str(dtype).removeprefix("torch.")


def check_dtypes(dtypes: Mapping[str, torch.dtype], path: Path) -> None:
    """Raises CheckpointError if some weights are not plain floating-point numbers (quantized weights)."""
    unusable = {name: dtype for name, dtype in dtypes.items() if dtype not in USABLE}
    if unusable:
        name, dtype = next(iter(unusable.items()))
        raise CheckpointError(
            f"{path}: {len(unusable)} of {len(dtypes)} tensors are not float64, float32, bfloat16 or float16 "
            f"({name} is {dtype_name(dtype)}): quantized weights need a quantization_config in "
            "config.json; add it, or use the unquantized checkpoint"
        )


def choose_dtype(
    stored: Mapping[str, torch.dtype], device: torch.device, requested: torch.dtype | None = None
) -> tuple[torch.dtype, Choice]:
    """Returns the dtype to run in: the requested one, else the stored one.

    A mix becomes the narrowest dtype that holds every stored number exactly; float16 becomes float32 on a CPU."""
    counts = Counter(stored.values())
    mix = ", ".join(f"{n} tensors {dtype_name(d)}" for d, n in counts.most_common())
    slow = "float16 matrix products are several hundred times slower than bfloat16 ones on most CPUs"
    if requested is not None:
        warning = f"; {slow}" if requested == torch.float16 and device.type == "cpu" else ""
        return requested, Choice(dtype_name(requested), f"asked for; the file holds {mix}{warning}")
    widest = reduce(torch.promote_types, counts)
    if widest == torch.float16 and device.type == "cpu":
        rejected = (("float16", slow), ("bfloat16", "it would round the stored weights"))
        return torch.float32, Choice(
            "float32", f"holds every float16 number exactly; the file holds {mix}", rejected=rejected
        )
    why = "all that the file holds" if len(counts) == 1 else "the narrowest that holds all of a mix"
    return widest, Choice(dtype_name(widest), f"{why}: {mix}")
