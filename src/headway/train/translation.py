"""Training of a translator: the Transformer of 2017 on pairs of sentences (Vaswani et al. 2017, section 5).

    result = train_translation(TranslationConfig(source="train.en", target="train.de", out="runs/en-de"))
    result = train_translation(config, resume="auto")          # goes on; bit for bit the run that was never stopped

Legend: B pairs of a batch, T target slots, V vocab.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.checkpoints.folder import save_folder
from headway.models import EncoderDecoder, Head, ModelSpec, build, cost
from headway.patterns import Full
from headway.text import Tokenizer
from headway.train.loss import IGNORED
from headway.train.master_weights import DTYPES, choose_precision
from headway.train.metrics import CURVE, METRICS, draw_curve, read_metrics
from headway.train.optimizer import Optimizer
from headway.train.pairs import END, START, Batch, Pairs, batches, encode_pairs, joint_tokenizer, read_pairs
from headway.train.progress import clock
from headway.train.run import FINAL, Run, seeded
from headway.train.state import Machine, where_to_begin
from headway.train.step import TrainingError
from headway.train.translation_config import TranslationConfig


@dataclass(frozen=True)
class TranslationResult:
    """What a run left behind: `model` is a folder that `headway translate` reads; losses of the last step and of
    held-out pairs, in nats per target token, end of sentence included, without smoothing."""

    model: Path
    metrics: Path
    curve: Path
    steps: int
    seconds: float
    loss: float | None
    validation_loss: float | None


def inverse_sqrt(step: int, width: int, warmup: int) -> float:
    """The learning rate of Vaswani et al. 2017, section 5.3, at `step` = 1, 2, ...:

    width^-0.5 min(step^-0.5, step warmup^-1.5)
    """
    return float(width**-0.5 * min(step**-0.5, step * warmup**-1.5))


def smoothed(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Sums over targets [B, T] that are not IGNORED of what is minimised, and of -log p(target):

        (1 - e) -log p(target) + e mean over V of -log p        (Vaswani et al. 2017, section 5.4)

    Logits [B, T, V]; the softmax is in float32.
    """
    flat, wanted = logits.float().flatten(0, 1), targets.flatten()
    loss = F.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
    if smoothing == 0:
        return loss, loss.detach()
    with torch.no_grad():
        nats = F.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="sum")
    return loss, nats


def translation_spec(config: TranslationConfig, vocab: int) -> ModelSpec:
    """The Transformer of 2017 at the sizes of `config`; one matrix is both embeddings and output layer (3.4)."""
    size = {
        "vocab": vocab,
        "width": config.width,
        "layers": config.layers,
        "heads": config.heads,
        "hidden": config.hidden,
        "dropout": config.dropout,
        "trained_context": config.context,
        "order": config.order,
        "final_norm": config.order == "pre",
        "embedding_scale": config.width**0.5,
        "init_std": config.width**-0.5,
    }
    encoder = ModelSpec.of("transformer", **size, causal=False, patterns=Full(), head=Head("states"))
    return ModelSpec.of("transformer", **size, encoder=encoder, tied=True, shared_embedding=True)


def train_translation(
    config: TranslationConfig, *, resume: str = "never", quiet: bool = False
) -> TranslationResult:
    """Train as `config` says; `config.out`/final is the model's folder.

    Equal settings, threads and torch give equal weights, of a resumed run too: `resume` is as in `headway.train.train`.
    The schedule knows of no end, so that a run that `steps` or `max_seconds` ended goes on as if it had been longer.
    Raises DataError, ConfigError, CheckpointError before anything is trained; TrainingError for a loss that is not
    finite; Interrupted after Ctrl-C or SIGTERM, when the running step is done and saved.
    """
    start = where_to_begin(config, resume)
    precision = choose_precision(config.dtype)
    texts = read_pairs(config.source, config.target)
    tokenizer = joint_tokenizer(chain(*texts), config.vocab) if start is None else Tokenizer.load(start)
    train = encode_pairs(tokenizer, *texts, config.context)
    held: Pairs | None = None
    if config.validation_source is not None and config.validation_target is not None:
        lines = read_pairs(config.validation_source, config.validation_target)
        held = encode_pairs(tokenizer, *lines, config.context)
    with seeded(config.seed, config.threads):
        run = _Translation(config, DTYPES[precision.what], tokenizer, train, held, quiet)
        run.say(f"{len(train.sources)} pairs, {cost.parameter_count(run.model.spec)} parameters, {precision}")
        return run.go(start)


