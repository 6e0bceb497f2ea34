"""BLEU, as `sacrebleu` computes it: comparable between papers by its signature (Post 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.errors import DataError, HeadwayError


@dataclass(frozen=True)
class Bleu:
    """`score` in 0..100 (Papineni et al. 2002); `signature` has tokenization, case, smoothing and version."""

    score: float
    signature: str

    def __str__(self) -> str:
        return f"BLEU {self.score:.2f}  {self.signature}"


def bleu(texts: Sequence[str], references: Sequence[str]) -> Bleu:
    """Of translations, against one reference for each. Raises DataError when they are not as many, HeadwayError without
    `sacrebleu`."""
    if len(texts) != len(references) or not texts:
        raise DataError(
            f"BLEU: {len(texts)} translations and {len(references)} references; one for each is needed"
        )
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise HeadwayError(
            "BLEU needs sacrebleu, which is not installed: pip install 'headway[recipes]'"
        ) from error
    metric = BLEU()
    found = metric.corpus_score(list(texts), [list(references)])
    return Bleu(float(found.score), str(metric.get_signature()))
