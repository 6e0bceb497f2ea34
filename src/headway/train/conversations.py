"""What training on conversations begins with: a tokenizer with a chat template, and the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from headway.data.record_kinds import Completion, Messages, Record
from headway.errors import ConfigError, DataError, did_you_mean
from headway.models import ModelSpec
from headway.text import Tokenizer
from headway.text.chat import ChatTemplate
from headway.train.config import setting
from headway.train.inputs import model_folder
from headway.train.rows_config import RowsConfig
from headway.train.tasks.records import Reading, RecordsTask
from headway.train.tasks.rows import MEASURED_BY


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


class ConversationTask(RecordsTask):
    """Records of conversations: a tokenizer with a chat template, and tokens that end an answer."""

    measured_by: ClassVar[tuple[str, ...]] = (*MEASURED_BY, "template", "stop")
    next_command = "headway chat {model}"

    @classmethod
    def unsupported(cls, spec: ModelSpec) -> str | None:
        if spec.encoder is not None or not spec.causal:
            return f"{spec.family} is no decoder, which alone answers in turns"
        return None

    @classmethod
    def reading(
        cls,
        config: ConversationConfig,
        records: Sequence[Record],
        tokenizer: Tokenizer,
        spec: ModelSpec,
        generation: Mapping[str, Any] | None = None,
    ) -> Reading:
        """See `RecordsTask`: the tokenizer with the chat template of the settings, and ids that end an answer, which
        the model's generation_config.json will have.

        Raises ConfigError for conversations without a chat template, and as `stop_ids` does."""
        if config.template is not None:
            tokenizer = tokenizer.with_chat_template(config.template)
        if tokenizer.chat_template is None and not all(isinstance(record, Completion) for record in records):
            raise ConfigError(
                f"{config.data} holds conversations, and the model has no chat template; give one (template=alpaca, "
                "vicuna, chatml, llama2 or a file)"
            )
        if generation is None:
            folder = model_folder(config)
            generation = {} if folder is None else folder.generation
        stop = stop_ids(tokenizer, config.stop, generation)
        return Reading(
            tokenizer, spec, stop, {**generation, "eos_token_id": stop[0] if len(stop) == 1 else stop}
        )


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
