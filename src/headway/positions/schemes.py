"""The base class of position schemes, and the schemes that act on nothing or on embeddings."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headway.errors import ConfigError, check_known, check_whole
from headway.positions.tables import Rotation
from headway.scores import Score

Marks = Literal["nothing", "embeddings", "queries and keys", "scores"]


class PositionScheme:
    """How a model encodes the positions of its tokens. A frozen, hashable value without tensors or parameters.

    marks              what it acts on: "nothing"; "embeddings" (added once, before the first layer); "queries and keys"
                       (rotated in every attention layer, before the scores); "scores" (steps of attention)
    shared             whether all layers use the same steps, or each has its own
    length_dependent   whether the length of a row changes how its tokens are encoded
    amplitude          factor on rotated queries and keys
    grows              whether rotated queries are also multiplied by a factor that depends on their position
    limit              number of positions; None is no limit
    rows               rows of a trained table that is added to the embeddings; 0 is none

    A scheme is one file: a subclass defines `marks` and overrides the corresponding methods.

        "embeddings"         `row` if `rows` is above 0, else `embedding`
        "queries and keys"   `rotation`; `trained_numbers` if some of it is trained
        "scores"             `scores`
    """

    @property
    def marks(self) -> Marks:
        raise NotImplementedError

    @property
    def shared(self) -> bool:
        return True

    @property
    def length_dependent(self) -> bool:
        return False

    @property
    def amplitude(self) -> float:
        return 1.0

    @property
    def grows(self) -> bool:
        return False

    @property
    def limit(self) -> int | None:
        return None

    @property
    def rows(self) -> int:
        return 0

    def check_head_dim(self, head_dim: int) -> None:
        """Raises ConfigError if the scheme cannot be applied to heads of `head_dim`."""

    def at(self, layer: int) -> "PositionScheme":
        """Returns the scheme that acts in layer 0, 1, ...: this one, unless layers have their own (`PerLayer`)."""
        return self

    def expand(self, layers: int) -> "tuple[PositionScheme, ...]":
        """Returns `at` for each of `layers` layers. Raises ConfigError if per-layer schemes do not fit that number."""
        return tuple(self.at(layer) for layer in range(layers))

    def scores(self, heads: int, head_dim: int, bidirectional: bool) -> tuple[Score, ...]:
        """Returns new steps for the scores of attention, with trained tables as `nn.Parameter`; () unless it acts on
        scores.

        heads           query heads
        head_dim        D, of queries and keys
        bidirectional   whether queries also attend to later keys
        """
        return ()

    def row(self, position: Tensor) -> Tensor:
        """Returns the rows of the trained table that are added at these positions (integers)."""
        raise NotImplementedError(f"{self} has no trained table")

    def embedding(self, position: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the vectors that are added to embeddings at [..., T] positions (integers): [..., T, width]."""
        raise NotImplementedError(f"{self} adds nothing to embeddings")

    def trained_numbers(self, head_dim: int) -> int:
        """Returns the number of trained numbers of the rotation: the size of `offset`, which starts at 0."""
        return 0

    def rotation(
        self,
        position: Tensor,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        length: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> Rotation:
        """Returns the rotation of queries and keys at these positions.

        position   [T], or [B or 1, T]: positions of each row
        dtype      of queries and keys
        length     tokens of the row (or document) of each position, if `length_dependent`
        offset     the trained numbers, [trained_numbers(head_dim)], if there are any; they receive gradients
        """
        raise NotImplementedError(f"{self} rotates nothing")

    def saved_bytes(self, q: Tensor, k: Tensor, scores_stored: bool) -> int:
        """Returns the bytes that one layer saves for the backward of the scheme: the input of a trained rotation, and
        if scores are stored the input of each step on them.

        q, k   shapes, and the dtype of the rotation's numbers (tensors on "meta"): [B, H, T, D], [B, K, T, D]
        """
        return 0

    def trained_frequencies(self, head_dim: int, offset: Tensor | None = None) -> Tensor:
        """Returns the radians per position of each pair, float64 [d/2], including their trained offsets. Raises
        ConfigError if they depend on lengths, or nothing is rotated."""
        raise ConfigError(f"{self} has no one set of frequencies")


@dataclass(frozen=True)
class NoPositions(PositionScheme):
    """No position encoding. Attention is then equivariant to permutations, except for the order that its pattern
    reveals."""

    marks = "nothing"


@dataclass(frozen=True)
class Sinusoidal(PositionScheme):
    """Sines and cosines added to the embeddings (Vaswani et al. 2017, section 3.5).

        PE(p, 2i) = sin(p / theta^(2i/M))        PE(p, 2i + 1) = cos(p / theta^(2i/M))        0 <= i < M/2

    theta     the base, as above
    pairing   the place of each sine's cosine: "adjacent" as above; "halves" has all sines before all cosines, at i and
              i + M/2 (Marian)
    closed    the slowest pair rotates by 1 / theta: theta^(2i/(M - 2)) above (tensor2tensor, fairseq)
    first     the row of the first token; p + first above (fairseq's 2)

    Row p + k is one fixed linear map of row p, whatever p is: a rotation of each (sin, cos) pair by k / theta^(2i/M).
    """

    theta: float = 10000.0
    pairing: Literal["adjacent", "halves"] = "adjacent"
    closed: bool = False
    first: int = 0
    marks = "embeddings"

    def __post_init__(self) -> None:
        object.__setattr__(self, "theta", checked_theta(self.theta, "Sinusoidal"))
        check_known(self.pairing, ("adjacent", "halves"), "Sinusoidal: there is no pairing")
        check_whole("Sinusoidal: first", self.first, 0)

    def embedding(self, position: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the rows to add: [..., T] positions (integers) give [..., T, width] in `dtype`; angles are float64.

        Raises ConfigError for an odd width, and if `closed` for a single pair.
        """
        if width < 2 * (1 + self.closed) or width % 2:
            raise ConfigError(
                f"Sinusoidal: the width must be even (pairs of sine and cosine{', two at least' * self.closed}), "
                f"got {width}"
            )
        frequency = powers(self.theta, width, position.device, over=width - 2 * self.closed)
        angle = exact_positions(position + self.first)[..., None] * frequency
        if self.pairing == "halves":
            return torch.cat((angle.sin(), angle.cos()), -1).to(dtype)
        return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2).to(dtype)


@dataclass(frozen=True)
class Learned(PositionScheme):
    """A trained table added to the embeddings; position p reads row p + offset of its size + offset rows.

    size     number of positions: 0 <= p < size
    offset   rows before position 0 that no token reads (RoBERTa's two: 512 positions, 514 rows)

    This is only the description; the table itself is a parameter of the model.
    """

    size: int
    offset: int = 0
    marks = "embeddings"

    def __post_init__(self) -> None:
        if self.size < 1 or self.offset < 0:
            raise ConfigError(
                f"Learned: size must be >= 1 and offset >= 0, got {self.size} and {self.offset}"
            )

    @property
    def limit(self) -> int:
        return self.size

    @property
    def rows(self) -> int:
        return self.size + self.offset

    def row(self, position: Tensor) -> Tensor:
        """Returns the table rows of these positions. Raises ConfigError if one lies outside 0..size-1, or is not an
        integer."""
        check_integers(position, "Learned")
        if position.numel():
            low, high = int(position.min()), int(position.max())
            if low < 0 or high >= self.size:
                raise ConfigError(
                    f"Learned: positions {low}..{high} do not fit a table for positions 0..{self.size - 1}; "
                    "shorten the input, or lengthen the table"
                )
        return position + self.offset


def check_integers(position: Tensor, owner: str) -> None:
    """Raises ConfigError unless positions are integers."""
    if position.is_floating_point() or position.is_complex() or position.dtype == torch.bool:
        raise ConfigError(f"{owner}: positions must be integers, got {position.dtype}; keep them torch.long")


def checked_theta(theta: float, owner: str) -> float:
    """Returns `theta` as a float. Raises ConfigError unless it is a finite number >= 1."""
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 1 <= theta < float("inf"):
        raise ConfigError(f"{owner}: theta must be a finite number >= 1, got {theta!r}")
    return float(theta)


def powers(
    theta: float, dims: int, device: torch.device | str | None = None, *, over: int | None = None
) -> Tensor:
    """Returns theta^(-2i/over) for i = 0 .. dims/2 - 1, in float64; `over` is dims unless given."""
    divisor = dims if over is None else over
    exponent = torch.arange(0, dims, 2, dtype=torch.float64, device=device) / -divisor
    return torch.pow(theta, exponent)


def exact_positions(position: Tensor) -> Tensor:
    """Returns positions in float64 (exact to 2^53). Raises ConfigError for half precision, where 257 is rounded."""
    if (
        position.dtype in (torch.float16, torch.bfloat16)
        or position.is_complex()
        or position.dtype == torch.bool
    ):
        raise ConfigError(
            f"positions must be integers (or float32/float64), got {position.dtype}, which cannot tell "
            "neighbouring positions apart; keep positions as torch.long"
        )
    return position.to(torch.float64)
