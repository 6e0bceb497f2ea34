"""Schemes that act on scores: by the distance between key and query, with a step of `headway.scores`."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway.errors import ConfigError, check_whole
from headway.positions.schemes import PositionScheme, Sinusoidal
from headway.scores import ALiBi, RelativeBias, RelativeKey, Score, alibi_slopes


@dataclass(frozen=True)
class Relative(PositionScheme):
    """A vector per distance, added to the key in its product with the query. (Shaw et al. 2018, equation 4.)

        e_ij = scale * q_i . (k_j + a[clip(j - i)])        clip to -clip .. clip

    clip         the largest distance with a vector of its own; 2 clip + 1 vectors of D numbers, for all heads
    sinusoidal   the vectors are fixed sinusoids (NEZHA: Wei et al. 2019, functional relative encoding): the row of a
                 distance is position distance + clip of `Sinusoidal`, as in NEZHA's published code; its paper takes the
                 distance itself, which rotates each pair of columns by one fixed angle

    Each layer has its own vectors. Both papers also add such vectors to the values; that half is not implemented
    (translation works as well without it: Shaw et al. 2018, section 4.3).
    """

    clip: int
    sinusoidal: bool = False
    marks = "scores"
    shared = False

    def __post_init__(self) -> None:
        check_whole("Relative: clip", self.clip)

    def scores(self, heads: int, head_dim: int, bidirectional: bool) -> tuple[Score, ...]:
        rows = 2 * self.clip + 1
        if not self.sinusoidal:
            return (RelativeKey(_fresh(rows, head_dim)),)
        # on the CPU, whatever torch's default device is: tensors on "meta" have no values
        fixed = Sinusoidal().embedding(torch.arange(rows, device="cpu"), head_dim)
        return (RelativeKey(fixed, fixed=True),)

    def saved_bytes(self, q: Tensor, k: Tensor, scores_stored: bool) -> int:
        """Returns the bytes of each query's products with all vectors, and of the indices by which pairs read them."""
        products = q[..., 0].nbytes * (2 * self.clip + 1)
        return scores_stored * (products + 8 * q.shape[2] ** 2)


@dataclass(frozen=True)
class T5Bias(PositionScheme):
    """A trained number per bucket of distances and head, added to scores. (Raffel et al. 2019, section 2.1.)

    buckets        rows of the table; half of them for each direction if attention is bidirectional
    max_distance   from here on all distances are in the last bucket

    One table serves all layers.
    """

    buckets: int = 32
    max_distance: int = 128
    marks = "scores"

    def __post_init__(self) -> None:
        check_whole("T5Bias: buckets", self.buckets, 2)
        check_whole("T5Bias: max_distance", self.max_distance, 2)

    def scores(self, heads: int, head_dim: int, bidirectional: bool) -> tuple[Score, ...]:
        return (RelativeBias(_fresh(self.buckets, heads), bidirectional, self.max_distance),)

    def saved_bytes(self, q: Tensor, k: Tensor, scores_stored: bool) -> int:
        """Returns the bytes of the bucket index of each pair."""
        return scores_stored * 8 * q.shape[2] ** 2


@dataclass(frozen=True)
class LinearBias(PositionScheme):
    """ALiBi: scores decrease linearly with distance, by a slope of each head. (Press et al. 2021, section 3.)

    slopes   one for each query head; the published ones (`headway.scores.alibi_slopes`) unless given

    Nothing is trained.
    """

    slopes: tuple[float, ...] | None = None
    marks = "scores"

    def __post_init__(self) -> None:
        if self.slopes is not None:
            object.__setattr__(self, "slopes", tuple(map(float, self.slopes)))

    def scores(self, heads: int, head_dim: int, bidirectional: bool) -> tuple[Score, ...]:
        slopes = alibi_slopes(heads) if self.slopes is None else self.slopes
        if len(slopes) != heads:
            raise ConfigError(f"LinearBias: {len(slopes)} slopes are given for {heads} query heads")
        return (ALiBi(slopes),)


def _fresh(rows: int, columns: int) -> Tensor:
    return nn.Parameter(nn.init.normal_(torch.empty(rows, columns), 0, 0.02))
