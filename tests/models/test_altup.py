"""AltUp's residual streams, a low rank beside attention and sparse gates against their formulas in loops."""

import torch
from torch.nn.functional import silu

from headway.models import build
from headway.nn import FeedForward, RMSNorm
from headway.nn.altup import AlternatingUpdates, AltUp, LaurelProduct, Streams
from headway.tokens import Tokens
from tests.checkpoints.hf import off
from tests.models.test_layers_of_kinds import STREAMS


@torch.no_grad()
def test_streams_are_those_of_the_formula() -> None:
    """Every value is computed again by its formula, token by token and stream by stream."""
    generator = torch.Generator().manual_seed(0)
    updates, streams = (
        AlternatingUpdates(AltUp(3), 8, lambda: RMSNorm(8)).double(),
        Streams(AltUp(3), 8).double(),
    )
    for p in (*updates.parameters(), *streams.parameters()):
        p.copy_(torch.randn(p.shape, generator=generator))
    x = torch.randn(1, 2, 3, 8, generator=generator, dtype=torch.float64)
    y = torch.randn(1, 2, 8, generator=generator, dtype=torch.float64)

    def routed(z: torch.Tensor) -> torch.Tensor:
        z = z / (z.square().mean() + 1e-6).sqrt() * updates.router_norm.weight
        return torch.tanh(updates.modality_router.weight @ z / 8)

    def large(z: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return z * (like.norm() / z.norm())

    predicted = updates.predict(x)
    corrected = updates.correct(predicted, y)
    joined = streams.join(x.flatten(-2))
    for t in range(2):
        a, b = (
            updates.prediction_coefs @ routed(x[0, t, 0]),
            updates.correction_coefs @ routed(y[0, t]),
        )
        for i in range(3):
            p = x[0, t, i] + sum(a[3 * i + j] * x[0, t, j] for j in range(3))
            assert off(predicted[0, t, i], p) < 1e-12
            assert off(corrected[0, t, i], p + (1 + b[i]) * (y[0, t] - predicted[0, t, 0])) < 1e-12
        first = x[0, t, 0]
        scaled = [large(streams.out[i].weight @ x[0, t, i + 1], first) for i in range(2)]
        assert off(joined[0, t], (first + scaled[0] + scaled[1]) / 3) < 1e-12
        split = streams.split(y)[0, t].view(3, 8)
        assert torch.equal(split[0], y[0, t])
        assert (
            off(split[1:], torch.stack([large(streams.into[i].weight @ y[0, t], y[0, t]) for i in range(2)]))
            < 1e-12
        )


@torch.no_grad()
def test_coefficients_are_clipped_in_training() -> None:
    updates, x = AlternatingUpdates(AltUp(2, clip=0.5), 4, lambda: RMSNorm(4)), torch.randn(1, 3, 2, 4)
    updates.prediction_coefs.fill_(3.0)
    unclipped, clipped = updates.eval().predict(x) - x, updates.train().predict(x) - x
    assert off(6 * clipped, unclipped) < 1e-5


@torch.no_grad()
def test_a_rank_beside_attention_and_cut_gates_are_those_of_the_formula() -> None:
    laurel, x, y, normed = LaurelProduct(8, 2, lambda: RMSNorm(8)).double(), *torch.randn(3, 5, 8).double()
    projected = normed @ laurel.linear_left.weight.T @ laurel.linear_right.weight.T
    beside = projected / (projected.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert off(sum(laurel.join(x, y, normed)), (x + y + normed + beside) / 2**0.5) < 1e-12
    feed_forward = FeedForward(8, 400, gated=True, sparsity=0.9).double()
    gates = x @ feed_forward.gate_proj.weight.T
    sparse = torch.relu(
        gates - gates.mean(-1, keepdim=True) - 1.2815515655446004 * gates.std(-1, False, keepdim=True)
    )
    assert 0.05 < (sparse > 0).double().mean() < 0.15
    assert (
        off(
            feed_forward(x),
            (silu(sparse) * (x @ feed_forward.up_proj.weight.T)) @ feed_forward.down_proj.weight.T,
        )
        < 1e-12
    )


@torch.no_grad()
def test_ids_beyond_the_rows_of_a_table_by_layer_have_its_first() -> None:
    table = build(STREAMS, seed=0).model.per_layer
    x, tokens = torch.randn(1, 3, 20), Tokens.range(3)
    rows = table(torch.tensor([[0, 37, 52]]), tokens, x[:, :1].expand(1, 3, 20))
    assert torch.equal(rows[0, 0], rows[0, 1])
    assert torch.equal(rows[0, 0], rows[0, 2])
