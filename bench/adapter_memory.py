"""Peak memory of training a model, and of adapters beside it, each in a process of its own; a step, and what it counts.

    python bench/adapter_memory.py                       # 32 M parameters: full, lora, dora, qlora
    python bench/adapter_memory.py --size 1.1B lora      # TinyLlama's sizes

Memory is what the process held at most, less what it held after a step of a tiny model. Rows are of random tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, int]] = {
    "32M": {"layers": 8, "width": 512, "heads": 8, "kv_heads": 4, "hidden": 1408, "vocab": 8192},
    "1.1B": {"layers": 22, "width": 2048, "heads": 32, "kv_heads": 4, "hidden": 5632, "vocab": 32000},
}
KINDS: dict[str, dict[str, str]] = {
    "full": {},
    "lora": {"adapter": "lora"},
    "dora": {"adapter": "dora"},
    "qlora": {"adapter": "lora", "base": "nf4"},
}


def held(key: str = "VmHWM") -> int:
    """Bytes that this process holds (VmRSS), or held at most (VmHWM)."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(key))
    return int(line.split()[1]) * 1024


def measure(folder: str, kind: str, rows: int, context: int, steps: int, dtype: str) -> dict[str, Any]:
    """In this process: load, adapt, train."""
    import torch

    from headway.models import cost
    from headway.train import TextConfig
    from headway.train.inputs import Inputs, trained_parameters

    torch.set_num_threads(1)
    warm_up()
    settings = {"data": "-", "model": folder, "dtype": dtype, "context": context, **KINDS[kind]}
    config = TextConfig.of(settings | {"batch_tokens": rows * context})
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = held("VmRSS")
    inputs = Inputs.of(config)
    model, _ = inputs.first_model(0)
    inputs.adapt(model)

    trainer = trainer_of(model, config, rows)
    loaded, begin = held() - before, time.perf_counter()
    losses = [trainer.step().loss for _ in range(steps)]
    seconds = (time.perf_counter() - begin) / steps
    return {
        "kind": kind,
        "parameters": cost.parameter_count(model.spec),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "gradients_and_moments": cost.trained_bytes(trained_parameters(config, model.spec)),
        "loaded": loaded,
        "peak": held() - before,
        "seconds_per_step": seconds,
        "losses": losses,
    }


def trainer_of(model: Any, config: Any, rows: int) -> Any:
    """A trainer of `model` on random tokens."""
    import torch

    from headway.data import Batch
    from headway.train.microbatch_pool import DTYPES
    from headway.train.optimizer import Optimizer, parameter_groups
    from headway.train.tasks.base import Objective
    from headway.train.trainer import Trainer

    class Random(Objective[Any]):
        def batches(self, step: int) -> list[Batch]:
            drawn = torch.Generator().manual_seed(step)
            ids = torch.randint(model.spec.vocab, (rows, config.context + 1), generator=drawn)
            return [Batch({"ids": ids[:, :-1]}, ids[:, 1:])]

    optimizer = Optimizer.of(parameter_groups(model), config)
    return Trainer(Random(), model, optimizer, dtype=DTYPES[config.dtype])


def warm_up() -> None:
    """Import and start whatever a step needs."""
    from headway.models import ModelSpec, build
    from headway.train import TextConfig

    config = TextConfig.of({"data": "-", "dtype": "bf16"})
    trainer_of(build(ModelSpec.of_depth(1, 64)), config, 1).step()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=[], help=f"of {', '.join(KINDS)}")
    parser.add_argument("--size", choices=SIZES, default="32M")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--folder", help="with a model of that size [default: made, and removed]")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        found = measure(given.folder, given.kinds[0], given.rows, given.context, given.steps, given.dtype)
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or scratch + "/base"
        if not Path(folder).exists():
            write(given.size, folder)
        how = [f"--{name}={getattr(given, name)}" for name in ("rows", "context", "steps", "dtype")]
        for kind in given.kinds or KINDS:
            command = [sys.executable, __file__, kind, "--here", f"--folder={folder}", *how]
            print(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip(), flush=True
            )


def write(size: str, folder: str) -> None:
    """A model of that size with fresh weights in bfloat16, in a process of its own."""
    code = (
        "import torch; from headway.checkpoints import save_folder; from headway.models import ModelSpec, build\n"
        f"spec = ModelSpec.of('llama', **{SIZES[size]!r}, trained_context=2048)\n"
        f"save_folder({folder!r}, build(spec, seed=0, dtype=torch.bfloat16).eval())"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    main()
