"""A task that only positions solve, and a layer small enough to train in a second.

Each target is the token `offset` places before. A single attention layer sees which symbols occur, and sees where only
through the rotation of its queries and keys.

Legend: B rows, T tokens, V symbols, H heads, D per head, M = H D.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.attention import attend, attention_weights
from headway.patterns import Causal
from headway.positions import Rotary
from headway.train import Objective, Sums, fit
from headway.train.optimizer import Optimizer
from headway_lab.explain.figures import Panel, bars
from headway_lab.explain.report import Row

SYMBOLS, WIDTH, TOKENS, BATCH, RATE = 16, 32, 48, 16, 0.02
OFFSET, STEPS, SEEDS = 5, 100, (0, 1, 2)  # for the topics that train for one offset


class Layer(nn.Module):
    """softmax(R_m q . R_n k / sqrt(D)) over earlier tokens; then a guess for every offset.

    Args:
        heads: H; the width and so the number of parameters stay the same.
        rotary: how queries and keys are rotated, and values with `values=True`.
        offsets: number of targets.
        back: whether the output at m is rotated back by R_m^T.
    """

    def __init__(self, heads: int, rotary: Rotary, offsets: int, back: bool = False) -> None:
        super().__init__()
        self.heads, self.rotary, self.offsets, self.back = heads, rotary, offsets, back
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in "qkv")
        self.guess = nn.Linear(WIDTH, offsets * SYMBOLS)

    def turned(self, ids: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k, v [B, H, T, D] of ids [B, T], rotated to positions start, start + 1, ..."""
        x, position = self.embed(ids), torch.arange(start, start + ids.shape[1])
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in projections)
        table = self.rotary.rotation(position, WIDTH // self.heads)
        return table.apply(q), table.apply(k), table.apply(v) if self.rotary.values else v

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        """Returns logits [B, T, offsets, V]."""
        q, k, v = self.turned(ids, start)
        out = attend(q, k, v, Causal(), backend="dense")
        if self.back:
            out = self.rotary.rotate(out, -torch.arange(start, start + ids.shape[1]))
        logits: Tensor = self.guess(out.transpose(1, 2).flatten(2)).unflatten(-1, (self.offsets, SYMBOLS))
        return logits

    def weights(self, ids: Tensor) -> Tensor:
        """Returns attention weights [B, H, T, T]."""
        q, k, _ = self.turned(ids)
        return attention_weights(q, k, Causal())


@dataclass(frozen=True)
class Trained:
    """A trained layer, its offsets and its loss at each step."""

    layer: Layer
    offsets: tuple[int, ...]
    losses: tuple[float, ...]

    def accuracy(self, start: int = 0) -> float:
        """Returns the share of right guesses on fresh tokens over all offsets, at positions start, start + 1, ..;
        random guesses give 1 / V."""
        ids = sample(64, torch.Generator().manual_seed(10_000))
        with torch.no_grad():
            guesses = self.layer(ids, start).argmax(-1)
        return float((guesses[:, max(self.offsets) :] == wanted(ids, self.offsets)).float().mean())


def sample(rows: int, noise: torch.Generator) -> Tensor:
    """Returns random symbols [rows, T]."""
    return torch.randint(0, SYMBOLS, (rows, TOKENS), generator=noise)


def wanted(ids: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """Returns the tokens `offsets` places before each token that has them all: ids [B, T] -> [B, T - max(offsets),
    offsets]."""
    farthest = max(offsets)
    return torch.stack([ids[:, farthest - offset : TOKENS - offset] for offset in offsets], -1)


class NameTokens(Objective[Layer]):
    """The objective of naming the tokens `offsets` places before, on fresh random rows drawn from `seed`."""

    def __init__(self, offsets: tuple[int, ...], seed: int) -> None:
        self.offsets, self.noise = offsets, torch.Generator().manual_seed(seed)

    def batches(self, step: int) -> list[Tensor]:
        return [sample(BATCH, self.noise)]

    def count(self, batch: Tensor) -> int:
        return len(self.offsets) * batch[:, max(self.offsets) :].numel()

    def loss(self, model: Layer, batch: Tensor) -> Sums:
        logits = model(batch)[:, max(self.offsets) :].flatten(0, 2)
        total = F.cross_entropy(logits, wanted(batch, self.offsets).flatten(), reduction="sum")
        return Sums(total, total.detach())


def train(
    rotary: Rotary, offsets: tuple[int, ...], *, heads: int = 1, back: bool = False, steps: int, seed: int
) -> Trained:
    """Returns a layer after `steps` steps of Adam on fresh random rows; equal seeds give equal rows and weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = Layer(heads, rotary, len(offsets), back)
    adam = Optimizer.single(layer, torch.optim.Adam(layer.parameters(), RATE))
    results = fit(NameTokens(offsets, seed), layer, adam, steps=steps)
    return Trained(layer, offsets, tuple(step.loss_sum / step.count for step in results))


def named(name: str, share: str, pale: Callable[[Row], bool] = lambda row: False) -> Panel:
    """Returns a panel with a bar for each value of the column `name`: the share of tokens that are named."""
    title, x = f"token {OFFSET} back named right", f"{share} (line: seeds; dashed: chance)"
    return bars((name,), share, title, x, pale=pale, line=1 / SYMBOLS, xlim=(0, 1.05))
