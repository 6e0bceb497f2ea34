"""A server of models with long contexts, and a browser that has its page open."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from headway.api import LanguageModel
from headway.patterns import Causal, Sink, Window
from headway.serve.models import Models
from headway.serve.served import Decoding
from headway.serve.worker import Worker
from tests.generate.conftest import small
from tests.serve.conftest import House, placed, running
from tests.serve.page.driven import Page
from tests.text.conftest import byte_level

LONG = (Window.last(100) | Causal() & Sink(4), Causal())


def models(*keys: str) -> Iterator[House]:
    """A model that chats and one that continues texts."""
    worker, tokenizer = Worker(), byte_level()
    made = []
    for name, own in (("chat", tokenizer.with_chat_template("chatml")), ("plain", tokenizer)):
        lm = LanguageModel(small(LONG, context=16384, vocab=max(330, own.vocab_size)), own)
        made.append(Decoding(name, lm, worker, keep=1 << 24))
    with running(Models(placed(*made)), worker, keys=list(keys)) as house:
        yield house


@pytest.fixture(scope="module")
def long_house() -> Iterator[House]:
    yield from models()


@pytest.fixture(scope="module")
def locked_house() -> Iterator[House]:
    yield from models("secret")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A browser without a window; the test fails where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver")
    found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if None in found.values():
        pytest.fail("the page is tested in a browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = found["chromium"]
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--lang=en"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(found["chromedriver"]))
    yield driver
    driver.quit()


@pytest.fixture
def page(chromium: Any, long_house: House) -> Iterator[Page]:
    """In English, and with nothing remembered; nothing may have failed in it."""
    chromium.get(f"{long_house.url}/page/icon.svg")
    chromium.execute_script("localStorage.clear(); sessionStorage.clear()")
    chromium.get_log("browser")
    yield Page(chromium, long_house.url)
    said = [line["message"] for line in chromium.get_log("browser") if line["level"] == "SEVERE"]
    assert [line for line in said if "status of 400" not in line] == []  # an error that was asked for
