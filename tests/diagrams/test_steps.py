"""The steps of decoding: a real model's work is counted, and its words are those that it generates."""

import json
from pathlib import Path

import pytest
import torch

import headway
from headway import LanguageModel
from headway.attention.linear_attention import LinearAttentionSpec
from headway.checkpoints.saving import save_folder
from headway.cli import run
from headway.errors import ConfigError
from headway.models import ModelSpec, build
from headway.patterns import Window
from headway_lab.diagrams.steps import MOST, growing_cache, shortened, steps_of, work
from tests.text.conftest import byte_level

SPEC = ModelSpec.of("llama", vocab=330, width=32, layers=2, heads=4, kv_heads=2, hidden=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    save_folder(path, build(SPEC, seed=0), tokenizer=byte_level())
    return path


@pytest.fixture(scope="module")
def lm(folder: Path) -> LanguageModel:
    return headway.load(folder)


def test_row_119_the_steps_are_those_in_which_the_model_writes_its_text(lm: LanguageModel) -> None:
    assert lm.tokenizer is not None
    steps = steps_of(lm, "Love", 3)
    prompt = lm.tokenizer.encode("Love", eos=False)
    n = len(prompt)
    assert [step.again for step in steps] == [(n + i, n + i, n + i) for i in range(3)]
    assert [step.kept for step in steps] == [(n, n, n), (1, 1, n + 1), (1, 1, n + 2)]
    text = lm.generate(prompt, max_new_tokens=3, temperature=0)
    ids = list(text.ids)
    probabilities = lm.next_log_probs([*prompt, *ids[:-1]]).exp()
    assert steps[-1].probability == pytest.approx(float(probabilities.max()), rel=1e-4)
    assert int(probabilities.argmax()) == ids[-1]
    assert [len(step.reads) for step in steps] == [n, 1, 1]
    assert [step.reads for step in steps[1:]] == [(step.writes,) for step in steps[:-1]]


def test_the_command_prints_and_draws_them(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["explain", "figures", "--model", str(folder), "--prompt", "Love"]
    assert run([*command, "--steps", "2", "--out", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["steps"]) == 2
    assert report["written"] == [str(tmp_path / f"cache.{language}.svg") for language in ("en", "zh")]
    assert "computed in this step" in (tmp_path / "cache.en.svg").read_text(encoding="utf-8")
    assert run([*command, "--lang", "zh"]) == 0
    out = capsys.readouterr().out
    n = len(report["steps"][0]["reads"])
    assert f"无缓存：全部重算（投影 {4 * n + 6} 个 token" in out.replace(" (", "（")
    assert run([*command, "--steps", str(MOST)]) == 0  # without a figure there is room


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["figures", "--prompt", "a"], "--model and --prompt need each other and topic figures"),
        (
            ["cache", "--model", "x", "--prompt", "a"],
            "--model and --prompt need each other and topic figures",
        ),
        (["figures", "--model", "x", "--prompt", "a", "--heads", "2"], "and take only --steps and --out"),
        (["figures", "--model", "FOLDER", "--prompt", "a", "--steps", "0"], "--steps 0 must be at least 1"),
        (["figures", "--model", "FOLDER", "--prompt", "a" * 40, "--out", "OUT"], f"has room for {MOST}"),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: list[str], says: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"FOLDER": str(folder), "OUT": str(tmp_path / "out")}
    assert run(["explain", *(places.get(argument, argument) for argument in arguments)]) == 1
    assert says in capsys.readouterr().err


def test_layers_that_hide_tokens_or_compare_none_are_refused() -> None:
    windows, linear = SPEC.with_patterns(Window.last(2)), SPEC.with_mixer(LinearAttentionSpec())
    ids = torch.arange(3)[None]
    assert work(build(windows).eval(), ids[:, :2], [1, 1], True) == [(1, 1, 1), (1, 1, 2)]
    with pytest.raises(ConfigError, match=r"layer 0 with pattern Window.* hides some of 3 tokens"):
        work(build(windows).eval(), ids, [1, 1, 1], True)
    with pytest.raises(ConfigError, match="llama has no layer with softmax attention"):
        work(build(linear).eval(), ids, [1, 1, 1], True)


def test_long_words_are_cut_beside_their_rows() -> None:
    assert shortened("Love") == "Love"
    assert shortened("immeasurable") == "immeasu…"
    assert growing_cache(lambda key, **numbers: key).width == 800
