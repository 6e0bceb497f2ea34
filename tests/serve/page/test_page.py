"""The page, driven in a browser: its chat, its languages and its appearance.

Screenshots are left in runs/page."""

import re
from typing import Any

import pytest

from headway.serve.answers import token_text
from tests.serve.conftest import House, model_of
from tests.serve.page.driven import LINES, Page, percent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
VIEWS = "chat", "attention", "patterns", "rotary"


def test_a_conversation_and_what_else_could_have_come(page: Page, long_house: House) -> None:
    page.settings(temperature="0", max_tokens="24", system="Be brief.")
    page.say("hello there")
    page.until(lambda: page.all(".actions"))
    lm = model_of(long_house, "chat")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello there"}]
    ids = lm.tokenizer.render_chat(messages)
    generation = lm.generate(ids, max_new_tokens=24)
    page.shot("chat")
    page.all(".actions button")[1].click()
    spans = page.all(".tokens span")
    texts = [token_text(lm.tokenizer, token) for token in generation.ids]
    assert [span.get_property("textContent") for span in spans] == texts
    page.script("arguments[0].click()", spans[3])
    chances = [bar.text for bar in page.all(".instead .bars li > span")]
    log_probs = lm.next_log_probs([*ids, *generation.ids[:3]])
    likely = log_probs.topk(5).values.exp().tolist()
    assert chances == [percent(value) for value in likely]
    page.shot("tokens")
    page.one(".actions button").click()
    page.settled()
    assert len(page.all(".row-text span")) == len(ids) + len(generation.ids)


def test_writing_is_stopped(page: Page, long_house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        model_of(long_house, "chat").generation, "eos_token_id", []
    )  # so that it does not end before it is stopped
    page.settings(max_tokens="15000", temperature="1")
    page.say("go on")
    page.until(lambda: len(page.text(".turn.assistant .content")) > 10)
    assert page.text("#send") == "Stop"
    page.one("#send").click()
    page.until(lambda: "stopped" in page.text(".actions small"))
    page.until(lambda: long_house.worker.count == 0 and long_house.used() == 0)
    page.shot("stopped")


def test_a_model_without_a_template_continues_texts(page: Page, long_house: House) -> None:
    page.script(
        "arguments[0].value = 'plain'; arguments[0].dispatchEvent(new Event('change'))", page.one("#model")
    )
    page.settings(temperature="0", max_tokens="12")
    page.say("the cat sat")
    page.until(lambda: page.all(".actions"))
    generation = model_of(long_house, "plain").generate("the cat sat", max_new_tokens=12)
    assert page.text(".plain-text") == "the cat sat" + generation.text


def test_both_languages_and_the_choice_is_remembered(page: Page) -> None:
    for view in VIEWS:
        page.open(view)
        assert page.script("return document.documentElement.lang") == "en"
        assert not re.search("[\u4e00-\u9fff]", page.text("main"))
    page.open("chat")
    height = page.one("#send").size["height"]
    page.one("#language").click()
    for view in VIEWS:
        page.open(view)
        assert page.script("return document.documentElement.lang") == "zh"
        assert re.search("[\u4e00-\u9fff]", page.text("main"))
        page.shot(f"zh-{view}")
    page.open("chat")
    assert page.one("#send").size["height"] == height  # its label is one line in this language, too


def test_a_phone_and_the_dark(page: Page) -> None:
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
    for view in VIEWS:
        page.open(view, width=390, height=800)
        if view == "attention":
            page.look(LINES[:400])
        assert page.script("return document.documentElement.scrollWidth") <= 390
        assert page.script("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 28)"
        page.shot(f"phone-{view}")
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_model_text_is_text(page: Page) -> None:
    hostile = (
        "<img src=x onerror=alert(1)> **bold** `code` [a](javascript:alert(1))\n\n"
        "- <script>alert(1)</script>\n\n```\n<b>\n```"
    )
    result = page.driver.execute_async_script(
        "const [text, done] = arguments; import('/page/markdown.js').then(({markdown}) => {"
        "const at = document.createElement('div'); at.append(...markdown(text)); document.body.append(at);"
        "done([at.textContent, [...at.querySelectorAll('*')].map((e) => e.localName)]); at.remove(); })",
        hostile,
    )
    assert {*result[1]} <= {"p", "strong", "code", "ul", "li", "pre"}
    assert "<img src=x onerror=alert(1)>" in result[0]
    assert "[a](javascript:alert(1))" in result[0]


def test_errors_are_told_and_a_key_is_asked_for(chromium: Any, locked_house: House, page: Page) -> None:
    locked_page = Page(chromium, locked_house.url)
    locked_page.say("hello")
    locked_page.until(lambda: "key" in locked_page.text("#alert"))
    locked_page.until(lambda: locked_page.one("#settings").get_property("open"))
    locked_page.shot("error")
    locked_page.put("#settings [name=key]", "secret")
    locked_page.one("#settings .main").click()
    locked_page.settings(max_tokens="3")
    assert (
        locked_page.one("#say").get_property("value") == "hello"
    )  # a message that was not answered can be sent again
    locked_page.one("#send").click()
    locked_page.until(lambda: len(locked_page.all(".actions")) == 1 and len(locked_page.all(".turn")) == 2)
    assert "secret" not in locked_page.script("return JSON.stringify(localStorage)")
    chromium.get_log("browser")


def test_nothing_comes_from_elsewhere(page: Page, long_house: House) -> None:
    for view in VIEWS:
        page.open(view)
    urls = page.script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert urls
    assert all(url.startswith(long_house.url) for url in urls)
