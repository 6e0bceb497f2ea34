"""Losses of routers are those of the papers, over the tokens of all layers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.nn import Experts, MixtureOfExperts
from headway.nn.experts import Routed
from headway.nn.router_losses import router_losses, routing_of
from headway.tokens import Tokens

BASE = Experts(count=6, top=2, hidden=12, aux_loss_coef=0.3, z_loss_coef=0.07)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 2


def published(rows: list[list[float]], top: int) -> tuple[float, float]:
    """Returns equations 4 to 6 of Switch Transformers, with `top` experts for each row, and equation 5 of ST-MoE."""
    count = len(rows[0])
    f, p, z = [0.0] * count, [0.0] * count, 0.0
    for row in rows:
        total = sum(map(math.exp, row))
        for e in sorted(range(count), key=lambda e: -row[e])[:top]:
            f[e] += 1 / len(rows)
        for e in range(count):
            p[e] += math.exp(row[e]) / total / len(rows)
        z += math.log(total) ** 2 / len(rows)
    return count * sum(map(math.prod, zip(f, p, strict=True))), z


def test_both_losses_are_the_published_sums_over_the_rows_of_all_layers() -> None:
    """However the experts are chosen, also by sigmoids, biases and groups. Rows that are no tokens do not count."""
    experts = replace(BASE, score="sigmoid", choice_bias=True, groups=3, top_groups=2)
    first, second = drawn(9, 6), drawn(5, 6, seed=1)
    valid = torch.tensor([1, 1, 0, 1, 0], dtype=torch.bool)
    losses = router_losses([Routed(experts, first, None), Routed(experts, second, valid)])
    aux, z = published([*first.tolist(), *second[valid].tolist()], 2)
    assert losses.each == pytest.approx({"router_aux_loss": aux, "router_z_loss": z}, rel=1e-12)
    assert float(losses.total) == pytest.approx(0.3 * aux + 0.07 * z, rel=1e-12)


def test_layers_of_other_experts_have_losses_of_their_own() -> None:
    few, many = replace(BASE, z_loss_coef=0.0), replace(BASE, count=8, top=3, aux_loss_coef=0.0)
    a, b = drawn(9, 6), drawn(9, 8, seed=1)
    losses = router_losses([Routed(few, a, None), Routed(many, b, None)])
    aux, z = published(a.tolist(), 2)[0], published(b.tolist(), 3)[1]
    assert losses.each == pytest.approx({"router_aux_loss": aux, "router_z_loss": z}, rel=1e-12)
    assert float(losses.total) == pytest.approx(0.3 * aux + 0.07 * z, rel=1e-12)


def test_even_routing_has_the_least_loss_and_gradients_are_those_of_differences() -> None:
    even = torch.eye(6, dtype=torch.float64) * 9 + torch.eye(6, dtype=torch.float64).roll(1, 0) * 8
    assert router_losses([Routed(BASE, even, None)]).each["router_aux_loss"] == pytest.approx(2, rel=1e-12)
    crowded = torch.tensor([[9.0, 8, 0, 0, 0, 0]], dtype=torch.float64).expand(6, -1)
    assert router_losses([Routed(BASE, crowded, None)]).each["router_aux_loss"] > 5.9
    x = drawn(7, 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: router_losses([Routed(BASE, x, None)]).total, (x,))


def test_routers_are_heard_with_gradients_where_somebody_listens() -> None:
    layer = MixtureOfExperts(BASE, 10, gated=True).double()
    silent = MixtureOfExperts(replace(BASE, aux_loss_coef=0.0, z_loss_coef=0.0), 10, gated=True).double()
    x = drawn(2, 4, 10)
    tokens = Tokens.from_lengths([4, 2])
    with routing_of(torch.nn.ModuleList([layer, silent])) as routed:
        layer(x, tokens), silent(x, tokens)
        with torch.no_grad():  # as for a reference model
            layer(x, tokens)
    layer(x, tokens)
    (record,) = routed
    assert record.real is not None
    assert record.real.tolist() == [True] * 6 + [False] * 2
    assert torch.equal(record.logits, x.view(8, 10) @ layer.gate.weight.T)
    router_losses(routed).total.backward()
    assert layer.gate.weight.grad is not None


@pytest.mark.parametrize("name", ["aux_loss_coef", "z_loss_coef"])
def test_coefficients_are_numbers_of_at_least_0(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a finite number of at least 0, got -1"):
        replace(BASE, **{name: -1.0})
