"""A run in its folder: steps, and the work between them.

result = train(TextConfig(data="text/", out="runs/mine", steps=1000))
result = train(config, resume="auto")          # goes on; bit for bit the run that was never stopped
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from headway.errors import CheckpointError, RankError
from headway.models.tensor_parallel import shards_of
from headway.nn.router_losses import LOSSES
from headway.parallel import Parallel, joined
from headway.parallel.processes import count_ranks
from headway.parallel.sharded import Divided
from headway.storage.files import atomic_write
from headway.train.callbacks import Callback, CallbackContext, Interrupted, TrainResult, stop_request
from headway.train.checkpoint import CONFIG, FINAL, State
from headway.train.config import TrainConfig
from headway.train.config_io import config_yaml
from headway.train.ending import Deadline, choose_weights, count, leave_model, result, waited_enough
from headway.train.evaluation import Evaluation
from headway.train.lock import locked
from headway.train.metrics import METRICS, MetricsLog, Reporter, clock, read_metrics
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.saver import Saver
from headway.train.sharing import SharedPool, added_up_by, divide, spread
from headway.train.start import check_room, checked, how_to_resume, seeded, take_up, where_to_begin
from headway.train.tasks.base import StepStats, Task
from headway.train.texts import made_inputs
from headway.train.trackers import tracked
from headway.train.trainer import Progress, Trainer


def train(
    config: TrainConfig,
    *,
    resume: str = "never",
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> TrainResult:
    """Train as `config` says, in the folder `config.out`.

    Args:
        config: the settings; they are saved as config.yaml in the folder.
        resume: "never" (the folder must hold no run), "auto" (resume from its last checkpoint, or begin), or the
            path of a checkpoint. A resumed run ends with the very bits of one that was never stopped, at equal
            settings, threads and torch; not where the clock drives the schedule (`max_seconds` in training on text).
        callbacks: called between steps, e.g. to sample text.
        quiet: no progress on stderr.

    Under torchrun (`headway.parallel.joined`) each process calls it alike, and they share the micro batches of each
    step; the folder is one that all of them see. The main process says and writes, and calls the callbacks.

    Raises:
        ConfigError, DataError, CheckpointError: before anything is trained; a disk without room for what the run will
        write is one reason. TrainingError: a loss or gradient that is not finite. CheckpointError: what could not be
        written, and the checkpoint to resume from. Interrupted: Ctrl-C or SIGTERM, after the running step was finished
        and saved. RankError: another process died, stopped or hangs; which one, and the checkpoint to resume from.
    """
    task = checked(config, count_ranks())
    config, out, precision = task.config, Path(config.out), task.inputs.precision
    with joined(config.mesh, patience=config.patience) as parallel:
        main = parallel.is_main
        with locked(out) if main else nullcontext() as remark, seeded(config.seed, config.threads):
            start = parallel.agree(where_to_begin(config, resume) if main else None)
            if main and not quiet:  # a tokenizer may be trained, texts are encoded
                what = vars(config).get("data") or vars(config).get("source") or "its data"
                print(
                    f"{config.task}: preparing {what}, tokenizer and model ...", file=sys.stderr, flush=True
                )
            with parallel.main_first(), made_inputs(out, start) if main else nullcontext():
                task.prepare(start)
                if main:
                    check_room(task)
                called = [*task.callbacks(), *callbacks] if main else []
            spread(task, parallel)
            divided = divide(task, parallel, task.inputs.dtype)
            with Reporter(task.steps, config.log_every, quiet=quiet or not main) as reporter:
                for note in (*([] if remark is None else [remark]), *task.remarks):
                    reporter.note(note)
                reporter.note(f"{precision.what}: {precision.why}")
                run = Run(task, start, called, reporter, parallel, divided)
                if not main:
                    return run.go()
                with tracked(config, read_metrics(run.log.path), reporter.note) as run.log.send:
                    return run.go()


class Run:
    """One run of a task that is prepared, from the checkpoint `start` or from the beginning. Call `go`.

    Raises what `State.load` does."""

    def __init__(
        self,
        task: Task[Any],
        start: Path | None,
        callbacks: Sequence[Callback],
        reporter: Reporter,
        parallel: Parallel,
        divided: Divided[Any] | None = None,
    ) -> None:
        self.parallel, self.divided, self.task, self.start = parallel, divided, task, start
        self.config: TrainConfig = task.config
        config, self.out = self.config, Path(self.config.out)
        self.callbacks, self.reporter, self.say = callbacks, reporter, reporter.note
        self.pool = MicrobatchPool(task.workers)
        machine = {
            "threads": torch.get_num_threads(),
            "workers": task.workers,
            "micro_batch": task.micro_batch,
            "torch": str(torch.__version__),
            "processes": added_up_by(task, parallel),
            "tp": parallel.mesh.tp,
            "cp": parallel.mesh.cp,
            "expert": parallel.mesh.expert,
        }
        self.state = State(config, task, task.optimizer(self.pool), machine, Progress())
        self.state.optimizer.own(parallel, shards_of(task.model))
        take_up(self.state, start, self.say)
        self.deadline = Deadline(config.max_seconds, task.held_steps)
        self.trainer = Trainer(
            task,
            task.model,
            self.state.optimizer,
            schedule=lambda step, seconds: task.schedule(step, self.deadline.scheduled(seconds)),
            clip=config.clip,
            dtype=torch.float32 if parallel.mesh.fsdp > 1 else task.inputs.dtype,  # of gathered weights
            pool=self.pool,
            progress=self.state.progress,
            seed=config.seed,
            parallel=parallel,
        )
        usual = config.checkpoints == "auto" and (parallel.mesh.fsdp > 1 or config.save_in_background)
        self.saver = Saver(self.state, parallel, divided, in_shards=usual or config.checkpoints == "shards")
        self.called = [self.trainer.began] * len(callbacks)
        self.validation: Evaluation | None = None
        if parallel.is_main:
            atomic_write(self.out / CONFIG, config_yaml(config))
        after = None if start is None else self.state.progress.step
        self.log = MetricsLog(self.out / METRICS, after, writes=parallel.is_main)

    def go(self) -> TrainResult:
        """Runs to the end. Raises Interrupted after a signal, when the running step is done and saved; CheckpointError
        where something could not be written; RankError where another process is missing."""
        try:
            with self.saver:
                return self.all_steps()
        except (CheckpointError, OSError, RankError) as error:
            kind = RankError if isinstance(error, RankError) else CheckpointError
            raise kind(
                f"{error}. {how_to_resume(self.out, self.state.progress.step, self.parallel.mesh.ranks)}"
            ) from error

    def all_steps(self) -> TrainResult:
        """Evaluation and checkpoint at the start, the steps, and both at the end."""
        if self.start is None:
            with self.pool:
                if self.config.eval_at_start:
                    self.measure(whole=True)
                if self.config.watches:  # what it begins with may be the best, and shows what is measured
                    self.compare()
            self.save()  # shows, before any work is done, that saving works
        record: dict[str, Any] = {}
        with self.pool:
            with stop_request(self.say) as stop:
                last = self.is_over
                while not last:
                    stats = self.trainer.step()
                    self.deadline.count(stats.seconds)
                    record = self.record(stats)
                    self.log.write(record)
                    self.reporter.step(record)
                    last, better = self.is_over, False
                    every = self.config.eval_every
                    if not last and every and self.state.progress.step % every == 0:
                        better = self.compare()
                        last = self.is_over
                    self.between_steps(record, last, stop, better)
            if waited_enough(self.config, self.state.progress):
                self.say(
                    f"{self.state.progress.waited} evaluations in a row brought no better {self.config.best_by}"
                )
            if self.config.keep_best and self.state.progress.evaluated < self.state.progress.step:
                self.compare()
            chooses = self.config.keep_best or self.config.average > 1
            if chooses:
                self.save()
                self.parallel.gather(None)  # all checkpoints are written
                self.say(choose_weights(self.state))
                self.trainer.weights.refresh()
            self.measure(whole=True)
            if not chooses:
                self.save()
        return self.finish(record)

    @property
    def is_over(self) -> bool:
        """Whether the last step is done, nothing better has come for long, or the time is over."""
        steps, progress = self.task.steps, self.state.progress
        if (steps is not None and progress.step >= steps) or waited_enough(self.config, progress):
            return True
        return self.parallel.agree(self.deadline.is_over(self.trainer.seconds))

    def record(self, stats: StepStats) -> dict[str, Any]:
        """A step's line of metrics.jsonl."""
        progress, steps = self.state.progress, self.task.steps
        epoch = self.task.epoch(progress.step)
        by_steps = math.inf if steps is None else (steps - progress.step) * stats.seconds
        return {
            "step": progress.step,
            **({} if epoch is None else {"epoch": epoch}),
            "loss": stats.loss,
            "tokens": stats.count,
            "trained_tokens": progress.trained_tokens,
            "tokens_per_s": stats.count / stats.seconds,
            "lr": stats.lr,
            "grad_norm": stats.grad_norm,
            **{name: stats.extra[name] / stats.count for name in LOSSES if name in stats.extra},
            **self.task.metrics(stats),
            "seconds": self.trainer.seconds,
            "eta_s": min(by_steps, self.deadline.left(self.trainer.seconds)),
        }

    def between_steps(
        self, record: dict[str, Any], last: bool, stop: Callable[[], bool], better: bool
    ) -> None:
        """Does what is due between two steps, or after the last one; `stop()` says whether a signal has come, `better`
        whether the model is the best so far."""
        step, config = self.state.progress.step, self.config
        if not last:
            if (config.save_every and step % config.save_every == 0) or (better and config.keep_best):
                self.save(background=config.save_in_background)
            stopped, outcomes = zip(*self.parallel.gather((stop(), self.saver.outcome)), strict=True)
            self.saver.settle(outcomes)
            if any(stopped):
                raise Interrupted(self.save())
        self.call_back(record, last)

    def call_back(self, record: dict[str, Any], last: bool) -> None:
        """Call the callbacks that are due."""
        now, step = time.monotonic(), self.state.progress.step
        due = [i for i, c in enumerate(self.callbacks) if last or c.is_due(step, now - self.called[i])]
        model = self.trainer.weights.compute
        if self.divided is not None:
            if not self.parallel.agree(bool(due)):
                return
            model = self.divided.whole(here=self.parallel.is_main)
            model = None if model is None else model.to(self.task.inputs.dtype)
        for i in due:
            self.called[i] = now
            context = CallbackContext(
                step, self.trainer.seconds, last, record, model, self.task.tokenizer, self.say
            )
            self.callbacks[i].call(context)

    def compare(self) -> bool:
        """Evaluate between steps; returns whether the model is the best so far, where the settings ask for that."""
        evaluation = self.measure(whole=False)
        return self.config.watches and count(self.config, self.state.progress, evaluation)

    def measure(self, *, whole: bool) -> Evaluation | None:
        """Evaluate on held-out data, if there is any."""
        pool = SharedPool(self.pool, self.parallel)
        evaluation = self.task.evaluate(self.trainer.weights.compute, pool, whole=whole)
        if evaluation is not None:
            self.validation, number = evaluation, self.state.progress.step
            self.say(f"held out, step {number}: {evaluation}")
            self.log.write({"step": number, **evaluation.record})
        return evaluation

    def save(self, *, background: bool = False) -> Path:
        """Write checkpoint-N, N being the steps done; then drop the oldest ones."""
        begun = self.state.progress.seconds = self.trainer.seconds
        path = self.saver.save(background=background)
        self.deadline.save_seconds = self.deadline.save_seconds or self.trainer.seconds - begun
        return path

    def finish(self, record: dict[str, Any]) -> TrainResult:
        """Save the trained model and draw the curve; every process has the result when that is done."""
        task, progress, validation = self.task, self.state.progress, self.validation
        trained = self.saver.trained()
        if self.parallel.is_main:
            if validation is not None and validation.bits_per_byte is not None:
                self.log.write({"val_bits_per_byte": validation.bits_per_byte})
            if (remark := leave_model(self.out, task, trained, progress)) is not None:
                self.say(remark)
            self.say(f"{self.out / FINAL}: {progress.step} steps in {clock(progress.seconds)}")
        self.parallel.gather(None)
        return result(self.out, task, progress, record, validation)
