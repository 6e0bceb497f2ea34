"""A packed row equals its documents alone: logits, loss and gradients of a decoder with windows, sinks and rotary."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.data import Rows
from headway.models import Decoder
from headway.patterns import Causal
from tests.datasets.test_tokenfile import token_file
from tests.generate.conftest import MIXED, small

DOCUMENTS = [9, 1, 16, 3, 21, 2]  # in rows of 16: one ends at an edge, one is longer than a row


def rows(path: Path) -> Rows:
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 330, (n,), generator=generator).tolist() for n in DOCUMENTS]
    return Rows(token_file(path / "x", texts, 330), 16)


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)


@pytest.mark.parametrize("patterns", [Causal(), MIXED], ids=["full", "mixed"])
def test_packed_is_alone(tmp_path: Path, patterns: object) -> None:
    model: Decoder = small(patterns).double()  # type: ignore[arg-type]
    corpus = rows(tmp_path)
    stream = [d for d, n in enumerate(DOCUMENTS) for _ in range(n)][:-1]  # the last token is a target only
    parts_of_rows = [[*Counter(stream[i : i + 16]).values()] for i in range(0, len(stream), 16)]
    assert [corpus[i].lengths for i in range(len(corpus))] == parts_of_rows
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
