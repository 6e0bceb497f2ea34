"""Hidden tokens from those on both sides: how encoders are pre-trained."""

from __future__ import annotations

from typing import Any

import torch

from headway.data import MaskedRows, Masking, TokenFile
from headway.data.masking import SHARE
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.text import Tokenizer
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
        template, packed = tokenizer.template, config.pack is not False
        share = SHARE if config.mask_share is None else config.mask_share
        masking = Masking.of(tokenizer, share=share, whole_words=bool(config.whole_words))
        return MaskedRows(
            file, config.context, masking, prefix=template.prefix, suffix=template.suffix, packed=packed,
            seed=config.seed, global_first=spec.global_projections,
        )  # fmt: skip

    def encoded_prompts(self) -> list[list[int]]:
        config, tokenizer = self.config, self.tokenizer
        mask = tokenizer.need("mask")
        prompts = [tokenizer.encode(text, special=True) for text in config.sample_prompts]
        for text, ids in zip(config.sample_prompts, prompts, strict=True):
            if mask not in ids or len(ids) > config.context:
                raise ConfigError(
                    f"sample prompt {text!r} of {len(ids)} tokens must have a mask to fill in "
                    f"({tokenizer.token(mask)}) and fit context {config.context}"
                )
        return prompts

    def completed(self, model: Any, prompts: list[list[int]]) -> list[str]:
        """See `TextTask`: each mask becomes the token that the model finds most probable there."""
        mask, found = self.tokenizer.need("mask"), []
        for row in map(torch.tensor, prompts):
            best = model(row[None])[0].argmax(-1)
            found.append(self.tokenizer.decode(torch.where(row == mask, best, row).tolist()))
        return [f" -> {text}" for text in found]
