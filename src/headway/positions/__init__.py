"""Position schemes: how positions act on embeddings, queries and keys, or scores, as values and pure functions of
positions."""

from headway.positions.biases import LinearBias, Relative, T5Bias
from headway.positions.layers import PerLayer, in_pairing, rotations
from headway.positions.orthogonal import SpecialOrthogonal
from headway.positions.pairing import Pairing, coordinate_pairs, to_pairing
from headway.positions.rotary import Rotary, Schedule
from headway.positions.scaling import (
    DynamicNTK,
    LinearScaling,
    Llama3,
    LongRope,
    Proportional,
    Scaling,
    YaRN,
)
from headway.positions.schemes import Learned, NoPositions, PositionScheme, Sinusoidal
from headway.positions.tables import MatrixTable, RotaryTable, Rotation

__all__ = [
    "DynamicNTK",
    "Learned",
    "LinearBias",
    "LinearScaling",
    "Llama3",
    "LongRope",
    "MatrixTable",
    "NoPositions",
    "Pairing",
    "PerLayer",
    "PositionScheme",
    "Proportional",
    "Relative",
    "Rotary",
    "RotaryTable",
    "Rotation",
    "Scaling",
    "Schedule",
    "Sinusoidal",
    "SpecialOrthogonal",
    "T5Bias",
    "YaRN",
    "coordinate_pairs",
    "in_pairing",
    "rotations",
    "to_pairing",
]
