"""The page, driven in a browser: what a person does, and the numbers that it then shows, which are the Python API's.

Screenshots are left in runs/page."""

import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headway.api import Cut
from headway.cache import PAGE, pattern_facts
from headway.patterns import parse, visible
from headway.serve.answers import token_text
from headway.tokens import Tokens
from tests.serve.conftest import House
from tests.serve.page.conftest import LONG, SHOTS
from tests.serve.test_guard import ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
VIEWS = "chat", "attention", "patterns", "rotary"


class Page:
    """A page that is open."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url
        self.open()

    def open(self, view: str = "chat", width: int = 1280, height: int = 860) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get("about:blank")
        self.driver.get(f"{self.url}/#{view}")
        self.until(lambda: self.all("#model option") and self.all(f"main.{view} *"))

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def one(self, selector: str) -> Any:
        self.until(lambda: self.all(selector))
        return self.all(selector)[0]

    def text(self, selector: str) -> str:
        """What stands in the first of these; nothing where there is none."""
        found: str = self.script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        return found

    def script(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def put(self, selector: str, text: str) -> None:
        """Pastes a text into a field."""
        paste = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))"
        self.script(paste, self.one(selector), text)

    def until(self, holds: Callable[[], Any], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, self.script("return document.body.innerText")
            time.sleep(0.05)

    def settings(self, **values: str) -> None:
        self.one("#open-settings").click()
        for name, value in values.items():
            self.put(f"#settings [name={name}]", value)
        self.one("#settings .main").click()

    def say(self, text: str) -> None:
        self.put("#say", text)
        self.one("#send").click()

    def look(self, text: str) -> None:
        self.put("#text", text)
        self.one(".opening .main").click()
        self.settled()

    def settled(self) -> None:
        """Waits for the row that was asked for."""
        self.until(
            lambda: self.all(".row-text") and self.one(".inspector").get_attribute("aria-busy") != "true"
        )

    def shot(self, name: str) -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(SHOTS / f"{name}.png"))

    def facts(self, selector: str) -> dict[str, str]:
        """Names and values of a list of facts."""
        script = (
            "return [...document.querySelectorAll(`${arguments[0]} .fact`)].map((one) =>"
            "[one.querySelector('dt').textContent, one.querySelector('dd').textContent])"
        )
        return dict(self.script(script, selector))


@pytest.fixture
def page(chromium: Any, long_house: House) -> Iterator[Page]:
    """In English, and with nothing remembered; nothing may have failed in it."""
    chromium.get(f"{long_house.url}/page/icon.svg")
    chromium.execute_script("localStorage.clear(); sessionStorage.clear()")
    chromium.get_log("browser")
    yield Page(chromium, long_house.url)
    said = [line["message"] for line in chromium.get_log("browser") if line["level"] == "SEVERE"]
    assert [line for line in said if "status of 400" not in line] == []  # an error that was asked for


def model_of(house: House, name: str = "chat") -> Any:
    return house.models.places[name].model.lm  # type: ignore[attr-defined]


def test_a_conversation_and_what_else_could_have_come(page: Page, long_house: House) -> None:
    page.settings(temperature="0", max_tokens="24", system="Be brief.")
    page.say("hello there")
    page.until(lambda: page.all(".actions"))
    lm = model_of(long_house)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello there"}]
    ids = lm.tokenizer.render_chat(messages)
    made = lm.generate(ids, max_new_tokens=24)
    page.shot("chat")
    page.all(".actions button")[1].click()
    spans = page.all(".tokens span")
    texts = [token_text(lm.tokenizer, token) for token in made.ids]
    assert [span.get_property("textContent") for span in spans] == texts
    page.script("arguments[0].click()", spans[3])
    chances = [one.text for one in page.all(".instead .bars li > span")]
    log_probs = lm.next_log_probs([*ids, *made.ids[:3]])
    likely = log_probs.topk(5).values.exp().tolist()
    assert chances == [percent(value) for value in likely]
    page.shot("tokens")
    page.one(".actions button").click()
    page.settled()
    assert len(page.all(".row-text span")) == len(ids) + len(made.ids)


def percent(share: float) -> str:
    if share >= 0.1:
        return f"{100 * share:.0f} %"
    return f"{100 * share:.1f} %" if share >= 0.001 else "< 0.1 %" if share > 0 else "0 %"


def test_writing_is_stopped(page: Page, long_house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        model_of(long_house).generation, "eos_token_id", []
    )  # it does not come to an end before
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
    made = model_of(long_house, "plain").generate("the cat sat", max_new_tokens=12)
    assert page.text(".plain-text") == "the cat sat" + made.text


LINES = "".join(f"line {n}: the cat sat on the mat, and the dog on the log.\n" for n in range(400))


def test_attention_of_a_token_of_8000(page: Page, long_house: House) -> None:
    lm = model_of(long_house)
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
    one = lm.attention(text, layers=0, heads=0)[0]
    row = one.row(8000)[0]
    shown = page.script(
        "return [...document.querySelectorAll('.row-text span')]"
        ".map((span) => [span.style.getPropertyValue('--w'), span.className])"
    )
    expected = (row.abs() / row.abs().max()).sqrt()
    assert [float(w) for w, _ in shown] == pytest.approx(expected.tolist(), abs=2e-3)
    seen = visible(LONG[0], Tokens.range(1, 8000), Tokens.range(count))[0, 0, 0]
    assert [("seen" in name.split()) for _, name in shown] == seen.tolist()
    assert [name.split()[0] for _, name in shown[8001:]] == ["later"] * (count - 8001)
    assert {name.split()[0] for _, name in shown[4:7900]} == {"released"}
    facts = page.facts(".numbers")
    assert float(facts["sum of weights"]) == pytest.approx(1, abs=1e-5)
    assert float(facts["weights × values − kernel"].split()[0]) < 1e-4
    assert facts["keys"] == f"the text was read again, {count} tokens"
    (shares,) = one.shares([8000])
    nats, even = re.findall(r"[\d.]+", facts["entropy"])
    assert float(nats) == pytest.approx(shares.entropy, rel=1e-2)
    assert float(even) == pytest.approx(100 * shares.evenness, abs=1)
    shares_shown = [one.text.split("\n")[0].split(" %")[0] for one in page.all(".bars.words li > span")]
    assert shares_shown[0] == percent(shares.first).removesuffix(" %")
    likely = lm.next_log_probs(text[:8001]).exp().topk(6).values.tolist()
    assert [one.text for one in page.all(".card .bars:not(.words) li > span")] == [percent(p) for p in likely]
    page.shot("attention-8000")


def test_a_text_that_pages_hold_is_not_read_again(page: Page, long_house: House) -> None:
    ids = model_of(long_house).tokenizer.encode(LINES[:700], eos=False)
    assert ask(long_house, body={"model": "chat", "prompt": ids, "max_tokens": 1})[0] == 200
    page.open("attention")
    page.look(LINES[:700])
    stored, computed = map(int, re.findall(r"\d+", page.facts(".numbers")["keys"]))
    assert stored >= PAGE
    assert 1 <= computed <= PAGE


def test_a_head_an_edge_and_a_span_are_cut(page: Page, long_house: House) -> None:
    lm, text = model_of(long_house), LINES[:180]
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
    likely = {token: None for one in (before, after) for token in one.topk(10).indices.tolist()}
    found = [
        page.script("return [arguments[0].firstChild.textContent, arguments[0].lastChild.textContent]", one)
        for one in page.all(".what-if .bars li > span")
    ]
    assert found == [[percent(math.exp(p[t])) for p in (after, before)] for t in [*likely][:12]]
    moved = float((before.exp() * (before - after)).sum())
    assert float(re.findall(r"[\d.e-]*\d", page.text(".what-if .lead"))[0]) == pytest.approx(moved, rel=2e-2)


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
        for name, value in zip(page.all(".controls input"), (m, n), strict=False):
            script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
            page.script(script, name, value)
        values.append(float(page.facts(".facts")["q · k"].split("= ")[1]))
    theta = 10000 ** (-8 / 32)
    assert values == pytest.approx([math.cos(d * theta + 0.55) for d in (6, 6, 7)], abs=1e-4)
    page.shot("rotary")


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
    assert page.one("#send").size["height"] == height  # one line, too


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


def test_keys_alone_ask_another_token(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open("attention")
    page.look(LINES[:60])
    query = page.one(".row-text .query")
    before = int(query.get_attribute("data-i"))
    query.send_keys(Keys.ARROW_LEFT)
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    row = "return document.querySelector('.row-text .query').dataset.i"  # in one step: rows are drawn again
    page.until(lambda: page.script(row) == str(before - 1))


def test_model_text_is_text(page: Page) -> None:
    hostile = (
        "<img src=x onerror=alert(1)> **bold** `code` [a](javascript:alert(1))\n\n"
        "- <script>alert(1)</script>\n\n```\n<b>\n```"
    )
    made = page.driver.execute_async_script(
        "const [text, done] = arguments; import('/page/markdown.js').then(({markdown}) => {"
        "const at = document.createElement('div'); at.append(...markdown(text)); document.body.append(at);"
        "done([at.textContent, [...at.querySelectorAll('*')].map((e) => e.localName)]); at.remove(); })",
        hostile,
    )
    assert {*made[1]} <= {"p", "strong", "code", "ul", "li", "pre"}
    assert "<img src=x onerror=alert(1)>" in made[0]
    assert "[a](javascript:alert(1))" in made[0]


def test_errors_are_told_and_a_key_is_asked_for(chromium: Any, locked_house: House, page: Page) -> None:
    there = Page(chromium, locked_house.url)
    there.say("hello")
    there.until(lambda: "key" in there.text("#alert"))
    there.until(lambda: there.one("#settings").get_property("open"))
    there.shot("error")
    there.put("#settings [name=key]", "secret")
    there.one("#settings .main").click()
    there.settings(max_tokens="3")
    assert there.one("#say").get_property("value") == "hello"  # what was not answered can be said again
    there.one("#send").click()
    there.until(lambda: len(there.all(".actions")) == 1 and len(there.all(".turn")) == 2)
    assert "secret" not in there.script("return JSON.stringify(localStorage)")
    chromium.get_log("browser")


def test_nothing_comes_from_elsewhere(page: Page, long_house: House) -> None:
    for view in VIEWS:
        page.open(view)
    asked = page.script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert asked
    assert all(url.startswith(long_house.url) for url in asked)
