"""Positions within a layer: rotations of queries and keys, and score steps."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.native import rows
from headway.nn.fused import rotate
from headway.positions import PositionScheme, RotaryTable, Rotation
from headway.scores import Score
from headway.tokens import Tokens


class RotaryEmbedding(nn.Module):
    """The rotations of a scheme that marks queries and keys.

        rotation = rotary(tokens, x.dtype)        q, k = rotation.apply(q), rotation.apply(k)
        if rotation.rotates_values: v = rotation.apply(v)

    The trained parameter is `frequency_offset`, float32 by default, initially 0: it is added to the frequencies of a
    `Rotary(trainable=True)`, [d/2] radians per position; or to the numbers below the diagonal of A of a
    `SpecialOrthogonal`, [d (d - 1) / 2], row by row. A new module therefore rotates exactly as the scheme does, in
    every dtype. Other schemes have no parameters, and nothing in the state dict.

    Args:
        positions: the scheme of a layer (`positions.at(layer)`); `forward` returns None if it marks something else.
        head_dim: D.

    Raises ConfigError for a `PerLayer`, and for heads that the scheme cannot rotate.
    """

    def __init__(self, positions: PositionScheme, head_dim: int) -> None:
        super().__init__()
        if positions.at(0) != positions:
            raise ConfigError(
                "RotaryEmbedding: positions differ between layers; make one for each different positions.at(layer)"
            )
        positions.check_head_dim(head_dim)
        self.positions, self.head_dim = positions, head_dim
        self.rotates = positions.marks == "queries and keys"
        trained = positions.trained_numbers(head_dim)
        self.frequency_offset = nn.Parameter(torch.zeros(trained)) if trained else None

    @property
    def frequencies(self) -> Tensor:
        """Current radians per position of each pair, float64 [d/2]. Raises ConfigError if they depend on lengths, or
        if nothing rotates."""
        return self.positions.trained_frequencies(self.head_dim, self.frequency_offset)

    def forward(
        self,
        tokens: Tokens,
        dtype: torch.dtype,
        length: Tensor | None = None,
        whole: Tokens | None = None,
    ) -> Rotation | None:
        """Returns the rotation of these tokens for queries and keys (values too, if the scheme says so) of `dtype`;
        None if nothing rotates.

        If frequencies depend on the length, it is that of each token's own row (or packed document), or `length`
        [B|1, T], if given; `whole` are the tokens of whole rows, if these are only a shard of them. Positions of
        empty slots are ignored."""
        if not self.rotates:
            return None
        at = torch.where(tokens.valid, tokens.positions, 0)
        if length is None and self.positions.length_dependent:
            length = token_lengths(tokens, whole)
        return self.positions.rotation(at, self.head_dim, dtype, length, self.frequency_offset)

    def extra_repr(self) -> str:
        return f"{self.positions}, head_dim={self.head_dim}"


def rotated(rotation: Rotation, *xs: Tensor) -> list[Tensor]:
    """Rotates queries, keys and values [B, heads, T, D], as many as are given, with the native kernels in one pass
    if possible: applies `rotation.apply` to each, to values only if the rotation says so, and multiplies queries by
    its `query_factor`."""
    count = 3 if rotation.rotates_values else 2
    xs, unrotated = xs[:count], xs[count:]
    if type(rotation) is not RotaryTable or rotation.cos.requires_grad or not rows.runs(*xs):
        ys = [rotation.apply(x) for x in xs]
    else:
        for x in xs:
            rotation.check(x)
        ys = rotate(xs, rotation.cos, rotation.sin, rotation.pairing)
    if rotation.query_factor is not None:
        ys[0] = ys[0] * rotation.query_factor[..., None, :, None].to(ys[0].dtype)
    return [*ys, *unrotated]


def token_lengths(tokens: Tokens, whole: Tokens | None = None) -> Tensor:
    """Returns the length so far of the row (or of the packed document) of each slot: int64 [B|1, T], or [B|1, 1] if
    each row is one document.

    That is the largest index of the document plus one, so a chunk that continues a cache counts the past. `whole`
    are the tokens of whole rows, if these are only a shard of them."""
    whole = tokens if whole is None else whole
    index = whole.index
    if tokens.document is None:
        last = index.amax(1, keepdim=True) if index.shape[1] else index.new_zeros(index.shape[0], 1)
        return last + 1
    document, local = (torch.where(t.valid, t.documents, -1) + 1 for t in (whole, tokens))
    most = index.new_full((index.shape[0], int(document.max()) + 1), -1)
    most = most.scatter_reduce(1, document, index, "amax")
    return most.gather(1, local) + 1


class Scores(nn.Module):
    """Score steps whose tensors are part of the module: trained if they are an `nn.Parameter`, moved and saved with
    it in any case. Tensor j of step i is named `i_j`."""

    def __init__(self, steps: Sequence[Score] = ()) -> None:
        super().__init__()
        self.steps = tuple(steps)
        for name, tensor in self._tensors().items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self) -> tuple[Score, ...]:
        """Returns the score steps with their tensors taken from this module's parameters and buffers, and so on its
        current device."""
        return tuple(
            step.with_parameters(tuple(getattr(self, f"{i}_{j}") for j in range(len(step.parameters))))
            for i, step in enumerate(self.steps)
        )

    def _tensors(self) -> dict[str, Tensor]:
        return {f"{i}_{j}": t for i, step in enumerate(self.steps) for j, t in enumerate(step.parameters)}

    def extra_repr(self) -> str:
        return ", ".join(type(step).__name__ for step in self.steps)
