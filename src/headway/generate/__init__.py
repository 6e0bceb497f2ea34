"""From prompts to text: sampling, beam search, stop strings; one loop, batched and streamed. How probable given texts
are."""

from headway.generate.config import Beams, GenerationConfig
from headway.generate.drafts import Draft, DraftSession, ModelDraft, NgramDraft
from headway.generate.loop import generate, stream
from headway.generate.results import Delta, Generation, Hypothesis
from headway.generate.sampling import Sampling, uniform
from headway.generate.score import Score, rolling_windows, score
from headway.generate.session import DecoderSession, Seq2SeqSession, Session
from headway.generate.stop import StopScanner

__all__ = [
    "Beams",
    "DecoderSession",
    "Delta",
    "Draft",
    "DraftSession",
    "Generation",
    "GenerationConfig",
    "Hypothesis",
    "ModelDraft",
    "NgramDraft",
    "Sampling",
    "Score",
    "Seq2SeqSession",
    "Session",
    "StopScanner",
    "generate",
    "rolling_windows",
    "score",
    "stream",
    "uniform",
]
