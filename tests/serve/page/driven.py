"""A page that is open in a browser, and the numbers that it must show."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHOTS = Path(__file__).parents[3] / "runs" / "page"


class Page:
    """An open page."""

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
        elements: list[Any] = self.driver.find_elements("css selector", selector)
        return elements

    def one(self, selector: str) -> Any:
        self.until(lambda: self.all(selector))
        return self.all(selector)[0]

    def text(self, selector: str) -> str:
        """Returns the text of the first element that matches, or "" if there is none."""
        content: str = self.script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        return content

    def script(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def put(self, selector: str, text: str) -> None:
        """Pastes a text into a field."""
        paste = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))"
        self.script(paste, self.one(selector), text)

    def until(self, holds: Callable[[], Any], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.script("return document.body.innerText")
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
        """Waits until the requested row is shown."""
        self.until(
            lambda: self.all(".row-text") and self.one(".inspector").get_attribute("aria-busy") != "true"
        )

    def shot(self, name: str) -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(SHOTS / f"{name}.png"))

    def facts(self, selector: str) -> dict[str, str]:
        """Returns the names and values of a list of facts."""
        script = (
            "return [...document.querySelectorAll(`${arguments[0]} .fact`)].map((one) =>"
            "[one.querySelector('dt').textContent, one.querySelector('dd').textContent])"
        )
        return dict(self.script(script, selector))


def percent(share: float) -> str:
    if share >= 0.1:
        return f"{100 * share:.0f} %"
    return f"{100 * share:.1f} %" if share >= 0.001 else "< 0.1 %" if share > 0 else "0 %"


LINES = "".join(f"line {n}: the cat sat on the mat, and the dog on the log.\n" for n in range(400))
