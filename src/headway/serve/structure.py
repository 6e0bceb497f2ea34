"""How requests say which texts may answer them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from headway.errors import ConfigError

Asked = tuple[str, Any]
"""A kind of grammar (`headway.serve.grammar.SOURCES`) and its source."""
ANY_OBJECT: Asked = "json", {"type": "object"}


class NamedSchema(BaseModel):
    """A JSON Schema of `response_format`; it holds whether `strict` or not."""

    model_config = ConfigDict(extra="allow")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's: any text, any JSON object, JSON of a schema."""

    model_config = ConfigDict(extra="allow")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def asked(self) -> list[Asked]:
        """The grammar that it asks for, if it asks for one. Raises ConfigError where the schema is missing."""
        if self.type == "json_object":
            return [ANY_OBJECT if self.schema_ is None else ("json", self.schema_)]
        if self.type == "text":
            return []
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise ConfigError("response_format: a schema is missing; give json_schema: {name, schema}")
        return [("json", self.json_schema.schema_)]


class StructuredOutputs(BaseModel):
    """vLLM's: a JSON Schema, a regular expression, texts to choose from, a grammar (Lark or GBNF), or any object."""

    model_config = ConfigDict(extra="allow")
    schema_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool = False

    @property
    def asked(self) -> list[Asked]:
        """The grammars that it asks for."""
        given = {"json": self.schema_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        found = [(kind, source) for kind, source in given.items() if source is not None]
        return [*found, *([ANY_OBJECT] if self.json_object else [])]


class Function(BaseModel):
    """A function that an answer may call; `parameters`: the JSON Schema of its arguments, which they follow where it
    is `strict`, and where a call is asked for."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(pattern=r"^[\w.:/-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _check(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        properties, required = (value or {}).get("properties", {}), (value or {}).get("required", [])
        if not (isinstance(properties, dict) and isinstance(required, list)):
            raise ValueError("properties is an object of schemas, and required a list of their names")
        if not all(isinstance(one, dict | bool) for one in properties.values()):
            raise ValueError("properties: each is a schema")
        return value


class Tool(BaseModel):
    """A function among `tools`, or the one that `tool_choice` names."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: Function
