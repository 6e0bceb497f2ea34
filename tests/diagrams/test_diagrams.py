"""The figures of the documents: docs/figures has what is drawn now, from specs and runs, in both languages."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from headway.cli import run
from headway.errors import ConfigError
from headway.language import LANGUAGES
from headway.models import catalog
from headway.nn import LayerNorm, RMSNorm
from headway_lab import diagrams
from headway_lab.diagrams import DIAGRAMS, draw, words, write
from headway_lab.diagrams.drawing import Drawing, wide
from headway_lab.diagrams.runs import reach
from headway_lab.diagrams.steps import small_steps, text_of
from tests.command_lines import ROOT

FIGURES = ROOT / "docs" / "figures"
TEXT = re.compile(r"<text.*?</text>\n")


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", DIAGRAMS)
def test_row_121_the_kept_figure_is_the_one_that_is_drawn_now(name: str, language: str) -> None:
    kept = FIGURES / f"{name}.{language}.svg"
    assert kept.read_text(encoding="utf-8") == draw(name, language).to_svg(), (
        "headway explain figures --out docs/figures"
    )


@pytest.mark.parametrize("name", DIAGRAMS)
def test_both_languages_have_the_same_lines_and_labels_of_their_own(name: str) -> None:
    english, chinese = (draw(name, language) for language in LANGUAGES)
    assert TEXT.sub("", english.to_svg()) == TEXT.sub("", chinese.to_svg())
    assert len(english.texts) == len(chinese.texts)
    assert re.search(r"[\u4e00-\u9fff]", "".join(chinese.texts))
    assert not re.search(r"[\u4e00-\u9fff]", "".join(english.texts))


def test_every_label_has_both_languages_and_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used: dict[str, set[str]] = {}
    for name, make in DIAGRAMS.items():
        label = words()[name]

        def say(
            key: str, *, name: str = name, label: dict[str, dict[str, str]] = label, **values: object
        ) -> str:
            used.setdefault(name, set()).add(key)
            assert set(label[key]) == set(LANGUAGES)
            fields = [sorted(re.findall(r"\{(\w+)", label[key][language])) for language in LANGUAGES]
            assert fields[0] == fields[1]
            return label[key]["en"].format(**values)

        make(say)
        if name == "cache":
            text_of(say, small_steps())
    assert used == {name: set(labels) for name, labels in words().items()}


@pytest.mark.parametrize("language", LANGUAGES)
def test_row_121_every_figure_is_on_the_documents_pages_in_their_language(language: str) -> None:
    pages = (ROOT / "docs" / "documents").glob(f"*.{language}.md")
    shown = {
        name
        for page in pages
        for name in re.findall(
            r"!\[[^\]]+\]\(\.\./figures/([\w.-]+\.svg)\)", page.read_text(encoding="utf-8")
        )
    }
    assert shown == {f"{name}.{language}.svg" for name in DIAGRAMS}


def test_row_121_blocks_have_the_sizes_of_their_specs() -> None:
    texts = draw("blocks", "en").texts
    for name in ("transformer-base", "llama-2-70b"):
        spec = catalog.spec(name)
        sizes = (
            f"{spec.heads} q, {spec.kv_heads} kv, of {spec.head_dim}",
            f"{spec.width:,} → {spec.hidden:,} → {spec.width:,}",
            f"{spec.vocab:,} × {spec.width:,}",
        )
        for size in sizes:
            assert any(size in text for text in texts), size
    layers = catalog.spec("llama-2-70b").layers
    assert [text for text in texts if text.endswith("×")] == ["6 ×", "6 ×", f"{layers} ×"]
    assert (texts.count("LayerNorm"), texts.count("RMSNorm")) == (2 + 3, 2 + 1)


def test_row_119_a_step_computes_all_again_without_a_cache_and_one_token_with_it() -> None:
    assert [step.again for step in small_steps()] == [(t, t, t) for t in (1, 2, 3, 4)]
    assert [step.kept for step in small_steps()] == [(1, 1, t) for t in (1, 2, 3, 4)]
    assert {"10 tokens projected, 30 scores", "4 tokens projected, 10 scores"} <= set(
        draw("cache", "en").texts
    )


def test_row_23_a_norm_depends_on_what_is_blue() -> None:
    layer = torch.zeros(3, 3, 3, dtype=torch.bool)
    layer[-1, 0] = True
    assert torch.equal(reach(LayerNorm(3).double(), 3), layer)
    assert torch.equal(reach(RMSNorm(3).double(), 3), layer)
    batch = torch.zeros(3, 3, 3, dtype=torch.bool)
    batch[:, :, -1] = True
    assert torch.equal(reach(nn.BatchNorm1d(3, affine=False).double(), 3), batch)


def test_row_93_pairs_are_those_that_the_topic_of_masks_counts() -> None:
    page = (ROOT / "docs" / "results" / "explain.md").read_text(encoding="utf-8")
    counted = re.findall(
        r"^\| (?:full|sliding window|dilated window|global \+ window) \| (\d+)", page, re.MULTILINE
    )
    drawn = [text for text in draw("patterns", "en").texts if text.endswith("pairs")]
    assert drawn == [f"{count} / 576 pairs" for count in counted]


def test_words_that_do_not_fit_are_errors() -> None:
    assert wide("ab\nabc", 10) == pytest.approx(16.8)
    assert wide("掩码", 10) == 20
    drawing = Drawing(100, 50)
    drawing.box(0, 0, 60, 20, "abc")
    with pytest.raises(ValueError, match="'abcdefghij' is 67 pixels wide"):
        drawing.box(0, 0, 60, 20, "abcdefghij")
    with pytest.raises(ValueError, match="at -17 of 100"):
        drawing.text(0, 10, "abcde")
    with pytest.raises(ValueError, match="at 90 of 100"):
        drawing.text(90, 10, "abcde", anchor="start")


def test_names_and_languages_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no figure 'block'.*blocks"):
        draw("block", "en")
    with pytest.raises(ConfigError, match="must be one of en, zh, got 'fr'"):
        draw("blocks", "fr")


def test_the_command_writes_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagrams, "DIAGRAMS", {"heads": DIAGRAMS["heads"]})
    assert run(["explain", "figures", "--out", str(tmp_path / "new")]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["heads.en.svg", "heads.zh.svg"]
    assert "heads.zh.svg" in capsys.readouterr().out
    for arguments, says in (
        ([], "give --out FOLDER"),
        (["--heads", "4", "--out", "x"], "--heads can be used with a single topic only, got figures"),
        (["--quick", "--out", "x"], "--quick does not apply to figures"),
    ):
        assert run(["explain", "figures", *arguments]) == 1
        assert says in capsys.readouterr().err


def test_a_folder_gets_both_languages(tmp_path: Path) -> None:
    assert len(write(tmp_path)) == len(DIAGRAMS) * len(LANGUAGES)
