"""Unmodified clients that people use: what they read from an answer is what the Python API gives."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.api import LanguageModel
from headway.serve.models import Models
from headway.serve.served import Decoding
from headway.serve.worker import Worker
from tests.integrations.test_lm_eval import CHOICE, QUESTIONS, ROLLING, TEXTS
from tests.serve.conftest import House, placed, running, serving, talker
from tests.serve.others import python_of

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.slow

SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the cat sat"}]
BEGIN = "import json, sys\nurl, said = sys.argv[1], json.loads(sys.argv[2])\n"
PROGRAMS = {
    "litellm": """
import litellm
how = dict(model="openai/small", api_base=url, api_key="none", messages=said, temperature=0, max_tokens=12)
whole = litellm.completion(**how).choices[0].message.content
parts = [part.choices[0].delta.content or "" for part in litellm.completion(stream=True, **how)]
""",
    "langchain": """
from langchain_openai import ChatOpenAI
model = ChatOpenAI(model="small", base_url=url, api_key="none", temperature=0, max_tokens=12)
pairs = [(one["role"], one["content"]) for one in said]
whole = model.invoke(pairs).content
parts = [part.content for part in model.stream(pairs)]
""",
    "llama-index": """
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
model = OpenAILike(
    model="small", api_base=url, api_key="none", is_chat_model=True, temperature=0, max_tokens=12, context_window=512
)
pairs = [ChatMessage(role=one["role"], content=one["content"]) for one in said]
whole = model.chat(pairs).message.content
parts = [part.delta or "" for part in model.stream_chat(pairs)]
""",
}
AGENTS = "agents", "openai-agents==0.24.*"
ONE_AGENT = """
import asyncio
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)

async def main():
    model = OpenAIResponsesModel(model="small", openai_client=AsyncOpenAI(base_url=url, api_key="none"))
    settings = ModelSettings(temperature=0, extra_body={"logit_bias": said[2]})
    agent = Agent(name="agent", instructions=said[0]["content"], model=model, model_settings=settings)
    whole = (await Runner.run(agent, said[1]["content"])).final_output
    stream, parts = Runner.run_streamed(agent, said[1]["content"]), []
    async for event in stream.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            parts.append(event.data.delta)
    return whole, parts

whole, parts = asyncio.run(main())
"""
"""An agent of the openai-agents package, which uses /v1/responses."""
TWO_AGENTS = """
import asyncio
from typing import Literal
from pydantic import BaseModel
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)
cities = []

class Answer(BaseModel):
    is_there: bool

@function_tool
def find(city: Literal["Paris", "Rome"]) -> str:
    cities.append(city)
    return f"a cat in {city}"

async def main():
    model = OpenAIResponsesModel(model="small", openai_client=AsyncOpenAI(base_url=url, api_key="none"))
    settings = ModelSettings(temperature=0, max_tokens=300, tool_choice="required", parallel_tool_calls=False)
    more = dict(model=model, model_settings=settings)
    finder = Agent(name="finder", instructions="Find.", tools=[find], output_type=Answer, **more)
    sender = Agent(name="sender", instructions="Send.", handoffs=[finder], **more)
    whole = await Runner.run(sender, said)
    stream, names, parts = Runner.run_streamed(sender, said), [], []
    async for event in stream.stream_events():
        if event.type == "run_item_stream_event":
            names.append(event.name)
        elif event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            parts.append(event.data.delta)
    more = [*whole.to_input_list(), {"role": "user", "content": "Once more."}]
    again = await Runner.run(whole.last_agent, more)
    outputs = [item["output"] for item in again.to_input_list() if item.get("type") == "function_call_output"]
    answers = [run.final_output.is_there for run in (whole, stream, again)]
    answers.append(Answer.model_validate_json("".join(parts)).is_there)
    print(json.dumps([whole.last_agent.name, whole.context_wrapper.usage.requests, names, cities, outputs, answers]))

