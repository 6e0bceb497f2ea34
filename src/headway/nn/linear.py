"""The one layer that multiplies with weights: what a quantised or an adapted model has in its place.

Legend: I numbers in, O numbers out.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


class Linear(nn.Linear):
    """x W^T (+ b), with W [O, I]: `torch.nn.Linear`, and the only product with weights in the library.

    Modules call their `Linear`s and never look into them, so that one which computes the product in another way
    (from quantised weights, with an adapter) can take the place of each: `replace_linear`.
    """


def replace_linear(model: nn.Module, make: Callable[[str, Linear], nn.Module]) -> None:
    """Puts `make(name, layer)` in the place of every `Linear` of `model`, in place; `make` may return `layer` itself.

    `name` is the layer's own, as in `model.named_modules()`. What takes its place maps [..., layer.in_features] to
    [..., layer.out_features]; names in the state dict are its own affair.
    """
    for name, layer in [(n, m) for n, m in model.named_modules() if isinstance(m, Linear)]:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, make(name, layer))
