"""Small models with trained adapters, for the tests of adapter folders."""

from typing import Any

import torch
from torch import Tensor

from headway.models import ModelSpec, build
from headway.nn import Adapter, Lora

SIZE: dict[str, Any] = {"vocab": 64, "width": 32, "layers": 2, "heads": 4, "hidden": 128}
IDS = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
KINDS = {
    "lora": Lora(rank=4, alpha=8),
    "rslora": Lora(rank=4, alpha=8, stabilized=True),
    "dora": Lora(rank=4, alpha=8, magnitude=True),
}


def small(family: str, **fields: Any) -> Any:
    return build(ModelSpec.of(family, **{**SIZE, **fields}), seed=0).eval()


def trained(adapter: Adapter, seed: int = 1) -> Adapter:
    """Returns the adapter as after some training steps: every tensor has changed."""
    generator = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(value.shape, generator=generator) for name, value in adapter.tensors.items()}

    def moved(name: str, value: Tensor) -> Tensor:
        return value * (1 + 0.3 * noise[name]) if "magnitude" in name else value + 0.1 * noise[name]

    return Adapter(adapter.layers, {name: moved(name, value) for name, value in adapter.tensors.items()})