asyncio.run(main())
"""
"""One agent hands over to another, which calls a function and reads its result; this is streamed, and continued."""
END = "print(json.dumps([whole, ''.join(parts)]))\n"


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with serving() as running_house:
        yield running_house


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return talker()


def test_an_agent_asks_for_responses(house: House, lm: LanguageModel) -> None:
    """The client refuses truncated answers, so the end token gets the smallest bias with which an answer ends."""
    (end, *_) = lm.eos
    attempts = ((bias, lm.chat(SAID, max_new_tokens=48, bias={end: bias})) for bias in range(1, 100))
    bias, expected = next((bias, reply) for bias, reply in attempts if reply.finish_reason == "eos")
    assert expected.text
    arguments = [*SAID, {f"{end}": bias}]
    assert told(python_of(*AGENTS), ONE_AGENT + END, house, arguments) == [expected.text] * 2


def test_agents_hand_over_call_functions_and_go_on() -> None:
    worker = Worker(256)
    models = Models(placed(Decoding("small", talker(context=4096), worker, keep=1 << 24)))
    with running(models, worker) as house:
        agent, requests, names, cities, outputs, answers = told(
            python_of(*AGENTS), TWO_AGENTS, house, "the cat sat"
        )
    assert (agent, requests) == ("finder", 3)
    assert names == [
        "handoff_requested",
        "handoff_occured",
        "tool_called",
        "tool_output",
        "message_output_created",
    ]
    assert len(cities) == 3  # of the whole answer, the stream, and the one more turn
    assert cities[0] == cities[1]
    assert outputs[1:] == [
        f"a cat in {city}" for city in (cities[0], cities[2])
    ]  # the first is the hand-over's
    assert answers[0] == answers[1] == answers[3]
    assert {*map(type, answers)} == {bool}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_conversation(name: str, house: House, lm: LanguageModel) -> None:
    packages = "litellm", "langchain-openai", "llama-index-llms-openai-like"
    check_conversation(python_of("clients", *packages), PROGRAMS[name], house, lm)


def check_conversation(python: Path, program: str, house: House, lm: LanguageModel) -> None:
    """A program prints the reply twice, whole and streamed; both are the Python API's."""
    assert told(python, program + END, house, SAID) == [lm.chat(SAID, max_new_tokens=12).text] * 2


def told(python: Path, program: str, house: House, arguments: Any) -> Any:
    """Returns what a program prints in its last line."""
    command = [python, "-c", BEGIN + program, f"{house.url}/v1", json.dumps(arguments)]
    environment = {**os.environ, "PYTHONPATH": "", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_lm_eval_measures_what_headway_eval_does(house: House, lm: LanguageModel, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    lm.save(tmp_path / "model")
    (tmp_path / "tasks").mkdir()
    for name, template, rows in (
        ("own_choice", CHOICE, QUESTIONS),
        ("own_rolling", ROLLING, [{"text": text} for text in TEXTS]),
    ):
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = template.format(name=name, file=data, delimiter=" ")
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text)
    command = [
        sys.executable,
        "-m",
        "headway",
        "eval",
        tmp_path / "model",
        "--harness",
        "own_choice,own_rolling",
    ]
    options = ["--tasks", tmp_path / "tasks", "--json"]
    ours = json.loads(subprocess.run([*command, *options], capture_output=True, text=True, check=True).stdout)
    for name in ("own_choice", "own_rolling"):
        theirs = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": "small",
                "base_url": f"{house.url}/v1/completions",
                "tokenizer": str(tmp_path / "model"),
                "tokenizer_backend": "huggingface",  # the backend that asks the server takes id 0 for none
                "num_concurrent": 4,
                "max_length": 512,
                "add_bos_token": name == "own_choice",  # rolling requests have the token in front already
            },
            tasks=[name],
            task_manager=TaskManager(include_path=str(tmp_path / "tasks")),
        )["results"][name]
        measured = {
            key: value for key, value in theirs.items() if key.endswith(",none") and "stderr" not in key
        }
        assert measured == pytest.approx({key: ours["results"][name][key] for key in measured}, rel=1e-4)
        assert len(measured) == 2
