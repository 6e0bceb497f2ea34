"""From prompts to text: sampling, stop strings, the loop, batched and streamed."""

from headway.generate.loop import Delta, Generation, generate, stream
from headway.generate.sampling import (
    MinP,
    RepetitionPenalty,
    Sampling,
    Temperature,
    TopK,
    TopP,
    uniform,
)
from headway.generate.settings import Settings
from headway.generate.stop import StopScanner

__all__ = [
    "Delta",
    "Generation",
    "MinP",
    "RepetitionPenalty",
    "Sampling",
    "Settings",
    "StopScanner",
    "Temperature",
    "TopK",
    "TopP",
    "generate",
    "stream",
    "uniform",
]
