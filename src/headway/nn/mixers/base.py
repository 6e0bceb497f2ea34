"""What an attention layer mixes values with.

Legend: B rows, T tokens, M width, H heads, D per head, E per value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from headway.attention import KeyValues
from headway.cache import LayerCache
from headway.nn.rotary_embedding import RotaryEmbedding
from headway.nn.scores import Scores
from headway.patterns import Pattern
from headway.positions import PositionScheme, Rotation
from headway.scores import Score
from headway.tokens import Tokens


class Call(NamedTuple):
    """What a layer is called with beside x, as in `AttentionLayer.forward`; `rotation` where positions rotate."""

    tokens: Tokens
    cache: LayerCache | None
    memory: KeyValues | None
    rotation: Rotation | None
    score: Sequence[Score]


class Projections(Protocol):
    """What a mixer is given of its layer: see `AttentionLayer`."""

    dropout: float
    training: bool
    rotary: RotaryEmbedding
    score: Scores

    def queries(self, x: Tensor, of_global: bool = False) -> Tensor: ...

    def keys_values(self, x: Tensor, of_global: bool = False) -> tuple[Tensor, Tensor]: ...


class Mixer(ABC):
    """From what a layer's tokens are made of to each query's mean of values, heads not yet joined.

    pattern              which keys each query may see
    global_projections   whether it asks for a second set of projections
    """

    pattern: Pattern
    global_projections = False

    def check(  # noqa: B027  (most mixers can have all of them)
        self, positions: PositionScheme, score: Sequence[Score], dropout: float
    ) -> None:
        """Raises HeadwayError for a layer whose positions, scores or dropout of weights it cannot have."""

    @abstractmethod
    def attend(self, layer: Projections, x_BTM: Tensor, call: Call) -> Tensor:
        """[B, H, T, E]: attention to `call.memory`, without positions, or where there is none to the tokens of x."""
