"""Test suites of others: those of OpenAI's client for what is served here, run strictly; schemathesis on our schema."""

import os
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.serve.conftest import House
from tests.serve.encoders import encoder, serving_encoders, words
from tests.serve.others import python_of, sources_of
from tests.serve.test_guard import ask

OPENAI = "3.54.0"
MADE = "test_(method|raw_response|streaming_response)_"
NONSENSE = {
    f"{MADE}create_with_all_params": "nonsense is asked for: best_of 0, a bias of the id foo, tools of theirs"
}
KEPT = "answers are not kept, so that they are neither listed, nor read, changed, ended or deleted"
SERVED: dict[str, dict[str, str]] = {
    "test_completions.py": NONSENSE,
    "chat/test_completions.py": {**NONSENSE, f"{MADE}(retrieve|update|list|delete)": KEPT},
    "test_models.py": {f"{MADE}delete": "models are folders of whoever serves them"},
    "test_responses.py": {**NONSENSE, f"{MADE}(retrieve|delete|cancel|compact)": KEPT},
    "responses/test_input_tokens.py": {
        f"{MADE}count_with_all_params": "a conversation that is kept, and a response before it, are asked for"
    },
    "test_embeddings.py": {
        rf"{MADE}create\[(strict|aiohttp)\]": "unless told otherwise the client asks for base64, and decodes it; when "
        "it is strict (as theirs with aiohttp is), it refuses the text that it gets before that"
    },
}
"""Test files of theirs for what is served here; reasons why some tests do not pass, by patterns of the tests' names."""
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_the_tests_of_openais_client_pass_or_have_a_reason(name: str, tmp_path: Path) -> None:
    sources, report = sources_of("openai", OPENAI), tmp_path / "report.xml"
    file = sources / "tests" / "api_resources" / name
    plugins = ("pytest", "pytest-asyncio", "pytest-xdist", "rich", "inline-snapshot", "Pillow")
    python = python_of("openai-tests", f"openai[aiohttp]=={OPENAI}", *plugins)
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        file,
    ]
    models = {*re.findall(r'model="([^"]+)"', file.read_text())} or {"gpt-6-astra"}
    embedder = encoder("embedder", words(tmp_path), dimensions=[1])
    encoders = {model: embedder for model in models if "embedding" in model}
    with serving_encoders(encoders, decoders=sorted(models - encoders.keys())) as house:
        environment = {**os.environ, "TEST_API_BASE_URL": f"{house.url}/v1", "PYTHONPATH": ""}
        result = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True)
    passed, failed = set[str](), set[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = failed if case.findall("failure") + case.findall("error") else passed
        outcomes.add(f"{case.get('name')} {case.get('classname')}")
    assert passed, result.stdout[-5000:]
    explained = {case for case in passed | failed for reason in SERVED[name] if re.match(reason, case)}
    assert sorted(failed - explained) == [], result.stdout[-5000:]
    assert sorted(explained & passed) == [], "these pass, and need no reason any longer"
    for reason in SERVED[name]:
        assert any(re.match(reason, case) for case in failed), f"{reason} is no test of theirs"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_schemathesis_finds_no_fault_and_nothing_undeclared(house: House, tmp_path: Path) -> None:
    python = python_of("schemathesis", "schemathesis==4.32")
    command = [python.with_name("schemathesis"), "run", f"{house.url}/openapi.json", "--checks", CHECKS]
    options = ["--max-examples", "50", "--seed", "1", "--request-timeout", "30"]
    result = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-5000:]
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
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(f"{house.url}/health", method="DELETE"))
    assert (caught.value.code, caught.value.headers["allow"]) == (405, "GET")
    caught.value.close()
