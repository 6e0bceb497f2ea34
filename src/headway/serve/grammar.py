"""Grammars that constrain generated text, as given in requests: JSON Schemas, regular expressions, context-free
grammars and choices, matched by llguidance over the bytes of the model's tokens.

A grammar is compiled once per model and copied for each sequence. The mask of tokens that may come next is computed in
a thread of its own, while the model processes the last token. The size of a grammar is bounded, and llguidance bounds
its own work except for `multipleOf`, whose automata have as many states as the number.

Legend: V vocab.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from pydantic import BaseModel, Field, field_validator
from torch import Tensor

from headway.errors import ConfigError, as_error
from headway.text import Tokenizer

MOST_BYTES, MOST_DEPTH, MOST_MULTIPLE, MOST_KEPT = 1 << 16, 100, 10_000, 64
"""Bounds of a grammar: bytes of its source, nesting depth, least common multiple of its `multipleOf`; and the number of
compiled grammars that are cached."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000, max_grammar_size=100_000, max_lexer_states=50_000, verbose_errors=False
)
WHITESPACE = {"whitespace_pattern": r"\n {0,32}|[ ]"}
"""White space between JSON tokens: none, a space, or a line break with indentation. It is bounded, so that a model
cannot emit white space forever."""
Asked = tuple[str, Any]
"""A requested grammar: its kind (a key of `SOURCES`) and its source."""
ANY_OBJECT: Asked = "json", {"type": "object"}


@lru_cache(1)
def _thread(process: int) -> ThreadPoolExecutor:
    """Returns the thread that computes token masks. The argument is the process id: a forked process lacks its parent's
    threads and starts its own."""
    return ThreadPoolExecutor(1, "headway-grammar")


class NamedSchema(BaseModel, extra="allow"):
    """The JSON Schema of a `response_format`. It is enforced whether `strict` or not."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(BaseModel, extra="allow"):
    """OpenAI's `response_format`: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def asked(self) -> list[Asked]:
        """The requested grammar as a list of one; empty if any text is allowed. Raises ConfigError if the schema is
        missing."""
        if self.type == "json_object":
            return [ANY_OBJECT if self.schema_ is None else ("json", self.schema_)]
        if self.type == "text":
            return []
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise ConfigError("response_format: the schema is missing; give json_schema: {name, schema}")
        return [("json", self.json_schema.schema_)]


class StructuredOutputs(BaseModel, extra="allow"):
    """vLLM's `structured_outputs`: a JSON Schema, a regular expression, a choice of texts, a grammar (Lark or GBNF), or
    any JSON object."""

    schema_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool = False

    @property
    def asked(self) -> list[Asked]:
        """The requested grammars."""
        sources = {"json": self.schema_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        grammars = [(kind, source) for kind, source in sources.items() if source is not None]
        return [*grammars, *([ANY_OBJECT] if self.json_object else [])]


class Function(BaseModel, extra="allow"):
    """A function that the model may call.

    parameters: JSON Schema of its arguments, enforced if the function is `strict` or if the request demands a call.
    """

    name: str = Field(pattern=r"^[\w.:/-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _check(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        properties, required = (value or {}).get("properties", {}), (value or {}).get("required", [])
        if not (isinstance(properties, dict) and isinstance(required, list)):
            raise ValueError("properties must be an object of schemas, and required a list of names")
        if not all(isinstance(schema, dict | bool) for schema in properties.values()):
            raise ValueError("properties: each value must be a schema (an object or a boolean)")
        return value


class Tool(BaseModel, extra="allow"):
    """A function in `tools`, or the one that `tool_choice` names."""

    type: Literal["function"]
    function: Function


def _of_schema(schema: Any) -> str:
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(schema, dict):
            raise ConfigError(f"grammar: a JSON Schema must be an object, got {json.dumps(schema)[:40]}")
        check_schema(schema)
        return LLMatcher.grammar_from_json_schema(schema, overrides=WHITESPACE)  # type: ignore[arg-type]
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"grammar: invalid JSON Schema: {error}") from None


def _of_rules(text: str) -> str:
    if "%json" in text:
        raise ConfigError("grammar: %json is not allowed; use response_format or structured_outputs.json")
    with as_error(ConfigError, "grammar: neither valid Lark nor GBNF", Exception):
        return LLMatcher.grammar_from_lark(any_to_lark(text))


SOURCES: dict[str, Callable[[Any], str]] = {
    "json": _of_schema,
    "regex": LLMatcher.grammar_from_regex,
    "choice": lambda texts: LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, texts))}"),
    "grammar": _of_rules,
    "lark": LLMatcher.grammar_from_lark,
}
"""Kind of a source -> its conversion for llguidance. "grammar" is Lark or GBNF by the client; "lark" is our own
Lark."""