class _Translation(Run[EncoderDecoder, TranslationResult]):
    def __init__(
        self,
        config: TranslationConfig,
        dtype: torch.dtype,
        tokenizer: Tokenizer,
        train: Pairs,
        held: Pairs | None,
        quiet: bool,
    ) -> None:
        model = build(translation_spec(config, tokenizer.vocab_size), dtype=torch.float32, seed=config.seed)
        assert isinstance(model, EncoderDecoder)
        adam = torch.optim.Adam(
            model.parameters(), betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
        super().__init__(
            config,
            model,
            Optimizer(dict(model.named_parameters()), [(config.lr_scale, adam)]),
            dtype=dtype,
            machine=Machine(torch.get_num_threads()),
            tokenizer=tokenizer,
            data=train.described(),
            steps=config.steps,
            generation={"decoder_start_token_id": START, "eos_token_id": END},
            quiet=quiet,
        )
        self.config, self.train, self.held = config, train, held
        self.held_loss: float | None = None
        self._epoch = 0, self._batches(0)

    def step(self) -> dict[str, Any]:
        """See `Run`."""
        config, progress, begin = self.config, self.state.progress, time.monotonic()
        number, batch = progress.step + 1, self.train.batch(self._rows(progress.step))
        tokens = int((batch.targets != IGNORED).sum())
        total, nats = smoothed(self._logits(batch), batch.targets, config.label_smoothing)
        self.twin.add(self.twin.gradients(total / tokens))
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), config.clip))
        if not (math.isfinite(float(nats)) and math.isfinite(norm)):
            raise TrainingError(
                f"step {number}: the loss or its gradient is not finite (loss sum {float(nats)}, gradient norm "
                f"{norm}); no step was made. The last checkpoint is whole, but a resumed run comes here again: begin "
                "anew with a lower lr_scale, or a longer warmup"
            )
        factor = inverse_sqrt(number, config.width, config.warmup)
        self.state.optimizer.step(factor)
        self.twin.refresh()
        progress.step = number
        progress.trained_tokens += tokens
        seconds = time.monotonic() - begin
        return {
            "step": number,
            "epoch": number / len(self._epoch[1]),
            "loss": float(nats) / tokens,
            "tokens": tokens,
            "trained_tokens": progress.trained_tokens,
            "tokens_per_s": tokens / seconds,
            "lr": config.lr_scale * factor,
            "grad_norm": norm,
            "seconds": self.elapsed,
            "eta_s": self.eta(seconds),
        }

    @torch.no_grad()
    def measure(self, *, last: bool) -> None:
        """See `Run`: nats per target token, without dropout and smoothing."""
        if self.held is None:
            return
        self.twin.compute.eval()
        total, tokens = 0.0, 0
        for rows in batches(self.held, self.config.batch_tokens, 0, 0):
            batch = self.held.batch(rows)
            total += float(smoothed(self._logits(batch), batch.targets, 0.0)[0])
            tokens += int((batch.targets != IGNORED).sum())
        self.twin.compute.train()
        number, self.held_loss = self.state.progress.step, total / tokens
        self.say(f"held out, step {number}: {self.held_loss:.3f} nats per token")
        self.log.write({"step": number, "val_loss": self.held_loss})

    def result(self, record: dict[str, Any]) -> TranslationResult:
        """See `Run`."""
        final, metrics, curve = self.out / FINAL, self.out / METRICS, self.out / CURVE
        save_folder(final, self.model, tokenizer=self.tokenizer, generation=self.generation)
        title = f"{cost.parameter_count(self.model.spec):,} parameters, {len(self.train.sources):,} pairs"
        draw_curve(read_metrics(metrics), curve, title)
        progress = self.state.progress
        self.say(f"{final}: {progress.step} steps in {clock(progress.seconds)}")
        return TranslationResult(
            final, metrics, curve, progress.step, progress.seconds, record.get("loss"), self.held_loss
        )

    def _rows(self, step: int) -> list[int]:
        """The pairs that step `step` (from 0) reads."""
        epoch, index = divmod(step, len(self._epoch[1]))
        if epoch != self._epoch[0]:
            self._epoch = epoch, self._batches(epoch)
        return self._epoch[1][index]

    def _batches(self, epoch: int) -> list[list[int]]:
        return batches(self.train, self.config.batch_tokens, self.config.seed, epoch)

    def _logits(self, batch: Batch) -> Tensor:
        logits: Tensor = self.twin.compute(
            batch.source, batch.ids, source_tokens=batch.source_tokens, tokens=batch.tokens
        )
        return logits
