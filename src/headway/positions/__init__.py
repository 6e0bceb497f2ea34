"""How queries, keys or embeddings are marked with their positions: values, and pure functions of
positions.
"""

from headway.positions.pairing import Pairing, coordinate_pairs, to_pairing
from headway.positions.rotary import Rotary, RotaryTable
from headway.positions.scaling import DynamicNTK, Linear, Llama3, LongRope, Scaling, YaRN
from headway.positions.schemes import Learned, NoPositions, PositionScheme, Sinusoidal

__all__ = [
    "DynamicNTK",
    "Learned",
    "Linear",
    "Llama3",
    "LongRope",
    "NoPositions",
    "Pairing",
    "PositionScheme",
    "Rotary",
    "RotaryTable",
    "Scaling",
    "Sinusoidal",
    "YaRN",
    "coordinate_pairs",
    "to_pairing",
]
