"""Two servers that clients see as one: behind a router that knows prefixes (`vllm-router`), and as replicas of Ray
Serve (`recipes/ray_serve.py`)."""

import os
import signal
import site
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.serve.conftest import serving, talker
from tests.serve.others import python_of

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[2]


@contextmanager
def begun(command: Sequence[str | Path], port: int, folder: Path, **environment: str) -> Iterator[str]:
    """Runs a server's command; yields its address once it answers at a port."""
    log, url = folder / "log", f"http://127.0.0.1:{port}"
    with log.open("wb") as log_file:
        variables = os.environ | environment
        process = subprocess.Popen(
            command, env=variables, stdout=log_file, stderr=subprocess.STDOUT, preexec_fn=_interruptible
        )
    try:
        deadline = time.monotonic() + 300
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _interruptible() -> None:
    """Restores the default of SIGINT, which the background jobs of a shell and their children ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def stored(url: str, session: int) -> list[bool]:
    """Returns for three equal requests of a session whether the prompt was stored; texts are the Python API's."""
    prompt = f"{session} the cat sat on the mat " * 8
    text, fields = talker().generate(prompt, max_new_tokens=6).text, {"model": "small", "prompt": prompt}
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, default_headers={"X-Session-Id": f"{session}"}
    ) as client:
        hits = []
        for _ in range(3):
            answer = client.completions.create(**fields, max_tokens=6, temperature=0)
            assert answer.choices[0].text == text
            hits.append(answer.usage.prompt_tokens_details.cached_tokens > 0)
        parts = client.completions.create(**fields, max_tokens=6, temperature=0, stream=True)
        assert "".join(part.choices[0].text for part in parts) == text
    return hits


def test_texts_are_the_same_and_what_begins_alike_meets_its_prefix(tmp_path: Path) -> None:
    router = python_of("router", "vllm-router==0.1.*").with_name("vllm-router")
    port, flags = free_port(), ["--policy", "cache_aware", "--prometheus-port", f"{free_port()}"]
    with serving() as first, serving() as second:
        command = [
            router,
            "--host",
            "127.0.0.1",
            "--port",
            f"{port}",
            *flags,
            "--worker-urls",
            first.url,
            second.url,
        ]
        with begun(command, port, tmp_path) as url:
            assert [stored(url, session) for session in range(4)] == [[False, True, True]] * 4
        for house in (first, second):
            assert not house.worker.count


def test_replicas_of_ray_serve_keep_their_sessions(tmp_path: Path) -> None:
    """Ray Serve is in an environment of its own, with our packages first in the path."""
    talker().save(tmp_path / "small")
    python, port = python_of("ray", "ray[serve]==2.60.*"), free_port()
    command = [python, ROOT / "recipes" / "ray_serve.py", "2", f"{port}", tmp_path / "small"]
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *site.getsitepackages()]),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with begun(command, port, tmp_path, **variables) as url:
        assert [stored(url, session) for session in range(4)] == [[False, True, True]] * 4
        # of other sessions with the same prompt, some go to the other replica
        prompt = {"model": "small", "prompt": "0 the cat sat on the mat " * 8, "max_tokens": 1}
        assert {elsewhere(url, prompt, session) for session in range(100, 116)} == {False, True}


def elsewhere(url: str, prompt: dict[str, object], session: int) -> bool:
    """Returns whether a session is served by a replica that has not stored a prompt."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(**prompt, extra_headers={"X-Session-Id": f"{session}"})
    return not answer.usage.prompt_tokens_details.cached_tokens
