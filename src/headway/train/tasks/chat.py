"""Answers of conversations: a model is trained on what it is to say, and on nothing else (Taori et al. 2023, Alpaca).

Legend: B rows of a batch, L slots.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from headway.data.bins import ChatRows
from headway.data.chats import encode_examples
from headway.data.record_kinds import Chat as Conversation
from headway.data.record_kinds import Completion, Record
from headway.models import Decoder, Encoder, ModelSpec
from headway.text import Tokenizer
from headway.train.config import setting
from headway.train.conversations import ConversationConfig, conversation_tokenizer, message_texts
from headway.train.evaluation import Evaluation
from headway.train.inputs import find_tokenizer, first_model, model_spec
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.plan import BYTES_PER_TOKEN
from headway.train.records import measured_records, split
from headway.train.rows_config import PackedConfig
from headway.train.tasks.base import Subject
from headway.train.tasks.rows import MEASURED_BY, Amount, RowsTask

EVALUATION_TOKENS = 8192  # slots of one forward pass
KINDS: tuple[type[Record], ...] = (Conversation, Completion)


class ChatConfig(ConversationConfig, PackedConfig):
    """Settings of training on conversations. The optimizer's are those of Stanford Alpaca; a model from scratch needs a
    larger `lr`."""

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
    about: ClassVar = {"data": "conversations or completions: .jsonl or .json (or .gz of them)"}

    train_on: Literal["all", "last"] = setting(
        "all", "which answers of a conversation are trained; none with weight 0", group="Data"
    )
    too_long: Literal["drop", "drop_turns", "cut_left", "error"] = setting(
        "drop",
        "what becomes of an example of more than `context` tokens: drop leaves it out, drop_turns keeps as many whole "
        "rounds from its beginning as fit, cut_left keeps its end; how many there are is said",
        group="Data",
    )
    pack: bool = setting(
        True, "several examples side by side in a row; they do not see each other", group="Batch"
    )


class Chat(RowsTask):
    """The tokens of answers, each up to the token that ends it. Losses are in nats per such token."""

    settings = ChatConfig
    by_token = True
    measured_by = (*MEASURED_BY, "template", "stop", "train_on", "too_long")
    next_command = "headway chat {model}"
    config: ChatConfig
    train_rows: ChatRows

    def __init__(self, config: ChatConfig, folder: Path, start: Path | None, dtype: torch.dtype) -> None:
        self.config = config
        train, held, said = split(config, KINDS, KINDS)
        tokenizer = find_tokenizer(config, folder, start, lambda: _texts(train), masked=False)
        has_chats = any(isinstance(record, Conversation) for record in train)
        tokenizer, stop, self.generation = conversation_tokenizer(config, tokenizer, has_chats=has_chats)

        def rows(records: Sequence[Any], what: str) -> ChatRows:
            found = chat_rows(records, config, tokenizer, stop)
            examples = found.examples
            filled = f"{len(found)} rows, {found.used / (len(found) * config.context):.1%} of their slots are filled"
            said.extend(f"{what}: {line}" for line in (*examples.report.lines(), filled))
            return found

        train_rows = rows(train, "training")
        self.held_rows = None if held is None else rows(held, "held out")
        self.begin(first_model(config, tokenizer.vocab_size), tokenizer, train_rows, dtype)
        digest = hashlib.blake2b(train_rows.examples.digest(), digest_size=8).hexdigest()
        self.data = {"examples": len(train_rows.examples), "digest": digest}
        self.remarks, self.unit = said, "answer token"

    @classmethod
    def amount(cls, config: ChatConfig, tokenizer: Tokenizer | None) -> Amount:
        """See `RowsTask`: exact where there is a tokenizer."""
        spec = model_spec(config, None if tokenizer is None else tokenizer.vocab_size)
        train, _, _ = split(config, KINDS, KINDS)
        data = {"training examples": len(train)}
        if tokenizer is None:
            size = sum(len(text.encode()) for text in _texts(train))
            tokens = max(2, int(size / BYTES_PER_TOKEN))
            rows = -(-tokens // config.context) if config.pack else len(train)
            return Amount(spec, data | {"training tokens": tokens}, False, rows)
        has_chats = any(isinstance(record, Conversation) for record in train)
        tokenizer, stop, _ = conversation_tokenizer(config, tokenizer, has_chats=has_chats)
        found = chat_rows(train, config, tokenizer, stop)
        data = {"training examples": len(found.examples), "training tokens": found.used}
        return Amount(spec, data, True, len(found))

    @classmethod
    def unsupported(cls, spec: ModelSpec) -> str | None:
        if spec.encoder is not None or not spec.causal:
            return f"{spec.family} is no decoder, which alone answers in turns"
        return None

    def evaluate(self, model: Decoder | Encoder, pool: MicrobatchPool, *, whole: bool) -> Evaluation | None:
        """See `Objective`: the answers of all held-out examples; by turn, where there are several."""
        return None if self.held_rows is None else evaluate_answers(model, self.held_rows, pool)

    @classmethod
    def measure(
        cls, config: ChatConfig, subject: Subject, pool: MicrobatchPool, limit: int | None = None
    ) -> tuple[Evaluation, Sequence[str]]:
        """See `Task`."""
        records, said = measured_records(config, KINDS, limit)
        has_chats = any(isinstance(record, Conversation) for record in records)
        tokenizer, stop, _ = conversation_tokenizer(
            config, subject.tokenizer, has_chats=has_chats, generation=subject.generation
        )
        rows = chat_rows(records, config, tokenizer, stop)
        return evaluate_answers(subject.model, rows, pool), [*said, *rows.examples.report.lines()]


def chat_rows(
    records: Sequence[Any], config: ChatConfig, tokenizer: Tokenizer, stop: Collection[int]
) -> ChatRows:
    """The examples of records, in rows as the settings say."""
    how: dict[str, Any] = {"train_on": config.train_on, "too_long": config.too_long}
    examples = encode_examples(records, tokenizer, stop=stop, length=config.context, **how)
    return ChatRows.of(examples, config.context, pack=config.pack)


def evaluate_answers(
    model: Decoder | Encoder, rows: ChatRows, pool: MicrobatchPool | None = None
) -> Evaluation:
    """Loss of a model on the trained tokens of rows, in evaluation mode; `pool` computes batches at the same time."""
    pool = pool or MicrobatchPool(1)
    size = max(1, EVALUATION_TOKENS // rows.length // pool.count)

    @torch.no_grad()
    def run(begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        indices = range(begin, min(begin + size, len(rows)))
        batch, turns = rows.batch(indices), rows.turns(indices).flatten()
        each = model(**batch.inputs, targets=batch.targets).each.flatten().double()
        return turns.bincount(each * (turns > 0), 256), turns.bincount(minlength=256)

    training = model.training
    model.eval()
    begin = time.perf_counter()
    try:
        parts = list(pool.map(run, range(0, len(rows), size)))
    finally:
        model.train(training)
    sums, counts = (torch.stack(part).sum(0)[1:] for part in zip(*parts, strict=True))
    turns = [i for i, count in enumerate(counts.tolist()) if count]
    by_turn = {f"loss_turn_{i + 1}": float(sums[i] / counts[i]) for i in turns} if len(turns) > 1 else {}
    seconds = time.perf_counter() - begin
    return Evaluation(float(sums.sum()), int(counts.sum()), 0, seconds, metrics=by_turn, unit="answer token")


def _texts(records: Sequence[Any]) -> Iterator[str]:
    """All text of the records, for a tokenizer that is to be trained."""
    for record in records:
        if isinstance(record, Completion):
            yield from (record.prompt, record.completion)
        else:
            yield from message_texts(record.messages)
