"""Position schemes that differ by layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from headway.errors import ConfigError
from headway.positions.pairing import Pairing
from headway.positions.rotary import Rotary
from headway.positions.schemes import Marks, NoPositions, PositionScheme
from headway.scores import Score


@dataclass(frozen=True)
class PerLayer(PositionScheme):
    """A scheme for each layer, repeated cyclically: layer i has the scheme with index i modulo their number.

        PerLayer((Rotary(pairing="halves"), *(NoPositions(),) * 11))     rotary in the first of 12 layers
        PerLayer((Rotary(pairing="halves"), NoPositions()))              in every other layer

    Layers without positions still get the order information that earlier layers wrote into the residual stream.

    Raises ConfigError without any scheme; for a scheme that acts on embeddings (once, before any layer); and if some
    layers rotate queries and keys and others change scores: all layers of a model must act in the same place.
    """

    schemes: tuple[PositionScheme, ...]

    @staticmethod
    def of(schemes: Sequence[PositionScheme]) -> PositionScheme:
        """Returns the shortest equal value for as many layers: the scheme itself if all are the same, else the shortest
        list whose repetition begins with these schemes. Schemes a b a b a are PerLayer((a, b))."""
        period = next(
            n for n in range(1, len(schemes) + 1) if all(s == schemes[i % n] for i, s in enumerate(schemes))
        )
        return schemes[0] if period == 1 else PerLayer(tuple(schemes[:period]))

    def __post_init__(self) -> None:
        schemes: object = self.schemes
        if not isinstance(schemes, Sequence) or not schemes:
            raise ConfigError(
                f"PerLayer: schemes must be a sequence of at least one position scheme, got {schemes!r}"
            )
        object.__setattr__(self, "schemes", tuple(schemes))
        for scheme in self.schemes:
            if not isinstance(scheme, PositionScheme) or isinstance(scheme, PerLayer):
                raise ConfigError(
                    f"PerLayer: each layer needs a position scheme such as {NoPositions()}, got {scheme!r}"
                )
            if scheme.marks == "embeddings":
                raise ConfigError(
                    f"PerLayer: {scheme} is added to the embeddings before the first layer, so it cannot belong to one "
                    "layer; use it as the scheme of the whole model"
                )
        if len(marks := self._marks_used()) > 1:
            raise ConfigError(
                f"PerLayer: some schemes act on {marks[0]} and others on {marks[1]}; use one of the two kinds, and "
                f"{NoPositions()} for layers without positions"
            )

    def _marks_used(self) -> list[Marks]:
        return sorted({scheme.marks for scheme in self.schemes} - {"nothing"})

    @property
    def marks(self) -> Marks:
        return (self._marks_used() or ["nothing"])[0]

    @property
    def shared(self) -> bool:
        return all(scheme.shared for scheme in self.schemes)

    @property
    def length_dependent(self) -> bool:
        return any(scheme.length_dependent for scheme in self.schemes)

    @property
    def grows(self) -> bool:
        return any(scheme.grows for scheme in self.schemes)

    def at(self, layer: int) -> PositionScheme:
        if layer < 0:
            raise ConfigError(f"PerLayer: layers are numbered from 0, got {layer}")
        return self.schemes[layer % len(self.schemes)]

    def expand(self, layers: int) -> tuple[PositionScheme, ...]:
        if layers % len(self.schemes):
            raise ConfigError(
                f"PerLayer: {len(self.schemes)} schemes do not divide {layers} layers; give one scheme per layer, or a "
                "repeating sequence whose length divides the number of layers"
            )
        return super().expand(layers)

    def scores(self, heads: int, head_dim: int, bidirectional: bool) -> tuple[Score, ...]:
        if self.marks != "scores":
            return ()
        raise ConfigError("PerLayer: each layer has its own scores; call at(layer).scores(...)")


def rotations(positions: PositionScheme) -> tuple[Rotary, ...]:
    """Returns the distinct rotary schemes of the layers; empty if no layer has one."""
    schemes = positions.schemes if isinstance(positions, PerLayer) else (positions,)
    return tuple(dict.fromkeys(scheme for scheme in schemes if isinstance(scheme, Rotary)))


def in_pairing(positions: PositionScheme, pairing: Pairing) -> PositionScheme:
    """Returns the scheme with every rotary scheme in a pairing. Raises ConfigError as `Rotary.with_pairing` does."""
    if isinstance(positions, PerLayer):
        return PerLayer(tuple(in_pairing(scheme, pairing) for scheme in positions.schemes))
    return positions.with_pairing(pairing) if isinstance(positions, Rotary) else positions
