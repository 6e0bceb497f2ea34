"""Texts that follow grammars over HTTP: requested in every form, and with bad intent."""

import time
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from tests.serve.conftest import House
from tests.serve.grammars import GRAMMARS, LM, SCHEMA

openai = pytest.importorskip("openai")


class City(BaseModel):
    name: Annotated[str, Field(max_length=9)]
    people: Annotated[int, Field(ge=0, le=999)]


def test_pydantic_models_are_parsed(client: Any) -> None:
    body = {
        "model": "small",
        "messages": [{"role": "user", "content": "a city"}],
        "seed": 8,
        "temperature": 0.4,
    }
    completion = client.chat.completions.parse(response_format=City, max_completion_tokens=400, **body)
    assert isinstance(completion.choices[0].message.parsed, City)
    assert completion.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"structured_outputs": {"regex": "[a-f]{9}"}}, "regex", "[a-f]{9}"),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "choice", ["one", "two"]),
        ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA),
        ({"structured_outputs": {"grammar": 'root ::= "a"+ "b"'}}, "grammar", 'root ::= "a"+ "b"'),
        ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}),
        ({"response_format": {"type": "text"}}, None, None),
    ],
)  # fmt: skip
def test_http_says_what_generate_says(
    client: Any, fields: dict[str, Any], kind: str | None, source: Any
) -> None:
    completion = client.completions.create(
        model="small", prompt="go", max_tokens=30, seed=3, n=3, extra_body=fields
    )
    grammar = None if kind is None else GRAMMARS.compile(kind, source)
    generations = LM.generate(["go"] * 3, grammar=grammar, seed=3, temperature=1.0, max_new_tokens=30)
    assert [choice.text for choice in completion.choices] == [generation.text for generation in generations]


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


CHOICES = [{"anyOf": [{"properties": {f"a{j}": {"const": i}}} for i in range(4)]} for j in range(12)]


@pytest.mark.parametrize(
    "asked",
    [
        {"json": nested(200)},
        {"json": nested(900)},
        {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
        {"json": {"enum": [f"value {i}" for i in range(20_000)]}},
        {"json": {"multipleOf": 99_999_989}},
        {"json": {"allOf": [{"multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)]}},
        {"json": {"allOf": CHOICES}},
        {"json": {"$ref": "#"}},
        {"json": {"$ref": "http://localhost:1/schema"}},
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
        {"json": {"type": "string", "pattern": "(?=a)"}},
        {"json": {"type": "integer", "minimum": -(10**30)}},
        {"json": "{"},
        {"json": {"not": {}}},
        {"regex": "(" * 20_000 + "a" + ")" * 20_000},
        {"regex": "a(?!b)"},
        {"regex": "a" * 70_000},
        {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
        {"grammar": "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(40)) + 'A40: "x"'},
        {"grammar": 'start: %json {"multiple\\u004ff": 99999989}'},
        {"grammar": "root ::= ("},
        {"choice": []},
        {"regex": "a", "choice": ["a"]},
        {"structural_tag": {}, "regex": 5},
    ],
    ids=lambda asked: str(asked)[:50],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_in_time(client: Any, asked: dict[str, Any]) -> None:
    start = time.process_time()
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            model="small", prompt="x", max_tokens=3, extra_body={"structured_outputs": asked}
        )
    assert time.process_time() - start < 5
    assert len(caught.value.body["message"]) < 2000


def test_formats_of_responses(client: Any) -> None:
    body = {"model": "small", "input": "go", "max_output_tokens": 16}
    number = {"type": "json_schema", "name": "a", "schema": {"const": 5}}
    assert client.responses.create(**body, text={"format": number}).output_text == "5"
    any_object = client.responses.create(**body, text={"format": {"type": "json_object"}}).output_text
    assert any_object.startswith("{")
    for form in ({"type": "yaml"}, {"type": "json_schema", "name": "a"}):
        with pytest.raises(openai.BadRequestError, match="response_format"):
            client.responses.create(**{**body, "text": {"format": form}})


def test_a_grammar_that_grows_too_large_fails_its_own_text(client: Any, house: House) -> None:
    broad = {"json": {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(1500)}}}
    with pytest.raises(openai.BadRequestError, match="no token is left to choose"):
        client.completions.create(
            model="small", prompt="x", max_tokens=30, extra_body={"structured_outputs": broad}
        )
    assert house.used() == 0
    assert client.completions.create(model="small", prompt="x", max_tokens=3).choices[0].text
