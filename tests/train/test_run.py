"""A whole run: what it leaves behind, how it ends, and what it refuses to overwrite."""

import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from headway.checkpoints.folder import load_folder
from headway.checkpoints.restore import build_model, load_model
from headway.data import Rows, TokenFile
from headway.errors import CheckpointError, ConfigError
from headway.storage import disk
from headway.text import Tokenizer
from headway.train import (
    Callback,
    CallbackContext,
    TextConfig,
    TrainingError,
    evaluate,
    read_config,
    train,
)
from headway.train.callbacks import stop_request
from headway.train.checkpoint import checkpoints
from headway.train.metrics import draw_curve, read_metrics
from headway.train.optimizer import learning_rate
from headway.train.start import seeded
from tests.faults import watch
from tests.train.runs import HOME_MADE, RUNS
from tests.train.test_resume import assert_same_bits

Make = Callable[..., TextConfig]


def test_a_run_learns_and_leaves_everything(settings: Make, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(
        validation_share=0.2, steps=40, lr=1e-2, eval_every=20, eval_tokens=100, save_every=15, log_every=20,
        sample_prompts=["one"], sample_tokens=4, optimizer="muon",
    )  # fmt: skip
    result = train(config)
    out = Path(config.out)
    records = read_metrics(result.metrics)
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 41))
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert result.validation is not None
    assert records[-1] == {"val_bits_per_byte": result.validation.bits_per_byte}
    assert [r["step"] for r in records if "val_loss" in r] == [20, 40]
    expected = {
        "step", "epoch", "loss", "bits_per_byte", "tokens", "trained_tokens", "tokens_per_s", "lr", "grad_norm",
        "peak_memory_bytes", "share_of_gemm_peak", "seconds", "eta_s",
    }  # fmt: skip
    assert all(set(r) == expected for r in steps)
    factors = [learning_rate(n / 40, warmup=config.warmup, floor=config.lr_floor) for n in range(1, 41)]
    assert [r["lr"] for r in steps] == [config.lr * factor for factor in factors]
    assert steps[-1]["trained_tokens"] == sum(r["tokens"] for r in steps) == result.trained_tokens
    assert [p.name for p in checkpoints(out)] == ["checkpoint-30", "checkpoint-40"]
    assert read_config(out / "config.yaml") == config.model_copy(update={"task": "causal-lm"})
    assert result.curve.read_bytes().startswith(b"\x89PNG")
    stderr = capsys.readouterr().err
    assert "step 20/40  loss " in stderr
    assert "step 40: one|" in stderr
    assert "step 21/40" not in stderr

    file = TokenFile(out / "data" / "validation.tokens")
    for folder in (result.model, checkpoints(out)[-1]):
        again = evaluate(load_model(folder), Rows(file, config.context))
        assert again.nats == pytest.approx(result.validation.nats, rel=1e-6)
    assert Tokenizer.load(result.model).fingerprint == file.fingerprint


