"""The training loop.

result = train(TrainConfig(data="text/", out="runs/mine", steps=1000))
result = train(config, resume="auto")          # goes on; bit for bit the run that was never stopped
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headway.checkpoints.folder import save_folder
from headway.hardware import gemm_peak, peak_rss
from headway.models import cost
from headway.report import cell
from headway.train.callbacks import CallbackContext, PeriodicCallback, TrainResult
from headway.train.config import TrainConfig
from headway.train.evaluation import Evaluation, evaluate
from headway.train.inputs import Inputs, first_model, prepare
from headway.train.master_weights import DTYPES, choose_precision
from headway.train.metrics import CURVE, METRICS, draw_curve, read_metrics
from headway.train.microbatch_pool import MicrobatchPool, choose_workers
from headway.train.objective import Trained
from headway.train.optimizer import Optimizer, parameter_groups
from headway.train.plan import Plan
from headway.train.progress import clock
from headway.train.run import FINAL, Run, seeded
from headway.train.sampling import prompt_sampler
from headway.train.schedule import learning_rate
from headway.train.state import Machine, describe, where_to_begin
from headway.train.step import StepStats, compute_window


def train(
    config: TrainConfig,
    *,
    resume: str = "never",
    callbacks: Sequence[PeriodicCallback] = (),
    quiet: bool = False,
) -> TrainResult:
    """Train as `config` says, in the folder `config.out`.

    Args:
        config: the settings; they are saved as config.yaml in the folder.
        resume: "never" (the folder must hold no run), "auto" (go on from its last checkpoint, or begin), or the
            path of a checkpoint. A resumed run ends with the very bits of one that was never stopped, at equal
            settings, threads and torch; not with `max_seconds`, where the clock drives the schedule.
        callbacks: called between steps, e.g. to sample text.
        quiet: no progress on stderr.

    Raises:
        ConfigError, DataError, CheckpointError: before anything is trained. TrainingError: a loss or gradient that
        is not finite. Interrupted: Ctrl-C or SIGTERM, after the running step was finished and saved.
    """
    out = Path(config.out)
    start = where_to_begin(config, resume)
    precision = choose_precision(config.dtype)
    with seeded(config.seed, config.threads):
        if start is None:
            for left in ("data", "tokenizer"):  # of a run that never came to its first checkpoint
                shutil.rmtree(out / left, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        run = _TextRun(config, prepare(config, out, start), DTYPES[precision.what], callbacks, quiet)
        run.say(f"{precision.what}: {precision.why}")
        return run.go(start)


class _TextRun(Run[Trained, TrainResult]):
    def __init__(
        self,
        config: TrainConfig,
        inputs: Inputs,
        dtype: torch.dtype,
        callbacks: Sequence[PeriodicCallback],
        quiet: bool,
    ) -> None:
        self.config, self.inputs = config, inputs
        self.objective = inputs.objective
        self.rows = self.objective.examples(inputs.train, config.context, 0)
        model = first_model(config, inputs.tokenizer.vocab_size)
        inputs.tokenizer.require_fits(model.spec.vocab)
        model.gradient_checkpointing = config.gradient_checkpointing
        threads, passes = torch.get_num_threads(), -(-config.rows_per_step // (config.micro_batch or 1))
        side_by_side = choose_workers(
            config.workers, threads=threads, micro_batches=passes, spec=model.spec, dtype=dtype
        )
        workers = MicrobatchPool(int(side_by_side.what))
        self.plan = Plan.of(config, len(self.rows), workers.count)
        super().__init__(
            config,
            model,
            Optimizer.of(parameter_groups(model), config, workers),
            dtype=dtype,
            machine=Machine(threads, workers.count, self.plan.micro_batch),
            tokenizer=inputs.tokenizer,
            data=describe(inputs.train),
            steps=self.plan.steps,
            workers=workers,
            quiet=quiet,
        )
        sampler = prompt_sampler(config, inputs.tokenizer, model.spec)
        self.callbacks = [*([sampler] if sampler else []), *callbacks]
        self._called: dict[int, float] = {}
        self.validation: Evaluation | None = None
        self.flops, self.peak = cost.train_flops(model.spec, config.context), gemm_peak(dtype)
        self.bytes_per_token = inputs.train.text_bytes / max(1, len(inputs.train) - inputs.train.documents)

    def _share(self) -> float:
        """The share of the run that is done when the present step ends."""
        if self.plan.steps is not None:
            return (self.state.progress.step + 1) / self.plan.steps
        assert self.config.max_seconds is not None
        return self.elapsed / self.config.max_seconds

    def step(self) -> dict[str, Any]:
        """See `Run`."""
        progress, config = self.state.progress, self.config
        begin = time.monotonic()
        window = compute_window(
            self.twin,
            self.objective.redrawn(self.rows, progress.step),
            self.plan.micro_batches(progress.step),
            clip=config.clip,
            step=progress.step + 1,
            workers=self.workers,
        )
        factor = learning_rate(self._share(), warmup=config.warmup, floor=config.lr_floor)
        if window.tokens:
            self.state.optimizer.step(factor)
            self.twin.refresh()
        progress.step += 1
        progress.trained_tokens += window.tokens
        return self._record(window, factor, time.monotonic() - begin)

    def _record(self, window: StepStats, factor: float, seconds: float) -> dict[str, Any]:
        progress = self.state.progress
        rate = window.read / seconds
        measured: dict[str, float | None] = {"accuracy": window.accuracy}
        if self.objective.says_text:
            known = window.loss is not None and self.bytes_per_token
            bits = (window.loss or 0.0) / math.log(2) / self.bytes_per_token if known else None
            measured = {"bits_per_byte": bits}
        return {
            "step": progress.step,
            "epoch": self.plan.epoch(progress.step),
            "loss": window.loss,
            **measured,
            "tokens": window.tokens,
            "trained_tokens": progress.trained_tokens,
            "tokens_per_s": rate,
            "lr": self.config.lr * factor,
            "grad_norm": window.grad_norm,
            "peak_memory_bytes": peak_rss(),
            "share_of_gemm_peak": rate * self.flops / self.peak,
            "seconds": self.elapsed,
            "eta_s": self.eta(seconds),
        }

    def after(self, record: dict[str, Any], last: bool) -> None:
        """See `Run`; then the callbacks."""
        super().after(record, last)
        for number, callback in enumerate(self.callbacks):
            now = time.monotonic()
            due = (
                callback.seconds is not None
                and now - self._called.get(number, self.began) >= callback.seconds
            )
            due = due or (callback.steps is not None and self.state.progress.step % callback.steps == 0)
            if due or last:
                self._called[number] = now
                self._call(callback, record, last)

    def _call(self, callback: PeriodicCallback, record: dict[str, Any], last: bool) -> None:
        model, kept = self.twin.compute, torch.get_rng_state()
        model.eval()
        try:
            with torch.no_grad():
                callback.run(
                    CallbackContext(
                        step=self.state.progress.step,
                        seconds=self.elapsed,
                        last=last,
                        record=record,
                        model=model,
                        tokenizer=self.tokenizer,
                        say=self.say,
                    )
                )
        finally:
            model.train()
            torch.set_rng_state(kept)  # looking changes nothing

    def measure(self, *, last: bool) -> None:
        """See `Run`."""
        if self.inputs.validation is None:
            return
        self.validation = evaluate(
            self.twin.compute,
            self.inputs.validation,
            self.config.context,
            limit=None if last else self.config.eval_tokens,
            workers=self.workers,
            objective=self.objective,
        )
        self.say(f"held out, step {self.state.progress.step}: {self.validation}")
        self.log.write({"step": self.state.progress.step, **self.validation.record})

    def result(self, record: dict[str, Any]) -> TrainResult:
        """See `Run`."""
        save_folder(self.out / FINAL, self.model, tokenizer=self.tokenizer)
        progress, spec, validation = self.state.progress, self.model.spec, self.validation
        if validation is not None and validation.bits_per_byte is not None:
            self.log.write({"val_bits_per_byte": validation.bits_per_byte})
        title = (
            f"{cell(cost.parameter_count(spec))} parameters, {cell(progress.trained_tokens)} trained tokens"
        )
        draw_curve(read_metrics(self.out / METRICS), self.out / CURVE, title)
        self.say(f"{self.out / FINAL}: {progress.step} steps in {clock(progress.seconds)}")
        return TrainResult(
            out=self.out,
            model=self.out / FINAL,
            metrics=self.out / METRICS,
            curve=self.out / CURVE,
            steps=progress.step,
            trained_tokens=progress.trained_tokens,
            seconds=progress.seconds,
            loss=record.get("loss"),
            validation=validation,
            accuracy=record.get("accuracy"),
        )
