"""Suites of others: the tests of OpenAI's client for what is served here, strict; schemathesis on our own schema."""

import os
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.serve.conftest import House
from tests.serve.encoders import encoder, serving_encoders, words
from tests.serve.others import python_of, sources_of
from tests.serve.test_guard import ask

OPENAI = "3.54.0"
SERVED = {
    "test_completions.py": "create and not all_params",
    "chat/test_completions.py": "create and not all_params",
    "test_models.py": "not delete",
    "test_responses.py": "create and not all_params",
    "test_embeddings.py": "create and (all_params or loose)",
}
"""Their files, and which of their tests. Those with all parameters send nonsense (`best_of: 0`, a bias of the id
`foo`); others ask for completions that are stored, or delete models. A strict client asks for embeddings in base64
unless told otherwise, and refuses the base64 that it gets."""
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_the_tests_of_openais_client(name: str, tmp_path: Path) -> None:
    sources = sources_of("openai", OPENAI)
    file = sources / "tests" / "api_resources" / name
    plugins = ("pytest", "pytest-asyncio", "pytest-xdist", "rich", "inline-snapshot", "Pillow")
    python = python_of("openai-tests", f"openai[aiohttp]=={OPENAI}", *plugins)
    asked = [
        python,
        "-m",
        "pytest",
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-k",
        SERVED[name],
        file,
    ]
    models = {*re.findall(r'model="([^"]+)"', file.read_text()), "gpt-6-astra"}
    embedder = encoder("embedder", words(tmp_path), dimensions=[1])
    encoders = {model: embedder for model in models if "embedding" in model}
    with serving_encoders(encoders, decoders=sorted(models - encoders.keys())) as house:
        environment = {**os.environ, "TEST_API_BASE_URL": f"{house.url}/v1", "PYTHONPATH": ""}
        done = subprocess.run(asked, cwd=sources, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_schemathesis_finds_no_fault_and_nothing_undeclared(house: House, tmp_path: Path) -> None:
    python = python_of("schemathesis", "schemathesis==4.32")
    asked = [python.with_name("schemathesis"), "run", f"{house.url}/openapi.json", "--checks", CHECKS]
    more = ["--max-examples", "50", "--seed", "1", "--request-timeout", "30"]
    done = subprocess.run([*asked, *more], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert not house.worker.count


def test_what_may_be_answered_is_declared(house: House) -> None:
    paths = ask(house, "/openapi.json", method="GET")[1]["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            declared = {*operation["responses"]}
            assert {"400", "401", "403", "404", "413", "429", "499", "500", "503"} <= declared, path
            assert "422" not in declared
    kinds = paths["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert {*kinds} == {"application/json", "text/event-stream"}


def test_a_wrong_method_is_told_the_right_one(house: House) -> None:
    with pytest.raises(urllib.error.HTTPError) as told:
        urllib.request.urlopen(urllib.request.Request(f"{house.url}/health", method="DELETE"))
    assert (told.value.code, told.value.headers["allow"]) == (405, "GET")
    told.value.close()
