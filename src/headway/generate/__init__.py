"""Text generation: sampling, beam search and stop strings in one engine, batched and streamed; probabilities of given
texts."""

from headway.generate.config import Beams, GenerationConfig
from headway.generate.drafts import Draft, ModelDraft, NgramDraft
from headway.generate.engine import Engine
from headway.generate.loop import generate, stream
from headway.generate.ranks import led
from headway.generate.reader import Reader
from headway.generate.results import Delta, Generation, Hypothesis, ToldToken
from headway.generate.sampling import Sampling, uniform
from headway.generate.score import Score, rolling_windows, score
from headway.generate.stop import StopScanner

__all__ = [
    "Beams",
    "Delta",
    "Draft",
    "Engine",
    "Generation",
    "GenerationConfig",
    "Hypothesis",
    "ModelDraft",
    "NgramDraft",
    "Reader",
    "Sampling",
    "Score",
    "StopScanner",
    "ToldToken",
    "generate",
    "led",
    "rolling_windows",
    "score",
    "stream",
    "uniform",
]
