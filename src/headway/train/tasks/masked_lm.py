"""Hidden tokens from those on both sides: how encoders are pre-trained."""

from __future__ import annotations

from typing import Any

from headway.data import MaskedRows, TokenFile
from headway.models import ModelSpec
from headway.text import Tokenizer
from headway.train.callbacks import Callback
from headway.train.sampling import filled_in
from headway.train.tasks.base import StepStats
from headway.train.tasks.text import TextTask
from headway.train.text_config import TextConfig


class MaskedLM(TextTask):
    """Tokens that are masked (Devlin et al. 2019, section 3.1).

    Each step has masks of its own, drawn by (seed, step, row); held-out text has one for good, drawn by (seed, row).
    Where global tokens have projections of their own, each text's first token ([CLS]) is global, as in classification
    (Beltagy et al. 2020, section 3.1): without one these projections would never be trained.
    """

    next_command = "headway eval {model} --data ..."
    in_template = False

    @classmethod
    def unsupported(cls, spec: ModelSpec) -> str | None:
        if spec.encoder is not None:
            return f"{spec.family} is an encoder-decoder, which is trained on pairs of texts"
        if spec.causal:
            return f"{spec.family} is a decoder, trained on next tokens"
        if spec.head.task != "masked-lm":
            return (
                f"this encoder ({spec.family}) has Head({spec.head.task!r}); it is pre-trained with its masked-lm "
                "head, so give a folder that has one"
            )
        return None

    @classmethod
    def rows(cls, file: TokenFile, config: TextConfig, tokenizer: Tokenizer, spec: ModelSpec) -> MaskedRows:
        given: dict[str, Any] = {}
        if config is not None:
            names = {"share": "mask_share", "whole_words": "whole_words", "packed": "pack", "seed": "seed"}
            given = {
                own: value for own, name in names.items() if (value := getattr(config, name)) is not None
            }
        return MaskedRows.of(file, config.context, tokenizer, global_first=spec.global_projections, **given)

    def callbacks(self) -> list[Callback]:
        """See `Task`: masks in prompts are filled in."""
        return [filled_in(self.config, self.tokenizer)] if self.config.sample_prompts else []

    def quality(self, stats: StepStats) -> dict[str, float | None]:
        """See `TextTask`: the share of the masked tokens that were found."""
        return {"accuracy": stats.extra["hits"] / stats.count if stats.count else None}
