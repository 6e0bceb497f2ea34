"""A training run in its folder: the steps, and the work between them (evaluation, checkpoints, callbacks).

result = train(TextConfig(data="text/", out="runs/mine", steps=1000))
result = train(config, resume="auto")          # resumes; bit for bit the run that was never interrupted
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from headway.checkpoints.folder import FINAL
from headway.errors import CheckpointError, RankError
from headway.models.tensor_parallel import shards_of
from headway.nn.router_losses import LOSSES
from headway.parallel import Parallel, joined
from headway.parallel.processes import count_ranks
from headway.parallel.sharded import Divided
from headway.storage.files import atomic_write
from headway.train.callbacks import Callback, CallbackContext, Interrupted, TrainResult, stop_request
from headway.train.checkpoint import CONFIG, State
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
    """Trains as `config` describes, in the folder `config.out`.

    Args:
        config: the settings, which are saved as config.yaml in the folder.
        resume: "never" (the folder must hold no run), "auto" (resume from its last checkpoint, or begin), or the path
            of a checkpoint. A resumed run ends with the same bits as one that was never interrupted, given the same
            settings, threads and torch, unless the schedule follows the clock (`max_seconds` of tasks on rows).
        callbacks: called between steps, for example to sample text.
        quiet: print no progress on stderr.

    Under torchrun (`headway.parallel.joined`), every process makes the same call. They share the micro-batches of each
    step; all must see the folder. Only the main process prints, writes metrics, and calls the callbacks.

    Raises:
        ConfigError, DataError, CheckpointError: before training, for invalid settings, data or checkpoints, and if the
        disk has no room for what the run will write. TrainingError: the loss or a gradient is not finite.
        CheckpointError: something could not be written; names the checkpoint to resume from. Interrupted: after Ctrl-C
        or SIGTERM, when the current step is finished and saved. RankError: another process died, stopped or hangs;
        names it, and the checkpoint to resume from.
    """
    task = checked(config, count_ranks())
    config, out, precision = task.config, Path(config.out), task.inputs.precision
    with joined(config.mesh, patience=config.patience) as parallel:
        main = parallel.is_main
        with locked(out) if main else nullcontext() as remark, seeded(config.seed, config.threads):
            start = parallel.agree(where_to_begin(config, resume) if main else None)
            if main and not quiet:  # this may take long: a tokenizer may be trained, and texts are encoded
                source = vars(config).get("data") or vars(config).get("source") or "its data"
                print(
                    f"{config.task}: preparing {source}, tokenizer and model ...", file=sys.stderr, flush=True
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
    """A run of a prepared task, from the checkpoint `start` or from the beginning; `go` runs it.

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
            dtype=torch.float32 if parallel.mesh.fsdp > 1 else task.inputs.dtype,  # fsdp casts itself
            pool=self.pool,
            progress=self.state.progress,
            seed=config.seed,
            parallel=parallel,
        )
        auto = config.checkpoints == "auto" and (parallel.mesh.fsdp > 1 or config.save_in_background)
        self.saver = Saver(self.state, parallel, divided, in_shards=auto or config.checkpoints == "shards")
        self.called = [self.trainer.began] * len(callbacks)
        self.validation: Evaluation | None = None
        if parallel.is_main:
            atomic_write(self.out / CONFIG, config_yaml(config))
        after = None if start is None else self.state.progress.step
        self.log = MetricsLog(self.out / METRICS, after, writes=parallel.is_main)

    def go(self) -> TrainResult:
        """Runs to the end. Raises Interrupted after a signal, when the current step is finished and saved;
        CheckpointError if something could not be written; RankError if another process is missing."""
        try:
            with self.saver:
                return self.all_steps()
        except (CheckpointError, OSError, RankError) as error:
            error_class = RankError if isinstance(error, RankError) else CheckpointError
            raise error_class(
                f"{error}. {how_to_resume(self.out, self.state.progress.step, self.parallel.mesh.ranks)}"
            ) from error

    def all_steps(self) -> TrainResult:
        """Evaluates and saves at the start, makes all steps, and evaluates and saves at the end."""
        if self.start is None:
            with self.pool:
                if self.config.eval_at_start:
                    self.measure(whole=True)
                if self.config.watches:  # the initial model may be the best; an unknown measure fails now
                    self.compare()
            self.save()  # fails early if saving does not work
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
                self.parallel.gather(None)  # wait until all processes have written
                self.say(choose_weights(self.state))
                self.trainer.weights.refresh()
            self.measure(whole=True)
            if not chooses:
                self.save()
        return self.finish(record)

    @property
    def is_over(self) -> bool:
        """Whether the run must end: the last step is done, early stopping ends it, or the time is over. Collective."""
        steps, progress = self.task.steps, self.state.progress
        if (steps is not None and progress.step >= steps) or waited_enough(self.config, progress):
            return True
        return self.parallel.agree(self.deadline.is_over(self.trainer.seconds))

    def record(self, stats: StepStats) -> dict[str, Any]:
        """Returns a step's line of metrics.jsonl."""
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
        """Saves and calls callbacks, if due, between two steps or after the last one. `stop()` returns whether a signal
        has come; `better`: the model is the best so far. Raises Interrupted after a signal in any process."""
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
        """Calls the callbacks that are due; of a sharded model, the weights are gathered for them."""
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
        """Evaluates between steps; returns whether the model is the best so far (False if settings do not ask)."""
        evaluation = self.measure(whole=False)
        return self.config.watches and count(self.config, self.state.progress, evaluation)

    def measure(self, *, whole: bool) -> Evaluation | None:
        """Evaluates on held-out data, if there is any, prints and logs the result, and returns it."""
        pool = SharedPool(self.pool, self.parallel)
        evaluation = self.task.evaluate(self.trainer.weights.compute, pool, whole=whole)
        if evaluation is not None:
            self.validation, number = evaluation, self.state.progress.step
            self.say(f"held out, step {number}: {evaluation}")
            self.log.write({"step": number, **evaluation.record})
        return evaluation

    def save(self, *, background: bool = False) -> Path:
        """Writes checkpoint-N after N steps, and removes the oldest ones; returns its path."""
        begun = self.state.progress.seconds = self.trainer.seconds
        path = self.saver.save(background=background)
        self.deadline.save_seconds = self.deadline.save_seconds or self.trainer.seconds - begun
        return path

    def finish(self, record: dict[str, Any]) -> TrainResult:
        """Saves the trained model and draws the curve; returns the result in every process when that is done."""
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
