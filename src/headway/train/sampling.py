"""What a model makes of fixed prompts while it learns: it continues them, or fills in their masks."""

from __future__ import annotations

import torch

from headway.checkpoints.restore import as_decoder
from headway.errors import ConfigError
from headway.generate import GenerationConfig, Sampling, generate
from headway.text import Tokenizer
from headway.train.callbacks import Callback, CallbackContext
from headway.train.text_config import TextConfig


def filled_in(config: TextConfig, tokenizer: Tokenizer) -> Callback:
    """Each mask of the prompts becomes the token that the model finds most probable there.

    Raises ConfigError at once for a prompt that is too long, or has nothing to fill in."""
    mask = tokenizer.need("mask")
    prompts = [tokenizer.encode(text, special=True) for text in config.sample_prompts]
    for text, ids in zip(config.sample_prompts, prompts, strict=True):
        if mask not in ids or len(ids) > config.context:
            raise ConfigError(
                f"sample prompt {text!r} of {len(ids)} tokens must have a mask to fill in ({tokenizer.token(mask)}) "
                f"and fit context {config.context}"
            )

    def sample(context: CallbackContext) -> None:
        for text, ids in zip(config.sample_prompts, prompts, strict=True):
            row = torch.tensor([ids])
            best = context.model(row).argmax(-1)
            filled = torch.where(row == mask, best, row)[0].tolist()
            context.say(f"step {context.step}: {text} -> {tokenizer.decode(filled)}")

    return Callback(sample, every_steps=config.sample_every)


def continued(config: TextConfig, tokenizer: Tokenizer) -> Callback:
    """The prompts and what follows, greedily, so that what changes is the model.

    Raises ConfigError at once for a prompt that is too long."""
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

    def sample(context: CallbackContext) -> None:
        found = generate(as_decoder(context.model), prompts, settings, tokenizer=tokenizer)
        for text, continued in zip(config.sample_prompts, found, strict=True):
            context.say(f"step {context.step}: {text}|{continued.text}")

    return Callback(sample, every_steps=config.sample_every)
