"""`headway serve --demo`: the demo's model is served and the page is opened."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from headway.cli.serve import ServerRun, command
from headway.errors import ConfigError
from tests.serve.conftest import talker


def test_without_a_demo_it_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="headway demo"):
        command(ServerRun(), demo=True)
    with pytest.raises(ConfigError, match="--demo"):
        command(ServerRun())


@pytest.mark.slow
def test_the_page_is_opened(tmp_path: Path) -> None:
    talker().save(tmp_path / "runs" / "demo")
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", "serve", "--demo", "--port", "0"],
        cwd=tmp_path,
        env={**os.environ, "BROWSER": f"{browser} %s"},
    )
    try:
        opened, deadline = tmp_path / "opened", time.monotonic() + 120
        while not (opened.exists() and opened.read_text().strip()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with urlopen(opened.read_text().strip()) as answer:
            assert b"/page/main.js" in answer.read()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
