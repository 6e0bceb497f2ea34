"""The report of a recipe in Chinese: all its text is translated, and nothing that programs read."""

import ast
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib import font_manager
from matplotlib.figure import Figure

from headway.fonts import fonts
from headway.language import Translation
from headway.recipes import Recipe, RecipeReport, Stage, read_recipe, report, run, run_recipe
from headway.recipes.claims import Claim
from headway.recipes.report import Measured, Panel, draw_panel, draw_panels, panels, translation
from tests.recipes.test_shipped import FOLDER, RECIPES

CHINESE = translation("zh")
HAN = re.compile(r"[\u4e00-\u9fff]")
HOLDS, BY_LITTLE, FAILS = ({"a": {"x": x}} for x in (1000, 1, 0))
VERDICTS = {
    Claim.read("x is large", "a.x > 0", ["a"]).verdict(seeds)
    for count in (1, 2, 3)
    for seeds in itertools.product((HOLDS, BY_LITTLE, FAILS), repeat=count)
}
SHIPPED = [read_recipe(FOLDER / f"{name}.yaml") for name in RECIPES]
CLAIMS = {claim.text for recipe in SHIPPED for claim in recipe.claims}


def panels_of(recipe: Recipe) -> Iterator[Panel]:
    """Yields the panels of a recipe's claims and of claims on the columns of its table; each stage has all measures."""
    first = recipe.stages[0].name
    columns = [Claim(column, f"{first}.{column} > 0") for column in recipe.columns]
    measures = {measure for claim in (*recipe.claims, *columns) for _, measure in claim.operands}
    values = dict.fromkeys(measures, (1.0, 0.1))
    stages = [Measured(stage.name, "text", stage.source is None, values) for stage in recipe.stages]
    return panels([*recipe.claims, *columns], stages)


LABELS = {text for recipe in SHIPPED for panel in panels_of(recipe) for text in (panel.title, *panel.marks)}


@pytest.mark.parametrize("texts", [VERDICTS, CLAIMS, LABELS], ids=["verdicts", "claims", "labels"])
def test_all_that_is_said_has_its_chinese(texts: set[str]) -> None:
    assert texts
    assert [text for text in texts if CHINESE(text) == text or not HAN.search(CHINESE(text))] == []


def test_claims_have_a_chinese_of_their_own() -> None:
    assert CHINESE.table.keys() >= CLAIMS


def test_numbers_of_a_verdict_stay() -> None:
    for verdict in VERDICTS:
        assert sorted(re.findall(r"\d", CHINESE(verdict))) == sorted(re.findall(r"\d", verdict))
    assert CHINESE("not seen at this size (2 of 3 seeds)") == "在此规模下未见（3 个种子，2 个成立）"


def test_every_entry_is_said() -> None:
    sources = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in (report, run)]
    constants = {
        node.value for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)
    }
    parts = {part for text in LABELS for part in re.split("held-out |, nats|: less", text)}
    sentences = {*VERDICTS, *CLAIMS, *LABELS, *parts, *(text for text in constants if isinstance(text, str))}
    unused = [
        key
        for key, text in CHINESE.table.items()
        if not any(Translation({key: text})(sentence) != sentence for sentence in sentences)
    ]
    assert unused == []


def toy(language: str = "en") -> RecipeReport:
    stages = (Stage("one", {}), Stage("two", {}, source="one", published={"loss": 1.7, "steps": 9}))
    claims = (
        Claim("training goes on from there", "two.val_loss < two.start_loss"),
        Claim("rows of mine are better", "two.val_loss@64 < one.val_loss"),
    )
    records = tuple(
        {
            "stage": name,
            "task": "chat",
            "run": {"settings": {"context": 64}},
            "measures": {"steps": 3, **losses},
        }
        for name, losses in (
            ("one", {"val_loss": 5.0}),
            ("two", {"start_loss": 5.0, "val_loss": 4.0, "val_loss@64": 6.0}),
        )
    )
    recipe = Recipe(Path("out"), stages, (0, 1, 2), claims, ("start_loss", "val_loss"))
    return RecipeReport(recipe, (records,) * 3, language)


def test_a_report_in_chinese_has_no_english_but_names_rules_and_its_users_claims() -> None:
    page = toy("zh").markdown()
    assert "| two | chat，接 one | 64 | 3 | 5 | 4 | 1.7 | 9 |" in page
    assert "- 可见（3 个种子，3 个成立）：由此续训，损失继续下降 (`two.val_loss < two.start_loss`)" in page
    assert "- 在此规模下未见（3 个种子，0 个成立）：rows of mine are better (`" in page
    words = re.findall(r"[A-Za-z]\w+", re.sub("`.*`|rows of mine are better", "", page))
    assert {*words} == {"one", "two", "chat", "start_loss", "val_loss", "loss"}
    assert "由此续训" in toy("zh").text()


def test_in_english_it_is_as_it_was() -> None:
    page = toy().markdown()
    assert page.startswith(
        "| stage | task | length | steps | start_loss | val_loss | published loss | published steps |"
    )
    assert "| two | chat from one |" in page
    assert "- seen (3 of 3 seeds): training goes on from there (`" in page
    assert not HAN.search(page)


def test_programs_read_the_same_in_both_languages() -> None:
    assert json.dumps(toy("zh").plain()) == json.dumps(toy().plain())
    assert toy("zh").verdicts == toy().verdicts


def test_labels_of_a_picture_are_chinese_and_drawn_with_a_font_that_has_them(tmp_path: Path) -> None:
    drawn = list(panels(toy().recipe.claims, toy().measured))
    axes: Any = Figure().add_subplot()
    draw_panel(axes, drawn[0], CHINESE)
    assert axes.get_title() == "留出数据的损失，nat：越小越好"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["训练前", "训练后", "行长 64"]
    draw_panels(drawn, tmp_path / "report.png", "zh")  # a character that no font has is a warning
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_language_of_the_environment_is_that_of_a_report(
    make: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    languages: list[str] = []
    monkeypatch.setattr(run, "draw_panels", lambda found, path, language: languages.append(language))
    recipe = make("out", [{"name": "one"}], claims={"it learns": "one.val_loss < one.start_loss"})
    assert "| stage |" in run_recipe(recipe).markdown()
    english = (recipe.out / "report.json").read_text()
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert "| 阶段 |" in run_recipe(recipe, resume="auto").markdown()
    assert "![各条论断所比较的](report.png)" in (recipe.out / "report.md").read_text(encoding="utf-8")
    assert (recipe.out / "report.json").read_text() == english
    assert "labelled in English" not in capsys.readouterr().err
    without_a_font(monkeypatch)
    run_recipe(recipe, resume="auto")
    assert languages == ["en", "zh", "en"]
    warnings = [line for line in capsys.readouterr().err.splitlines() if "labelled in English" in line]
    assert warnings[0].startswith(
        "report.png is labelled in English: pictures in Chinese need a Chinese font"
    )
    assert "run `pip install zhplot`" in warnings[0]


def without_a_font(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [])
    monkeypatch.setattr("headway.fonts.find_spec", lambda name: None)
    fonts.cache_clear()