def test_without_matplotlib_a_run_ends_as_ever_and_says_what_draws_its_curve(
    settings: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headway.report.find_spec", lambda name: None)
    result = train(settings(steps=2))
    assert result.curve is None
    assert (result.model / "config.json").exists()
    assert {path.suffix for path in result.out.iterdir()}.isdisjoint({".png"})
    stderr = capsys.readouterr().err
    assert (
        stderr.count('loss.png is not drawn: matplotlib is not installed; pip install "headway[plots]"\n')
        == 1
    )


def test_a_folder_that_holds_a_run_is_not_written_over(settings: Make) -> None:
    config = settings(steps=1)
    train(config, quiet=True)
    before = sorted((p.name, p.stat().st_mtime_ns) for p in Path(config.out).iterdir())
    with pytest.raises(
        ConfigError, match=r"already holds a run \(checkpoint-1\); resume it with --resume auto"
    ):
        train(config, quiet=True)
    assert sorted((p.name, p.stat().st_mtime_ns) for p in Path(config.out).iterdir()) == before


def test_a_model_folder_is_no_folder_for_a_run(settings: Make) -> None:
    out = Path(settings().out)
    out.mkdir()
    (out / "config.json").write_text("{}")
    for resume in ("never", "auto"):
        with pytest.raises(ConfigError, match=r"holds a model \(config\.json\)"):
            train(settings(steps=1), resume=resume, quiet=True)
    assert [path.name for path in out.iterdir()] == ["config.json"]


def test_a_finished_run_that_is_resumed_trains_nothing_more(settings: Make) -> None:
    first = train(settings(steps=2), quiet=True)
    again = train(settings(steps=2), resume="auto", quiet=True)
    assert (again.steps, again.trained_tokens, again.loss) == (2, first.trained_tokens, None)


def test_a_run_that_is_to_have_fewer_steps_than_it_has_is_refused(settings: Make) -> None:
    train(settings(steps=4), quiet=True)
    saved = (Path(settings().out) / "config.yaml").read_text()
    with pytest.raises(
        ConfigError, match=r"checkpoint-4 has done 4 steps, but this run has only 3; .*--resume PATH"
    ):
        train(settings(steps=3), resume="auto", quiet=True)
    assert (Path(settings().out) / "config.yaml").read_text() == saved


def test_settings_that_cannot_be_written_whole_leave_the_old_ones(settings: Make) -> None:
    config = settings(steps=1)
    train(config, quiet=True)
    saved = Path(config.out) / "config.yaml"
    before = saved.read_bytes()
    full = watch(lambda operation, path, data: 20 if "config.yaml" in path.name and data else None)
    with full, pytest.raises(CheckpointError, match=r"could not save .*config\.yaml: No space left"):
        train(settings(steps=2), resume="auto", quiet=True)
    assert saved.read_bytes() == before


@pytest.mark.parametrize("run", ["causal-lm", "masked-lm"])
def test_training_goes_on_from_a_folder(run: str, settings: Make, tmp_path: Path) -> None:
    first = train(RUNS[run](settings, tmp_path, steps=3), quiet=True)
    config = settings(model=str(first.model), out=str(tmp_path / "more"), steps=1, lr=1e-9, **HOME_MADE)
    resumed = train(config, quiet=True)
    a, b = (build_model(load_folder(result.model)) for result in (first, resumed))
    assert a.spec == b.spec
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
    assert Tokenizer.load(resumed.model).fingerprint == Tokenizer.load(first.model).fingerprint


def test_the_clock_can_end_a_run(settings: Make, steady_clock: None) -> None:
    """The evaluation and the checkpoint after the last step are within the time limit, too."""
    config = settings(steps=None, max_seconds=3.0, validation_share=0.5, lr_floor=0.25)
    result = train(config, quiet=True)
    steps = [r for r in read_metrics(result.metrics) if "loss" in r]
    assert len(steps) == result.steps > 8
    assert steps[-1]["seconds"] < 3.0 - 0.04
    assert result.seconds <= 3.0
    assert steps[-1]["lr"] == pytest.approx(0.25 * config.lr, rel=0.1)


def test_threads_and_random_numbers_are_a_runs_own() -> None:
    before, state = torch.get_num_threads(), torch.get_rng_state()
    with seeded(3, before + 1):
        assert torch.get_num_threads() == before + 1
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(3)))
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("run", "how"), [("causal-lm", {"validation_share": 0.2}), ("adapter", {"rank": 32})]
)
def test_a_disk_without_room_is_seen_before_anything_is_trained(
    run: str, how: dict[str, Any], settings: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The required space is what the run writes, except for headers, settings and tokenizer; the frozen weights beside
    an adapter are not counted."""
    config = RUNS[run](settings, tmp_path, save_every=1, steps=4, keep_last=2, **how)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "free", lambda path: 0)
        with pytest.raises(
            ConfigError, match=r"this run writes (\S+) KiB \(3 checkpoints of (\S+) KiB"
        ) as caught:
            train(config, quiet=True)
    assert not Path(config.out).exists()
    train(config, quiet=True)
    written_bytes = sum(p.stat().st_size for p in checkpoints(Path(config.out))[-1].glob("*.safetensors"))
    stated_bytes = float(re.findall(r"checkpoints of (\S+) KiB", str(caught.value))[0]) * 1024
    assert stated_bytes == pytest.approx(written_bytes, rel=0.15)


@pytest.mark.parametrize("at", ["checkpoint-4", "final"])
def test_a_disk_that_is_full_later_leaves_a_checkpoint_to_go_on_from(settings: Make, at: str) -> None:
    whole, config = settings(out=settings().out + "-whole", save_every=2), settings(save_every=2)
    train(whole, quiet=True)
    full = watch(lambda operation, path, data: 20 if f".{at}." in str(path) and data else None)
    kept = "checkpoint-2" if at == "checkpoint-4" else "checkpoint-6"
    match = rf"No space left .* stopped at step {4 if kept[-1] == '2' else 6}; .* resume from \S*{kept}: headway train"
    with full, pytest.raises(CheckpointError, match=match):
        train(config, quiet=True)
    train(config, resume="auto", quiet=True)
    assert_same_bits(config.out, whole.out)


def test_the_curve_shows_every_held_out_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points far above and far below the training losses are shown, too; a point without a loss is left out."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: drawn.append(self))
    held = {0: 11.0, 50: 0.25, 99: 9.0, 100: None}
    records = [{"step": i, "loss": 5.0 - i / 25} for i in range(1, 101)]
    draw_curve([*records, *({"step": i, "val_loss": v} for i, v in held.items())], tmp_path / "x.png", "")
    (axes,) = drawn[0].axes
    assert axes.get_ylabel() == "loss, nats per token"
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    (points,) = [line.get_xydata() for line in axes.lines if line.get_label() == "held out"]
    assert points.tolist() == [[0.0, 11.0], [50.0, 0.25], [99.0, 9.0]]
    assert all(left <= x <= right and low <= y <= high for x, y in points)


def test_callbacks_are_called_by_seconds_and_at_the_end(settings: Make) -> None:
    moments: list[tuple[int, bool]] = []

    def look(context: CallbackContext) -> None:
        moments.append((context.step, context.last))

    train(
        settings(steps=5),
        callbacks=[Callback(look, every_seconds=0.0), Callback(look, every_seconds=1e6)],
        quiet=True,
    )
    assert moments == [(1, False), (2, False), (3, False), (4, False), (5, True), (5, True)]


def test_not_finite_stops_before_a_step_and_the_last_checkpoint_stays(settings: Make) -> None:
    config = settings(steps=9, save_every=1)

    def poison(context: CallbackContext) -> None:
        if context.step == 3:
            context.model.model.norm.weight.fill_(float("nan"))

    with pytest.raises(TrainingError, match=r"step 4: the loss is not finite .* rows \d+, "):
        train(config, callbacks=[Callback(poison, every_steps=1)], quiet=True)
    last = checkpoints(Path(config.out))[-1]
    assert last.name == "checkpoint-3"
    assert all(bool(torch.isfinite(p).all()) for p in load_model(last).parameters())


def test_a_curve_of_one_point_or_none_is_drawn(tmp_path: Path) -> None:
    for records in ([{"step": 1, "loss": 2.0}], []):
        draw_curve(records, tmp_path / "x.png", "")
        assert (tmp_path / "x.png").stat().st_size > 1000
        (tmp_path / "x.png").unlink()


@pytest.fixture
def _signals_as_in_the_foreground() -> Iterator[None]:
    """Installs Python's default handlers: tests that run in the background or by nohup have some signals ignored."""
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, previous in before.items():
        signal.signal(number, previous)


@pytest.mark.usefixtures("_signals_as_in_the_foreground")
def test_a_second_ctrl_c_stops_at_once_and_other_threads_take_no_signals() -> None:
    messages: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with stop_request(messages.append) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop()
        assert messages == ["stopping after this step (once more to stop at once, without saving)"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before
    with stop_request(messages.append) as stop:  # the terminal is closed
        signal.raise_signal(signal.SIGHUP)
        assert stop()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it
    with stop_request(messages.append) as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop()

    def elsewhere() -> None:
        with stop_request(messages.append):
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers: list[object] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert handlers == [before]