def check_schema(schema: Any) -> None:
    """Raises ConfigError for a JSON Schema that is nested too deeply, or whose `multipleOf` would take too long."""
    multiple, stack = 1, [(schema, 1)]
    while stack:
        value, depth = stack.pop()
        if depth > MOST_DEPTH:
            raise ConfigError(
                f"grammar: the schema is nested deeper than {MOST_DEPTH} levels; move parts to $defs"
            )
        if isinstance(value, dict):
            step = value.get("multipleOf")
            if isinstance(step, int | float) and step is not True and 0 < step < math.inf:
                # the number without its decimal point: 0.25 has digits 25 and exponent -2, and counts as 25;
                # normalized, 2000.0 has digits 2 and exponent 3, and counts as 2000
                _, digits, exponent = Decimal(str(step)).normalize().as_tuple()
                whole = int("".join(map(str, digits))) * 10 ** max(int(exponent), 0)
                multiple = math.lcm(multiple, whole)
                if multiple > MOST_MULTIPLE:
                    raise ConfigError(
                        f"grammar: multipleOf {step}: the least common multiple of all multipleOf, without decimal "
                        f"points, exceeds {MOST_MULTIPLE}; leave some out"
                    )
            stack += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list):
            stack += [(inner, depth + 1) for inner in value]


class Grammars:
    """The grammars of a model. Raises ConfigError if the tokens of its tokenizer are not bytes.

    vocab: V.   eos: ids that may end a sequence where its grammar permits an end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos: Sequence[int]) -> None:
        if tokenizer.table is None:
            raise ConfigError(
                "grammar: not supported, since this model's tokens are words, not bytes; leave it out"
            )
        self._spelling = _Spelling(tokenizer, vocab)
        self._tokenizer = LLTokenizer(self._spelling, eos_token=[*eos] or None)  # type: ignore[arg-type]
        self._spelling.greedy, self._vocab = self._tokenizer.greedy_tokenize, vocab
        self._compiled = lru_cache(MOST_KEPT)(self._compile)

    def compile(self, kind: str, source: Any, *, within: str = "") -> "CompiledGrammar":
        """Compiles a source of a kind in `SOURCES`. `within` is Lark that refers to it as @answer.

        Raises ConfigError, with llguidance's reason, if the grammar is invalid, too large, or matches no text."""
        written = SOURCES[kind](source)
        if len(written) + len(within) > MOST_BYTES:
            raise ConfigError(
                f"grammar: {len(written) + len(within):,} bytes exceed the limit of {MOST_BYTES:,}"
            )
        return self._compiled(written, within)

    def _compile(self, written: str, within: str) -> "CompiledGrammar":
        if within:
            (inner,) = json.loads(written)["grammars"]
            written = json.dumps({"grammars": [{"lark_grammar": within}, {**inner, "name": "answer"}]})
        matcher = LLMatcher(self._tokenizer, written, log_level=0, limits=LIMITS)
        first = None if matcher.is_error() else allowed(matcher, self._vocab)
        reason = matcher.get_error().partition("\n<")[0].strip()[:300]
        if first is None or (reason and "NoExtension" not in reason):
            raise ConfigError(f"grammar: cannot be compiled: {reason}; change or simplify it")
        if not first.any() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise ConfigError("grammar: no sequence of this model's tokens matches it; loosen it")
        beginning: Future[Tensor] = Future()
        beginning.set_result(first)
        return CompiledGrammar(matcher, beginning, self._vocab)


class _Spelling:
    """A tokenizer with the interface that llguidance expects."""

    is_tokenizer_wrapper, eos_token_id, bos_token_id = True, None, None

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        assert tokenizer.table is not None
        self._tokenizer, self._bytes = tokenizer, tokenizer.table.bytes_of
        self.tokens = [self._bytes.get(i, b"") for i in range(vocab)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.greedy: Callable[[str], list[int]] = lambda text: []

    def __call__(self, text: str) -> list[int]:
        """Returns the ids of a piece as in the middle of a text; falls back on greedy tokenization if their bytes are
        not those of the piece."""
        ids = self._tokenizer.encode_pieces(["x", self._tokenizer.escape(text), "x"])[1]
        return ids if b"".join(map(self._bytes.__getitem__, ids)) == text.encode() else self.greedy(text)


class CompiledGrammar:
    """The state of one sequence in its grammar (implements `headway.generate.config.Grammar`)."""

    ended = False
    """Whether nothing but an EOS can follow."""

    def __init__(self, matcher: LLMatcher, mask: Future[Tensor], vocab: int) -> None:
        self._matcher, self._mask, self._vocab = matcher, mask, vocab

    def allowed(self) -> Tensor:
        """Returns the mask of tokens that may come next: bool [V]."""
        return self._mask.result()

    def advance(self, token: int) -> None:
        """Advances by one token and starts computing the mask of the next."""
        self._mask.result()
        self.ended = self._matcher.consume_token(token) and self._matcher.is_stopped()
        self._mask = _thread(os.getpid()).submit(partial(allowed, self._matcher, self._vocab))

    def copy(self) -> "CompiledGrammar":
        """Returns a copy of the state, for another sequence."""
        self._mask.result()
        return CompiledGrammar(self._matcher.deep_copy(), self._mask, self._vocab)


def allowed(matcher: LLMatcher, vocab: int) -> Tensor:
    """Returns the mask of tokens that may come next: bool [V]; all False if the matcher failed."""
    if matcher.is_error():
        return torch.zeros(vocab, dtype=torch.bool)
    # one bit per token, the lowest first: the byte 0b101 allows tokens 0 and 2
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    mask = torch.from_numpy(np.unpackbits(bits, bitorder="little")[:vocab].view(np.bool_))
    return torch.zeros_like(mask) if matcher.is_error() else mask
