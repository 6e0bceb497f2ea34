"""A packed row equals its documents alone: logits, loss and gradients of a decoder with windows, sinks and rotary."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.data import Rows, TokenFile, TokenFileWriter
from headway.models import Decoder
from headway.patterns import Causal
from tests.generate.conftest import MIXED, small

DOCUMENTS = [9, 1, 16, 3, 21, 2]  # in rows of 16: one ends at an edge, one is longer than a row


def rows(path: Path) -> Rows:
    generator = torch.Generator().manual_seed(3)
    with TokenFileWriter(path / "x", 330) as out:
        for n in DOCUMENTS:
            out.add(torch.randint(0, 330, (n,), generator=generator).numpy())
    return Rows(TokenFile(path / "x"), 16)


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)


@pytest.mark.parametrize("patterns", [Causal(), MIXED], ids=["full", "mixed"])
def test_packed_is_alone(tmp_path: Path, patterns: object) -> None:
    model: Decoder = small(patterns).double()  # type: ignore[arg-type]
    corpus = rows(tmp_path)
    inputs, targets = corpus.batch(range(len(corpus)))
    packed = model(**inputs)
    loss = summed(packed.flatten(0, 1), targets.flatten())
    packed_gradients = torch.autograd.grad(loss, list(model.parameters()))
    losses = []
    for i in range(len(corpus)):
        row, start = corpus[i], 0
        for n in row.lengths:
            logits = model(torch.from_numpy(row.ids[start : start + n])[None])[0]
            assert torch.allclose(
                packed[i, start : start + n], logits, rtol=0, atol=1e-12 * float(logits.detach().abs().max())
            )
            losses.append(summed(logits, torch.from_numpy(row.targets[start : start + n])))
            start += n
    separate_gradients = torch.autograd.grad(torch.stack(losses).sum(), list(model.parameters()))
    assert torch.allclose(loss, torch.stack(losses).sum(), rtol=1e-12)
    for a, b in zip(packed_gradients, separate_gradients, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11 * float(b.abs().max()))
