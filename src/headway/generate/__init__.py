"""From prompts to text: sampling, beam search, stop strings, the loop, batched and streamed."""

from headway.generate.beams import Beams, Steps, search
from headway.generate.config import GenerationConfig
from headway.generate.loop import generate, stream
from headway.generate.results import Delta, Generation, Hypothesis
from headway.generate.sampling import (
    MinP,
    RepetitionPenalty,
    Sampling,
    Temperature,
    TopK,
    TopP,
    uniform,
)
from headway.generate.stop import StopScanner

__all__ = [
    "Beams",
    "Delta",
    "Generation",
    "GenerationConfig",
    "Hypothesis",
    "MinP",
    "RepetitionPenalty",
    "Sampling",
    "Steps",
    "StopScanner",
    "Temperature",
    "TopK",
    "TopP",
    "generate",
    "search",
    "stream",
    "uniform",
]
