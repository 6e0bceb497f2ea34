"""Tolerances from a reference's own error: a kernel may err at most twice as much as plain low precision."""

import torch
from torch import Tensor


def assert_within_reference(
    got: Tensor, exact: Tensor, low: Tensor, what: str = "", terms: float = 0.0
) -> None:
    """|got - exact| <= 2 |low - exact| + 8 ulps, in the largest norm (float64, its own reference: 32 ulps).

    `exact` is float64; `low` is the same formula written naively in the dtype of `got`. The ulps are those of
    the largest value, or of `terms`, the standard deviation of the terms that cancel in it, where that is
    larger (dOut . v of standard normal vectors has sqrt(D)): with one visible key the true gradient of q is 0,
    and the reference may hit it by luck. Eight ulps are the rounding
    of a sum of some sixty terms, the most that these tests add up.
    """
    assert got.dtype == low.dtype, (got.dtype, low.dtype)
    assert torch.isfinite(got).all(), f"{what}: not finite"
    if not exact.numel():
        return
    error, allowed = ((t.double() - exact).abs().max().item() for t in (got, low))
    ulp = torch.finfo(got.dtype).eps * max(exact.abs().max().item(), terms)
    ulps = 32 if got.dtype == torch.float64 else 8
    assert error <= 2 * allowed + ulps * ulp, (
        f"{what}: error {error:.3g}, reference {allowed:.3g}, ulp {ulp:.3g}"
    )
