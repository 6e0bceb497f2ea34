"""Cross entropy of rows by the kernels, and its gradient, against float64."""

import pytest
import torch
import torch.nn.functional as F

from headway.native import rows
from headway.nn.cross_entropy import fused_cross_entropy
from tests.native.calls import DTYPES
from tests.native.conftest import Use, at_levels
from tests.native.test_rows import draw
from tests.nn.plain import plain_cross_entropy
from tests.tolerance import assert_rounded_once, assert_within_reference


@at_levels(0)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy(use: Use, threads: None, level: str, dtype: torch.dtype) -> None:
    use(level)
    for count, vocab in ((1, 1), (3, 7), (5, 16), (7, 33), (40, 1003)):
        logits, bias = (5 * draw(*shape, seed=1, dtype=dtype) for shape in ((count, vocab), (vocab,)))
        targets = torch.arange(count) % vocab
        targets[::3] = -100
        for b in (None, bias):
            exact_logits = logits.double() if b is None else logits.double() + b.double()
            expected = F.cross_entropy(exact_logits, targets, ignore_index=-100, reduction="none")
            onehot = F.one_hot(targets.clamp_min(0), vocab)
            expected_grad = (exact_logits.softmax(-1) - onehot) * (targets != -100)[:, None]
            hits, buffer = torch.empty(count, dtype=torch.bool), logits.clone()
            losses = rows.cross_entropy(buffer, b, targets, False, hits)
            assert torch.equal(buffer, logits)
            reference = F.cross_entropy(exact_logits.float(), targets, ignore_index=-100, reduction="none")
            assert_within_reference(
                losses, expected, reference, "losses", exact_logits.abs().amax(), "cross entropy"
            )
            assert torch.equal(hits, (exact_logits.argmax(-1) == targets) & (targets != -100))
            assert torch.equal(rows.cross_entropy(buffer, b, targets, True), losses)
            # a probability errs by roundings of logits; 1 is subtracted from that of the target
            terms = exact_logits.softmax(-1) * (4 + 2 * exact_logits.abs().amax()) + onehot
            if dtype == torch.bfloat16:
                assert_rounded_once(buffer, expected_grad, "gradient", terms=terms)
            else:
                assert bool(((buffer - expected_grad).abs() <= 2**-23 * terms).all())


def test_cross_entropy_reads_targets_and_bias_by_their_strides() -> None:
    x, weight, bias = (draw(*n, seed=0, dtype=torch.float32) for n in ((4, 8), (6, 8), (6, 2)))
    arguments = x, weight, torch.arange(8).view(4, 2)[:, 0] % 6
    expected = plain_cross_entropy(*arguments, bias[:, 0])
    assert float(fused_cross_entropy(*arguments, bias=bias[:, 0]).total) == pytest.approx(float(expected))


def test_the_first_of_equal_logits_is_the_hit() -> None:
    hits = torch.empty(2, dtype=torch.bool)
    rows.cross_entropy(torch.tensor([[1.0, 3.0, 3.0]] * 2), None, torch.tensor([1, 2]), False, hits)
    assert hits.tolist() == [True, False]


@at_levels(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_visible(use: Use, level: str, dtype: torch.dtype) -> None:
    use(level)
    x = torch.zeros(1, 40, dtype=dtype)
    x[0, 37] = torch.nan
    assert rows.cross_entropy(x, None, torch.tensor([0]), True).isnan().all()
