"""Training on conversations: the model is trained on the assistant's answers only (Taori et al. 2023, Alpaca). Also the
common parts of all training on conversations: a tokenizer with a chat template, and the tokens that end an answer.

Legend: B rows of a batch, L slots.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from headway.data.chats import ChatRows, encode_examples
from headway.data.record_kinds import Chat as Conversation
from headway.data.record_kinds import Completion, Messages, Record
from headway.errors import ConfigError, DataError, did_you_mean
from headway.models import ModelSpec
from headway.text import Tokenizer
from headway.text.chat import ChatTemplate
from headway.train.config import setting
from headway.train.evaluation import BATCH_TOKENS, Evaluation, measured
from headway.train.microbatch_pool import ALONE, MicrobatchPool
from headway.train.rows_config import PackedConfig, RowsConfig
from headway.train.tasks.base import BYTES_PER_TOKEN, cut
from headway.train.tasks.records import Reading, RecordRows, RecordsTask


class ConversationConfig(RowsConfig):
    """Settings of how conversations are written as tokens.

    template: chat template: alpaca, vicuna, chatml, llama2, or a Jinja file; it is saved with the model
        [default: the model's own]
    stop: tokens that end an answer, besides the tokenizer's EOS [default: those of generation_config.json]
    """

    template: str | None = setting(None, group="Data")
    stop: tuple[str, ...] = setting((), group="Data")

    def missing(self, made_by: Callable[[Path], str] = lambda path: "") -> list[str]:
        """See `TrainConfig`; also reports an unknown template."""
        missing = super().missing(made_by)
        try:
            if self.template is not None:
                ChatTemplate.find(self.template)
        except DataError as error:
            missing.append(f"template {error}")
        return missing


def message_texts(messages: Messages) -> Iterator[str]:
    """Returns the texts of messages; function calls and content that is no plain string are left out."""
    return (m["content"] for m in messages if isinstance(m.get("content"), str))


class ConversationTask(RecordsTask):
    """Base class of tasks on conversations, which need a chat template and tokens that end an answer."""

    measured_by = (*RecordsTask.measured_by, "template", "stop")
    trains = "decoder"
    next_command = "headway chat {model}"
    config: ConversationConfig

    def reading(self, records: Sequence[Record], tokenizer: Tokenizer, spec: ModelSpec) -> Reading:
        """See `RecordsTask`: with the chat template of the settings, and the ids that end an answer, which are also
        written to the model's generation_config.json.

        Raises ConfigError for conversations without a chat template, and as `stop_ids`."""
        config, folder = self.config, self.inputs.folder
        if config.template is not None:
            tokenizer = tokenizer.with_chat_template(config.template)
        if tokenizer.chat_template is None and not all(isinstance(record, Completion) for record in records):
            raise ConfigError(
                f"{config.data} holds conversations, but the model has no chat template; give one (template=alpaca, "
                "vicuna, chatml, llama2 or a file)"
            )
        generation = {} if folder is None else folder.generation
        stop = stop_ids(tokenizer, config.stop, generation)
        ends = {"eos_token_id": stop[0] if len(stop) == 1 else stop}
        return Reading(tokenizer, spec, stop, {**generation, **ends})


class ChatConfig(ConversationConfig, PackedConfig):
    """Settings of training on conversations. The optimizer's defaults are those of Stanford Alpaca; a model from
    scratch needs a larger `lr`.

    data: conversations or completions: .jsonl or .json (or .gz of them)
    train_on: which answers of a conversation are trained; never those with weight 0
    too_long: what becomes of an example of more than `context` tokens: drop leaves it out, drop_turns keeps
        as many whole rounds from its beginning as fit, cut_left keeps its end; their number is reported
    pack: several examples side by side in a row; they do not see each other
    """

    usual: ClassVar = {
        "task": "chat",
        "out": "runs/chat",
        "batch_tokens": 16384,  # about 128 examples of Alpaca
        "lr": 2e-5,
        "warmup": 0.03,
        "lr_floor": 0.0,
        "weight_decay": 0.0,
        "beta2": 0.999,
    }

    train_on: Literal["all", "last"] = setting("all", group="Data")
    too_long: Literal["drop", "drop_turns", "cut_left", "error"] = setting("drop", group="Data")
    pack: bool = setting(True, group="Batch")


class AnswerRows(ChatRows, RecordRows):
    """Rows of conversations, packed side by side; the loss is a sum over the tokens of answers."""

    unit = "answer token"

    def __init__(self, records: Sequence[Any], config: ChatConfig, reading: Reading) -> None:
        examples = encode_examples(
            records,
            reading.tokenizer,
            stop=reading.stop,
            length=config.context,
            train_on=config.train_on,
            too_long=config.too_long,
        )
        super().__init__(examples, config.context, pack=config.pack)
        filled = f"{self.used / (len(self) * self.length):.1%} of their slots are filled"
        self.remarks = [*examples.report.lines(), f"{len(self)} rows, {filled}"]
        self.amount = {"training examples": len(examples), "training tokens": self.used}

    def evaluate(self, model: Any, pool: MicrobatchPool = ALONE) -> Evaluation:
        """See `RecordRows`; also the loss of each turn, if there are several."""
        size = max(1, BATCH_TOKENS // self.length // pool.count)

        def run(indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
            batch, turns = self.batch(indices), self.turns(indices).flatten()
            losses = model(**batch.inputs, targets=batch.targets).each.flatten().double()
            return turns.bincount(losses * (turns > 0), 256), turns.bincount(minlength=256)

        parts, seconds = measured(model, run, cut(range(len(self)), size), pool)
        sums, counts = (torch.stack(part).sum(0)[1:] for part in zip(*parts, strict=True))
        turns = [i for i, count in enumerate(counts.tolist()) if count]
        by_turn = {f"loss_turn_{i + 1}": float(sums[i] / counts[i]) for i in turns} if len(turns) > 1 else {}
        return Evaluation(float(sums.sum()), int(counts.sum()), 0, seconds, metrics=by_turn, unit=self.unit)


class Chat(ConversationTask):
    """Trains on the tokens of answers, up to the token that ends each. Losses are in nats per such token."""

    settings = ChatConfig
    by_token = True
    kinds = (Conversation, Completion)
    rows = AnswerRows
    measured_by = (*ConversationTask.measured_by, "train_on", "too_long")
    config: ChatConfig
    train_rows: AnswerRows

    def prepare(self, start: Path | None) -> None:
        super().prepare(start)
        digest = hashlib.blake2b(self.train_rows.examples.digest(), digest_size=8).hexdigest()
        self.data = {"examples": len(self.train_rows.examples), "digest": digest}

    def estimated(self, records: Sequence[Any]) -> tuple[dict[str, int], int]:
        tokens = max(2, int(sum(len(text.encode()) for text in self.texts(records)) / BYTES_PER_TOKEN))
        rows = -(-tokens // self.config.context) if self.config.pack else len(records)
        return {"training tokens": tokens}, rows

    @classmethod
    def texts(cls, records: Sequence[Any]) -> Iterator[str]:
        for record in records:
            if isinstance(record, Completion):
                yield from (record.prompt, record.completion)
            else:
                yield from message_texts(record.messages)


def stop_ids(tokenizer: Tokenizer, names: Collection[str], generation: Mapping[str, Any]) -> list[int]:
    """Returns the ids that end an answer: the tokens `names`, or else those of generation_config.json; and EOS.

    Raises ConfigError for a name that is no control token, DataError if there is no such id at all."""
    controls = {tokenizer.token(i): i for i in tokenizer.special_ids}
    if unknown := [name for name in names if name not in controls]:
        raise ConfigError(
            f"stop {unknown[0]!r} is not a control token of the tokenizer{did_you_mean(unknown[0], controls)}; there "
            f"are {', '.join(sorted(controls)[:20])}"
        )
    eos = generation.get("eos_token_id")
    default_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    ids = [controls[name] for name in names] if names else default_ids
    ids = [*dict.fromkeys([*ids, *([] if tokenizer.eos is None else [tokenizer.eos])])]
    if not ids:
        raise DataError(
            "neither the tokenizer nor generation_config.json has a token that ends an answer; name it (stop=TOKEN)"
        )
    return ids
