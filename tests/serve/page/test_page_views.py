"""Attention, patterns and rotary pairs on the page, driven in a browser: the numbers shown are the Python API's."""

import math
import re
from typing import Any

import pytest

from headway.api import Cut
from headway.cache import PAGE, pattern_facts
from headway.patterns import parse, visible
from headway.tokens import Tokens
from tests.serve.conftest import House, model_of
from tests.serve.page.conftest import LONG
from tests.serve.page.driven import LINES, Page, percent
from tests.serve.test_guard import ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_attention_of_a_token_of_8000(page: Page, long_house: House) -> None:
    lm = model_of(long_house, "chat")
    ids = lm.tokenizer.encode(LINES, eos=False)
    assert len(ids) > 8000
    ids = ids[:8200]
    page.open("attention")
    page.look(lm.tokenizer.decode(ids))
    page.script("document.querySelectorAll('.row-text span')[8000].click()")
    page.settled()
    page.until(lambda: "8000" in page.text(".numbers .lead"))
    count = len(page.all(".row-text span"))
    assert count >= 8000
    text = lm.tokenizer.encode(lm.tokenizer.decode(ids), eos=False)
    assert count == len(text)
    attention_map = lm.attention(text, layers=0, heads=0)[0]
    row = attention_map.row(8000)[0]
    shown = page.script(
        "return [...document.querySelectorAll('.row-text span')]"
        ".map((span) => [span.style.getPropertyValue('--w'), span.className])"
    )
    expected = (row.abs() / row.abs().max()).sqrt()
    assert [float(w) for w, _ in shown] == pytest.approx(expected.tolist(), abs=2e-3)
    visible_keys = visible(LONG[0], Tokens.range(1, 8000), Tokens.range(count))[0, 0, 0]
    assert [("seen" in name.split()) for _, name in shown] == visible_keys.tolist()
    assert [name.split()[0] for _, name in shown[8001:]] == ["later"] * (count - 8001)
    assert {name.split()[0] for _, name in shown[4:7900]} == {"released"}
    facts = page.facts(".numbers")
    assert float(facts["sum of weights"]) == pytest.approx(1, abs=1e-5)
    assert float(facts["weights × values − kernel"].split()[0]) < 1e-4
    assert facts["keys"] == f"the text was read again, {count} tokens"
    (shares,) = attention_map.shares([8000])
    nats, even = re.findall(r"[\d.]+", facts["entropy"])
    assert float(nats) == pytest.approx(shares.entropy, rel=1e-2)
    assert float(even) == pytest.approx(100 * shares.evenness, abs=1)
    shares_shown = [bar.text.split("\n")[0].split(" %")[0] for bar in page.all(".bars.words li > span")]
    assert shares_shown[0] == percent(shares.first).removesuffix(" %")
    likely = lm.next_log_probs(text[:8001]).exp().topk(6).values.tolist()
    assert [bar.text for bar in page.all(".card .bars:not(.words) li > span")] == [percent(p) for p in likely]
    page.shot("attention-8000")


def test_a_text_that_pages_hold_is_not_read_again(page: Page, long_house: House) -> None:
    ids = model_of(long_house, "chat").tokenizer.encode(LINES[:700], eos=False)
    assert ask(long_house, body={"model": "chat", "prompt": ids, "max_tokens": 1})[0] == 200
    page.open("attention")
    page.look(LINES[:700])
    stored, computed = map(int, re.findall(r"\d+", page.facts(".numbers")["keys"]))
    assert stored >= PAGE
    assert 1 <= computed <= PAGE


def test_a_head_an_edge_and_a_span_are_cut(page: Page, long_house: House) -> None:
    lm, text = model_of(long_house, "chat"), LINES[:180]
    ids = lm.tokenizer.encode(text, eos=False)
    page.open("attention")
    page.look(text)
    page.all(".heads button")[5].click()
    page.settled()
    page.until(lambda: page.text("h2") == "Layer 1 · Head 1")
    page.one("#cut-head").click()
    check_cuts(page, lm, ids, [Cut(layer=1, head=1)])
    page.script("document.querySelector('.legend input').click()")
    for i in (10, 14):
        page.script(f"document.querySelectorAll('.row-text span')[{i}].click()")
    page.script("document.querySelector('#cut-span').click()")
    check_cuts(page, lm, ids, [Cut(layer=1, head=1), Cut(keys=(10, 15))])
    page.script("document.querySelector('.what-if').scrollIntoView()")
    page.shot("cut")
    page.script("document.querySelector('.chip').click()")
    check_cuts(page, lm, ids, [Cut(keys=(10, 15))])


