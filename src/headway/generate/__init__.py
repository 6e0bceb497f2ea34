"""From prompts to text: sampling, beam search, stop strings; one loop, batched and streamed."""

from headway.generate.config import Beams, GenerationConfig
from headway.generate.loop import generate, stream
from headway.generate.results import Delta, Generation, Hypothesis
from headway.generate.sampling import Sampling, uniform
from headway.generate.session import DecoderSession, Seq2SeqSession, Session
from headway.generate.stop import StopScanner

__all__ = [
    "Beams",
    "DecoderSession",
    "Delta",
    "Generation",
    "GenerationConfig",
    "Hypothesis",
    "Sampling",
    "Seq2SeqSession",
    "Session",
    "StopScanner",
    "generate",
    "stream",
    "uniform",
]
