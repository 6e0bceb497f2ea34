"""Continuations of fixed prompts while a model learns."""

from __future__ import annotations

from headway.errors import ConfigError
from headway.generate import Sampling, Settings, generate
from headway.text import Tokenizer
from headway.train.config import TrainConfig
from headway.train.hooks import Every, Moment


def prompt_sampler(config: TrainConfig, tokenizer: Tokenizer) -> Every | None:
    """The callback that `sample_prompts` ask for: greedy, so that what changes is the model. None without prompts.

    Raises ConfigError at once for a prompt that does not leave room for `sample_tokens` in the context."""
    if not config.sample_prompts:
        return None
    prompts = [tokenizer.encode(text, eos=False) for text in config.sample_prompts]
    for text, ids in zip(config.sample_prompts, prompts, strict=True):
        if not ids or len(ids) + config.sample_tokens > config.context:
            raise ConfigError(
                f"sample prompt {text!r} of {len(ids)} tokens and sample_tokens {config.sample_tokens} do not fit "
                f"context {config.context} (at least one token is needed); shorten one of them"
            )
    eos = () if tokenizer.eos is None else (tokenizer.eos,)
    settings = Settings(max_new_tokens=config.sample_tokens, sampling=Sampling(temperature=0.0), eos=eos)

    def sample(moment: Moment) -> None:
        found = generate(moment.model, prompts, settings, tokenizer=tokenizer)
        for text, continued in zip(config.sample_prompts, found, strict=True):
            moment.say(f"step {moment.step}: {text}|{continued.text}")

    return Every(sample, steps=config.sample_every)
