"""A server of models with long contexts, and a browser that shows its page."""

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
    """Yields a server of a model that chats and one that continues texts."""
    worker, tokenizer = Worker(), byte_level()
    decoders = []
    for name, model_tokenizer in (("chat", tokenizer.with_chat_template("chatml")), ("plain", tokenizer)):
        lm = LanguageModel(
            small(LONG, context=16384, vocab=max(330, model_tokenizer.vocab_size)), model_tokenizer
        )
        decoders.append(Decoding(name, lm, worker, keep=1 << 24))
    with running(Models(placed(*decoders)), worker, keys=list(keys)) as house:
        yield house


@pytest.fixture(scope="module")
def long_house() -> Iterator[House]:
    yield from models()


@pytest.fixture(scope="module")
def locked_house() -> Iterator[House]:
    yield from models("secret")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A headless browser; the test fails if none is installed."""
    webdriver = pytest.importorskip("selenium.webdriver")
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if None in programs.values():
        pytest.fail("the page is tested in a browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--lang=en"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs["chromedriver"]))
    yield driver
    driver.quit()


@pytest.fixture
def page(chromium: Any, long_house: House) -> Iterator[Page]:
    """The page, in English and with nothing remembered; at the end the browser's log must hold no error."""
    chromium.get(f"{long_house.url}/page/icon.svg")
    chromium.execute_script("localStorage.clear(); sessionStorage.clear()")
    chromium.get_log("browser")
    yield Page(chromium, long_house.url)
    errors = [line["message"] for line in chromium.get_log("browser") if line["level"] == "SEVERE"]
    assert [line for line in errors if "status of 400" not in line] == []  # such errors are provoked by tests
