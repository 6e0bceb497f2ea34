"""Training losses that keep a router from sending all tokens to the same experts, and its logits small.

Legend: R rows (tokens) that count, of all layers together, E experts, K of them for each row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headway.nn.experts import MixtureOfExperts, Routed

LOSSES = ("router_aux_loss", "router_z_loss")


class RouterLosses(NamedTuple):
    """The terms that a forward pass adds to the loss, and each loss by name, without coefficients.

    total   scalar, differentiable: the sum of each loss times its coefficient
    each    the losses of `LOSSES` that some layer has a coefficient for
    """

    total: Tensor
    each: dict[str, float]


@contextmanager
def routing_of(model: nn.Module) -> Iterator[list[Routed]]:
    """While open, collects the outputs with gradients of all routers that have a coefficient, pass after pass."""
    routed: list[Routed] = []
    layers = [m for m in model.modules() if isinstance(m, MixtureOfExperts)]
    routers = [m.gate for m in layers if m.gate.how.aux_loss_coef or m.gate.how.z_loss_coef]
    for router in routers:
        router.heard = routed
    try:
        yield routed
    finally:
        for router in routers:
            router.heard = None


def router_losses(routed: Sequence[Routed]) -> RouterLosses:
    """Returns the losses of router outputs, with logits x [R, E] of all layers together:

        p = softmax(x)
        aux = E sum over e of f_e P_e      f_e: how many of the K largest p of a row are e, P_e: p_e, both means over
        rows
        z   = mean over rows of (ln sum over e of exp x_e)^2

    aux is K if all experts have the same share. The choice f has no gradient. p is a softmax whatever the router's own
    score, bias and groups are, as in `transformers`. Layers with another number of experts, or other coefficients, have
    separate losses, which are added.

    (Fedus et al. 2022, "Switch Transformers", equations 4 to 6; Zoph et al. 2022, "ST-MoE", equation 5.)"""
    kinds: dict[tuple[int, int, float, float], list[Routed]] = {}
    for r in routed:
        experts = r.experts
        kinds.setdefault((experts.count, experts.top, experts.aux_loss_coef, experts.z_loss_coef), []).append(
            r
        )
    total, each = torch.zeros(()), dict[str, float]()
    for (count, top, *coefs), group in kinds.items():
        logits = torch.cat([r.logits if r.real is None else r.logits[r.real] for r in group])
        losses = (_balance(logits, count, top), logits.logsumexp(-1).square().mean())
        for name, coef, loss in zip(LOSSES, coefs, losses, strict=True):
            if coef:
                total = total + coef * loss
                each[name] = each.get(name, 0.0) + float(loss.detach())
    return RouterLosses(total, each)


def _balance(logits: Tensor, count: int, top: int) -> Tensor:
    p = logits.softmax(-1)
    chosen = p.detach().topk(top).indices.flatten().bincount(minlength=count)
    return count * (chosen.to(p.dtype) / len(p) * p.mean(0)).sum()
