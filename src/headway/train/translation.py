"""Training of a translator: the Transformer of 2017 on pairs of sentences (Vaswani et al. 2017, section 5).

    result = train_translation(TranslationConfig(source="train.en", target="train.de", out="runs/en-de"))

Legend: B pairs of a batch, T target slots, V vocab.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.checkpoints.files import atomic_write
from headway.checkpoints.folder import save_folder
from headway.errors import ConfigError
from headway.models import EncoderDecoder, Head, ModelSpec, build
from headway.patterns import Full
from headway.text import Tokenizer
from headway.train.hooks import StopRequest
from headway.train.loss import IGNORED
from headway.train.metrics import CURVE, METRICS, MetricsLog, draw_curve, read_metrics
from headway.train.pairs import END, START, Batch, Pairs, batches, encode_pairs, joint_tokenizer, read_pairs
from headway.train.precision import DTYPES, Twin, choose_precision
from headway.train.progress import Reporter, clock
from headway.train.step import TrainingError
from headway.train.translation_config import TranslationConfig


@dataclass(frozen=True)
class TranslationResult:
    """What a run left behind: `model` is a folder that `headway translate` reads; losses in nats per target token,
    end of sentence included, without smoothing."""

    model: Path
    metrics: Path
    curve: Path
    steps: int
    seconds: float
    loss: float
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


def train_translation(config: TranslationConfig, *, quiet: bool = False) -> TranslationResult:
    """Train as `config` says; `config.out`/final is the model's folder.

    Equal settings, threads and torch give equal weights (not with `max_seconds`, which ends by the clock). A run
    begins anew: it cannot be resumed. Ctrl-C ends it after its step, and what was learned is saved.
    Raises DataError, ConfigError before anything is trained; TrainingError for a loss that is not finite.
    """
    out = Path(config.out)
    if (out / METRICS).exists():
        raise ConfigError(f"{out} holds a run already; give another out, or remove it")
    precision = choose_precision(config.dtype)
    texts = read_pairs(config.source, config.target)
    tokenizer = joint_tokenizer(chain(*texts), config.vocab)
    train = encode_pairs(tokenizer, *texts, config.context)
    held: Pairs | None = None
    if config.validation_source is not None and config.validation_target is not None:
        lines = read_pairs(config.validation_source, config.validation_target)
        held = encode_pairs(tokenizer, *lines, config.context)
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    try:
        torch.manual_seed(config.seed)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        model = build(translation_spec(config, tokenizer.vocab_size), seed=config.seed)
        assert isinstance(model, EncoderDecoder)
        out.mkdir(parents=True, exist_ok=True)
        atomic_write(out / "config.yaml", config.yaml())
        return _Run(config, model, DTYPES[precision.what], tokenizer, train, held, quiet).run(str(precision))
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(generator)


class _Run:
    """A run in progress."""

    def __init__(
        self,
        config: TranslationConfig,
        model: EncoderDecoder,
        dtype: torch.dtype,
        tokenizer: Tokenizer,
        train: Pairs,
        held: Pairs | None,
        quiet: bool,
    ) -> None:
        self.config, self.model, self.tokenizer, self.train, self.held = config, model, tokenizer, train, held
        self.out = Path(config.out)
        self.twin = Twin(cast(Any, model), dtype)
        self.compute = cast(EncoderDecoder, self.twin.compute)
        self.optimizer = torch.optim.Adam(
            model.parameters(), betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
        self.report = Reporter(config.steps, config.log_every, quiet=quiet)

    def run(self, precision: str) -> TranslationResult:
        config, begun, step, loss = self.config, time.perf_counter(), 0, math.nan
        spec = self.model.spec
        self.report.note(f"{len(self.train.sources)} pairs, {spec.parameter_count} parameters, {precision}")
        log, held = MetricsLog(self.out / METRICS), None
        self.compute.train()
        try:
            with StopRequest(self.report.note) as stop:
                for step, rows in zip(range(1, config.steps + 1), self._rows(), strict=False):
                    at = time.perf_counter()
                    loss, tokens, norm = self._step(step, rows)
                    now = time.perf_counter()
                    last = (
                        step == config.steps or stop.asked or now - begun >= (config.max_seconds or math.inf)
                    )
                    record = {
                        "step": step,
                        "loss": loss,
                        "bits_per_byte": None,
                        "grad_norm": norm,
                        "lr": self.optimizer.param_groups[0]["lr"],
                        "seconds": now - begun,
                        "tokens_per_s": tokens / (now - at),
                        "eta_s": self._left(step, now - begun),
                    }
                    if self.held and (last or step % (config.eval_every or config.steps) == 0):
                        held = record["val_loss"] = self.evaluate(self.held)
                        self.report.note(f"step {step}  held-out loss {held:.3f} nats per token")
                    log.write(record)
                    self.report.step(record)
                    if last:
                        break
        finally:
            log.close()
            self.report.close()
        seconds = time.perf_counter() - begun
        final = self.out / "final"
        generation = {"decoder_start_token_id": START, "eos_token_id": END}
        save_folder(final, self.model.eval(), tokenizer=self.tokenizer, generation=generation)
        title = f"{spec.parameter_count:,} parameters, {len(self.train.sources):,} pairs"
        draw_curve(read_metrics(self.out / METRICS), self.out / CURVE, title)
        self.report.note(f"{final}: {step} steps in {clock(seconds)}")
        return TranslationResult(final, self.out / METRICS, self.out / CURVE, step, seconds, loss, held)

    def _rows(self) -> Iterator[list[int]]:
        for epoch in count():
            yield from batches(self.train, self.config.batch_tokens, self.config.seed, epoch)

    def _left(self, step: int, seconds: float) -> float:
        by_steps = seconds / step * (self.config.steps - step)
        return min(by_steps, max(0.0, (self.config.max_seconds or math.inf) - seconds))

    def _step(self, step: int, rows: Sequence[int]) -> tuple[float, int, float]:
        """Nats per token before the step, tokens, and the norm of the gradient."""
        config, batch = self.config, self.train.batch(rows)
        tokens = int((batch.targets != IGNORED).sum())
        total, nats = smoothed(self._logits(batch), batch.targets, config.label_smoothing)
        self.twin.add(self.twin.gradients(total / tokens))
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), config.clip))
        if not (math.isfinite(float(nats)) and math.isfinite(norm)):
            raise TrainingError(
                f"step {step}: the loss or its gradient is not finite (loss sum {float(nats)}, gradient norm {norm}); "
                "no step was made. Lower lr_scale, or raise warmup"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr_scale * inverse_sqrt(step, config.width, config.warmup)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.twin.refresh()
        return float(nats) / tokens, tokens, norm

    def _logits(self, batch: Batch) -> Tensor:
        logits: Tensor = self.compute(
            batch.source, batch.ids, source_tokens=batch.source_tokens, tokens=batch.tokens
        )
        return logits

    @torch.no_grad()
    def evaluate(self, pairs: Pairs) -> float:
        """Nats per target token, without dropout and smoothing."""
        self.compute.eval()
        total, tokens = 0.0, 0
        for rows in batches(pairs, self.config.batch_tokens, 0, 0):
            batch = pairs.batch(rows)
            total += float(smoothed(self._logits(batch), batch.targets, 0.0)[0])
            tokens += int((batch.targets != IGNORED).sum())
        self.compute.train()
        return total / tokens
