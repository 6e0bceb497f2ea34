"""Two servers behind a router that knows prefixes (`vllm-router`), which clients see as one."""

import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.serve.conftest import House, serving, talker
from tests.serve.others import python_of

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.slow


@contextmanager
def routed(*houses: House, folder: Path) -> Iterator[str]:
    """The address of a router before these servers."""
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    python = python_of("router", "vllm-router==0.1.*")
    asked = [python.with_name("vllm-router"), "--host", "127.0.0.1", "--port", f"{ports[0]}"]
    asked += ["--policy", "cache_aware", "--prometheus-port", f"{ports[1]}"]
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen(
            [*asked, "--worker-urls", *(house.url for house in houses)], stdout=log, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{ports[0]}"
    try:
        until = time.monotonic() + 60
        while True:
            assert process.poll() is None, (folder / "router.log").read_text()[-3000:]
            assert time.monotonic() < until
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def test_texts_are_the_same_and_what_begins_alike_meets_its_prefix(tmp_path: Path) -> None:
    lm = talker()
    with serving() as one, serving() as two, routed(one, two, folder=tmp_path) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        cached = []
        for session in range(4):
            prompt = f"{session} the cat sat on the mat " * 8
            made = lm.generate(prompt, max_new_tokens=6)
            for _ in range(3):
                answer = client.completions.create(model="small", prompt=prompt, max_tokens=6, temperature=0)
                assert answer.choices[0].text == made.text
                cached.append(answer.usage.prompt_tokens_details.cached_tokens > 0)
            parts = client.completions.create(
                model="small", prompt=prompt, max_tokens=6, temperature=0, stream=True
            )
            assert "".join(part.choices[0].text for part in parts) == made.text
        client.close()
        assert cached == [False, True, True] * 4
        assert not one.worker.count
        assert not two.worker.count
