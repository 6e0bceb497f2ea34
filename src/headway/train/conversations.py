"""What training on conversations begins with: a tokenizer with a chat template, and the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.checkpoints.folder import load_folder
from headway.data.record_kinds import Messages
from headway.errors import ConfigError, DataError, did_you_mean
from headway.text import Tokenizer
from headway.text.chat import ChatTemplate
from headway.train.config import setting
from headway.train.rows_config import RowsConfig


class ConversationConfig(RowsConfig):
    """Settings of how a conversation is written."""

    template: str | None = setting(
        None,
        "chat template: alpaca, vicuna, chatml, llama2, or a Jinja file; it is saved with the model [default: the "
        "model's own]",
        group="Data",
    )
    stop: tuple[str, ...] = setting(
        (),
        "tokens that end an answer, besides the tokenizer's EOS [default: those of generation_config.json]",
        group="Data",
    )

    def missing(self) -> list[str]:
        """See `TrainConfig`; and a template that is not there."""
        missing = super().missing()
        try:
            if self.template is not None:
                ChatTemplate.find(self.template)
        except DataError as error:
            missing.append(f"template {error}")
        return missing


def message_texts(messages: Messages) -> Iterator[str]:
    """What is said in messages; calls of functions, and parts of other kinds, have none."""
    return (m["content"] for m in messages if isinstance(m.get("content"), str))


def conversation_tokenizer(
    config: ConversationConfig,
    tokenizer: Tokenizer,
    *,
    has_chats: bool = True,
    generation: Mapping[str, Any] | None = None,
) -> tuple[Tokenizer, list[int], dict[str, Any]]:
    """The tokenizer with the chat template of the settings, ids that end an answer, and the trained model's
    generation_config.json. `generation` is the content of the model's own; that of its folder unless given.

    Raises ConfigError for conversations (`has_chats`) without a chat template, and as `stop_ids` does."""
    if config.template is not None:
        tokenizer = tokenizer.with_chat_template(config.template)
    if tokenizer.chat_template is None and has_chats:
        raise ConfigError(
            f"{config.data} holds conversations, and the model has no chat template; give one (template=alpaca, "
            "vicuna, chatml, llama2 or a file)"
        )
    own = _generation(config.model) if generation is None else generation
    stop = stop_ids(tokenizer, config.stop, own)
    return tokenizer, stop, {**own, "eos_token_id": stop[0] if len(stop) == 1 else stop}


def stop_ids(tokenizer: Tokenizer, names: Collection[str], generation: Mapping[str, Any]) -> list[int]:
    """Ids that end an answer: the tokens `names`, or those of generation_config.json; and EOS.

    Raises ConfigError for a name that is no control token, DataError where there is none at all."""
    controls = {tokenizer.token(i): i for i in tokenizer.special_ids}
    if unknown := [name for name in names if name not in controls]:
        raise ConfigError(
            f"stop {unknown[0]!r} is no control token of the tokenizer{did_you_mean(unknown[0], controls)}; there are "
            f"{', '.join(sorted(controls)[:20])}"
        )
    given = generation.get("eos_token_id")
    own = given if isinstance(given, list) else [] if given is None else [given]
    found = [controls[name] for name in names] if names else own
    found = [*dict.fromkeys([*found, *([] if tokenizer.eos is None else [tokenizer.eos])])]
    if not found:
        raise DataError(
            "neither the tokenizer nor generation_config.json has a token that ends an answer; name it (stop=TOKEN)"
        )
    return found


def _generation(model: str | None) -> Mapping[str, Any]:
    """The content of the folder's generation_config.json."""
    return {} if model is None or not Path(model).is_dir() else load_folder(model).generation