def check_cuts(page: Page, lm: Any, ids: list[int], cuts: list[Cut]) -> None:
    page.until(lambda: len(page.all(".chip")) == len(cuts) and page.all(".what-if .bars"))
    before, after = lm.next_log_probs(ids).double(), lm.next_log_probs(ids, cuts=cuts).double()
    likely = {token: None for log_probs in (before, after) for token in log_probs.topk(10).indices.tolist()}
    shown = [
        page.script("return [arguments[0].firstChild.textContent, arguments[0].lastChild.textContent]", bar)
        for bar in page.all(".what-if .bars li > span")
    ]
    assert shown == [[percent(math.exp(p[t])) for p in (after, before)] for t in [*likely][:12]]
    divergence = float((before.exp() * (before - after)).sum())
    assert float(re.findall(r"[\d.e-]*\d", page.text(".what-if .lead"))[0]) == pytest.approx(
        divergence, rel=2e-2
    )


def test_a_pattern_is_typed_and_dragged(page: Page) -> None:
    from selenium.webdriver import ActionChains

    page.open("patterns")
    page.put("#pattern", "Window.last(5, step=2) | Causal() & Sink(3)")
    check_pattern(page, "Window.last(5, step=2) | Causal() & Sink(3)", [])
    page.open("patterns")
    canvas = page.one("canvas.pattern")
    side = (canvas.size["width"] - 12) / 32

    def at(query: int, key: int) -> tuple[int, int]:
        middle = canvas.size["width"] / 2
        return tuple(round(12 + (n + 0.5) * side - middle) for n in (key, query))  # type: ignore[return-value]

    drag = ActionChains(page.driver).move_to_element_with_offset(canvas, *at(24, 17)).click_and_hold()
    drag.move_to_element_with_offset(canvas, *at(24, 12)).release().perform()
    check_pattern(page, "Window.last(13) | Causal() & Sink(2)", [])
    drag = ActionChains(page.driver).move_to_element_with_offset(canvas, *at(30, 1)).click_and_hold()
    drag.move_to_element_with_offset(canvas, *at(30, 4)).release().perform()
    check_pattern(page, "Window.last(13) | Causal() & Sink(5)", [])
    x, _ = at(0, 7)
    top = round(5 - canvas.size["width"] / 2)
    ActionChains(page.driver).move_to_element_with_offset(
        page.one("canvas.pattern"), x, top
    ).click().perform()
    check_pattern(page, "Window.last(13) | Causal() & Sink(5) | Causal() & GlobalKeys()", [7])
    page.shot("pattern")
    page.put("#pattern", "Window.lats(3)")
    page.until(lambda: "did you mean" in page.text(".problem"))


def check_pattern(page: Page, text: str, marked: list[int]) -> None:
    page.until(lambda: page.one("#pattern").get_property("value") == text and page.all(".facts"))
    tokens = Tokens.range(32).with_global(marked) if marked else Tokens.range(32)
    facts = pattern_facts(parse(text), tokens, 4)
    page.until(lambda: page.facts(".facts").get("Pattern") == facts["pattern"])
    shown = page.facts(".facts")
    assert shown["Pairs"].startswith(f"{facts['pairs']} of 1024")
    assert shown["Cost"].startswith(f"1024 tokens: {percent(facts['pairs_at']['1024'] / 1024**2)}")
    assert shown["Through layers"].startswith(f"1: {facts['receptive_field'][0]['tokens']} tokens")


def test_a_rotary_pair_turns_with_its_position(page: Page) -> None:
    page.open("rotary")
    values = []
    for m, n in ((9, 3), (16, 10), (16, 9)):
        for field, value in zip(page.all(".controls input"), (m, n), strict=False):
            script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
            page.script(script, field, value)
        values.append(float(page.facts(".facts")["q · k"].split("= ")[1]))
    theta = 10000 ** (-8 / 32)
    assert values == pytest.approx([math.cos(d * theta + 0.55) for d in (6, 6, 7)], abs=1e-4)
    page.shot("rotary")


def test_keys_alone_ask_another_token(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open("attention")
    page.look(LINES[:60])
    query = page.one(".row-text .query")
    before = int(query.get_attribute("data-i"))
    query.send_keys(Keys.ARROW_LEFT)
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    row = "return document.querySelector('.row-text .query').dataset.i"  # in one script: rows are drawn again
    page.until(lambda: page.script(row) == str(before - 1))
