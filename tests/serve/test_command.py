"""`headway serve` as a process: what it prints, how it ends, and what it refuses."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from headway.checkpoints.adapters import save_adapter
from headway.nn import Adapter, Lora
from tests.serve.conftest import talker
from tests.serve.operation import api, command


def streams(url: str, **fields: Any) -> Iterator[str]:
    """Yields the lines of a streamed completion."""
    body = {"prompt": "go on", "max_tokens": 400, "seed": 1, "stream": True, **fields}
    request = Request(f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    request.add_header("X-Api-Key", "boss")
    with urlopen(request, timeout=30) as response:
        for line in response:
            yield line.decode().strip()


@pytest.mark.slow
def test_the_command_loads_says_drains_and_logs(tmp_path: Path) -> None:
    lm = talker()
    lm.save(tmp_path / "small")
    (tmp_path / "bad").mkdir()
    fresh = Adapter.fresh(lm.model, Lora(rank=2, alpha=4))
    save_adapter(tmp_path / "adapter", fresh, lm.spec)
    (tmp_path / "keys").write_text("boss name=me admin\n")
    places = [tmp_path / "small", tmp_path / "bad", "--alias", f"mine={tmp_path / 'small'}"]
    options = ["--adapter", f"tuned={tmp_path / 'adapter'}", "--keys", tmp_path / "keys", "--memory", "2"]
    options += ["--prefixes", tmp_path / "kept"]
    with command(*places, *options, "--ttl", "60", "--log", tmp_path / "log") as (process, printed):
        assert "mine is loaded" in printed
        assert "bad cannot be loaded" in printed
        url = api(printed)
        with urlopen(f"{url}/models", timeout=10) as response:
            states = {entry["id"]: entry["state"] for entry in json.load(response)["data"]}
        assert states == {"mine": "loaded", "bad": "failed", "tuned": "loaded"}
        lines = []
        for line in streams(url, model="tuned"):
            if not lines:
                process.send_signal(signal.SIGTERM)
            lines.append(line)
        assert "data: [DONE]" in lines
        assert process.wait(30) == 0
    assert len([*(tmp_path / "kept").glob("*/pages.safetensors")]) == 1
    records = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert records[-1]["models"] == ["tuned"]
    assert (records[-1]["status"], records[-1]["new_tokens"], records[-1]["key"]) == (200, 400, "me")


@pytest.mark.slow
def test_a_second_signal_ends_the_command_at_once(tmp_path: Path) -> None:
    talker().save(tmp_path / "small")
    with command(tmp_path / "small", "--on-demand") as (process, printed):
        lines = streams(api(printed), max_tokens=500)
        next(lines)
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(2) == -signal.SIGINT
        assert "data: [DONE]" not in [*lines]


@pytest.mark.slow
def test_the_command_refuses_what_cannot_be(tmp_path: Path) -> None:
    for arguments, reason in (
        ([tmp_path / "none"], "none cannot be loaded"),
        ([tmp_path, "--tls-cert", "x"], "go together"),
        ([tmp_path, "--host", "0.0.0.0"], "--without-key"),
        ([tmp_path, "--alias", "x"], "write NAME=MODEL"),
    ):
        with command(*arguments) as (process, printed):
            assert reason in printed
            assert process.wait(30) == 1
