"""A model, its grammars, and a schema for texts."""

from headway.serve.grammar import Grammars
from tests.serve.conftest import talker

LM = talker()
GRAMMARS = Grammars(LM.need_tokenizer(), LM.spec.vocab, LM.eos)


NUMBERS = {"type": "array", "items": {"type": "integer"}, "maxItems": 4}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "n": NUMBERS},
    "required": ["city", "n"],
    "additionalProperties": False,
}
