"""What turns queries and keys: the tables of a position scheme, and the numbers of it that are trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.positions import MatrixTable, PerLayer, PositionScheme, Rotary, RotaryTable, SpecialOrthogonal
from headway.tokens import Tokens

Table = RotaryTable | MatrixTable


class RotaryEmbedding(nn.Module):
    """The turns of a scheme that marks queries and keys.

        turn = turns(tokens, x.dtype)        q, k = turn.apply(q), turn.apply(k)
        if turn.turns_values: v = turn.apply(v)

    What is trained is `drift`, float32 by default, 0 at the start: how far the frequencies of a
    `Rotary(trainable=True)` have moved from its schedule, [d/2] radians per position; or the numbers below the
    diagonal of A of a `SpecialOrthogonal`, [d (d - 1) / 2], row by row. A fresh module therefore turns exactly
    as the scheme does, in every dtype. Other schemes have no parameters, and nothing in the state dict.

    Args:
        positions: the scheme of a layer (`positions.at(layer)`); one that does not turn gives None.
        head_dim: D.

    Raises ConfigError for a `PerLayer`, and for a head that the scheme cannot turn.
    """

    def __init__(self, positions: PositionScheme, head_dim: int) -> None:
        super().__init__()
        if isinstance(positions, PerLayer):
            raise ConfigError(
                "RotaryEmbedding: layers have schemes of their own; make one for each different positions.at(layer)"
            )
        self.positions, self.head_dim = positions, head_dim
        self.drift: nn.Parameter | None = None
        if isinstance(positions, Rotary | SpecialOrthogonal):
            dims = positions.rotated_dims(head_dim)
            if isinstance(positions, SpecialOrthogonal):
                self.drift = nn.Parameter(torch.zeros(dims * (dims - 1) // 2))
            elif positions.trainable:
                self.drift = nn.Parameter(torch.zeros(dims // 2))

    def reset_parameters(self) -> None:
        """Back to where training starts."""
        if self.drift is not None:
            nn.init.zeros_(self.drift)

    @property
    def trained(self) -> bool:
        """Whether the turns change in training."""
        return self.drift is not None

    @property
    def frequencies(self) -> Tensor:
        """Radians per position of each pair now, float64 [d/2]: those of `Rotary`, or the d/2 angles of R_1 of a
        `SpecialOrthogonal`, largest first. Raises ConfigError where they depend on lengths, or nothing turns."""
        scheme = self.positions
        if isinstance(scheme, SpecialOrthogonal):
            angles: Tensor = torch.linalg.eigvalsh(1j * self.generator)
            return angles.flip(0)[: len(angles) // 2]
        if not isinstance(scheme, Rotary) or scheme.length_dependent:
            raise ConfigError(f"RotaryEmbedding: {scheme} has no one set of frequencies")
        start = scheme.frequencies(self.head_dim)
        return start if self.drift is None else start.to(self.drift.device) + self.drift

    @property
    def generator(self) -> Tensor:
        """A of a `SpecialOrthogonal` now, float64 [d, d]. Raises ConfigError for other schemes."""
        if not isinstance(self.positions, SpecialOrthogonal) or self.drift is None:
            raise ConfigError(f"RotaryEmbedding: {self.positions} has no generator A; SpecialOrthogonal has")
        start = self.positions.generator(self.head_dim).to(self.drift.device)
        below = start.new_zeros(start.shape)
        row, column = torch.tril_indices(len(start), len(start), -1, device=start.device)
        below = below.index_put((row, column), self.drift.to(start.dtype))
        return start + below - below.mT

    def forward(self, tokens: Tokens, dtype: torch.dtype) -> Table | None:
        """The table of these tokens for queries and keys (values too, if it says so) of `dtype`.

        Where frequencies depend on the length, it is that of each token's own row (or packed document).
        Positions of empty slots are not looked at."""
        scheme = self.positions
        if not isinstance(scheme, Rotary | SpecialOrthogonal):
            return None
        at = torch.where(tokens.valid, tokens.positions, 0)
        if isinstance(scheme, SpecialOrthogonal):
            return scheme.table(at, self.head_dim, self.generator, dtype)
        length = token_lengths(tokens) if scheme.length_dependent else None
        trained = self.frequencies if scheme.trainable else None
        return scheme.table(at, self.head_dim, length, dtype, trained)

    def extra_repr(self) -> str:
        return f"{self.positions}, head_dim={self.head_dim}"


def token_lengths(tokens: Tokens) -> Tensor:
    """How many tokens the row (or the packed document) of each slot has up to here: int64 [B|1, T].

    That is the largest index of the document plus one, so a chunk that continues a cache counts the past."""
    index = tokens.index
    if tokens.document is None:
        last = index.amax(1, keepdim=True) if index.shape[1] else index.new_zeros(index.shape[0], 1)
        return (last + 1).expand_as(index)
    document = torch.where(tokens.valid, tokens.document, -1) + 1
    most = index.new_full((index.shape[0], int(document.max()) + 1), -1)
    most = most.scatter_reduce(1, document, index, "amax")
    return most.gather(1, document) + 1
