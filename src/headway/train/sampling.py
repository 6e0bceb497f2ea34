"""What a model makes of fixed prompts while it learns: it continues them, or fills in their masks."""

from __future__ import annotations

import torch

from headway.checkpoints.restore import as_decoder
from headway.errors import ConfigError
from headway.generate import GenerationConfig, Sampling, generate
from headway.models import ModelSpec
from headway.text import Tokenizer
from headway.train.callbacks import CallbackContext, PeriodicCallback
from headway.train.config import TrainConfig


def prompt_sampler(config: TrainConfig, tokenizer: Tokenizer, spec: ModelSpec) -> PeriodicCallback | None:
    """The callback that `sample_prompts` ask for; None without prompts. Decoders continue, encoders fill in.

    Raises ConfigError at once for a prompt that is too long, or has nothing to fill in."""
    if not config.sample_prompts:
        return None
    return _continued(config, tokenizer) if spec.causal else _filled(config, tokenizer)


def _filled(config: TrainConfig, tokenizer: Tokenizer) -> PeriodicCallback:
    """Each mask becomes the token that the model finds most probable there."""
    mask = tokenizer.need("mask")
    prompts = [tokenizer.encode(text, special=True) for text in config.sample_prompts]
    for text, ids in zip(config.sample_prompts, prompts, strict=True):
        if mask not in ids or len(ids) > config.context:
            raise ConfigError(
                f"sample prompt {text!r} of {len(ids)} tokens must have a mask to fill in ({tokenizer.token(mask)}) "
                f"and fit context {config.context}"
            )

    def sample(moment: CallbackContext) -> None:
        for text, ids in zip(config.sample_prompts, prompts, strict=True):
            row = torch.tensor([ids])
            best = moment.model(row).argmax(-1)
            filled = torch.where(row == mask, best, row)[0].tolist()
            moment.say(f"step {moment.step}: {text} -> {tokenizer.decode(filled)}")

    return PeriodicCallback(sample, steps=config.sample_every)


def _continued(config: TrainConfig, tokenizer: Tokenizer) -> PeriodicCallback:
    """Greedy, so that what changes is the model."""
    prompts = [tokenizer.encode(text, eos=False) for text in config.sample_prompts]
    for text, ids in zip(config.sample_prompts, prompts, strict=True):
        if not ids or len(ids) + config.sample_tokens > config.context:
            raise ConfigError(
                f"sample prompt {text!r} of {len(ids)} tokens and sample_tokens {config.sample_tokens} do not fit "
                f"context {config.context} (at least one token is needed); shorten one of them"
            )
    eos = () if tokenizer.eos is None else (tokenizer.eos,)
    settings = GenerationConfig(
        max_new_tokens=config.sample_tokens, sampling=Sampling(temperature=0.0), eos=eos
    )

    def sample(moment: CallbackContext) -> None:
        found = generate(as_decoder(moment.model), prompts, settings, tokenizer=tokenizer)
        for text, continued in zip(config.sample_prompts, found, strict=True):
            moment.say(f"step {moment.step}: {text}|{continued.text}")

    return PeriodicCallback(sample, steps=config.sample_every)
