"""Templates around a text and between two: [CLS] a [SEP] b [SEP], <s> a </s></s> b </s>, <s> a, a </s>."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import Encoding, processors
from tokenizers import Tokenizer as Backend

from headway.errors import DataError
from headway.text.vocabulary import steps_of


@dataclass(frozen=True)
class Encoded:
    """One or two texts as a model reads them; each list has one entry per token.

    ids: token ids, those of the template included.
    token_types: 0 for the first text and its template tokens, 1 for the second if the template has types (BERT).
    offsets: (start, end) in characters of the token's own text, end excluded; None for tokens of the template.
    texts: 0 or 1, the text that a token is from; None for tokens of the template.
    """

    ids: list[int]
    token_types: list[int]
    offsets: list[tuple[int, int] | None]
    texts: list[int | None]

    @staticmethod
    def of(ids: list[int]) -> "Encoded":
        """Returns the encoding of one text of which only the ids are known."""
        return Encoded(ids, [0] * len(ids), [None] * len(ids), [0] * len(ids))


class Part(NamedTuple):
    """A token of the template (`token`), or the place of a text (`text`: 0 or 1), with its token type."""

    token: int | None
    text: int | None
    type: int


A, B = Part(None, 0, 0), Part(None, 1, 1)


@dataclass(frozen=True)
class Template:
    """The parts of one text and of two, in order."""

    single: tuple[Part, ...] = (A,)
    pair: tuple[Part, ...] = (A, B)

    @staticmethod
    def of(backend: Backend) -> "Template":
        """Returns the template of a tokenizer's post-processor. Raises DataError if two post-processors add tokens."""
        templates = [t for t in map(_read, steps_of(backend.post_processor)) if t is not None]
        if len(templates) > 1:
            raise DataError("this tokenizer.json has two post-processors that add tokens; one is expected")
        return templates[0] if templates else Template()

    @staticmethod
    def bert(cls: int, sep: int) -> "Template":
        """Returns [CLS] a [SEP], and [CLS] a [SEP] b [SEP] with token type 1 from b on."""
        first, end = Part(cls, None, 0), Part(sep, None, 0)
        return Template((first, A, end), (first, A, end, B, end._replace(type=1)))

    @property
    def prefix(self) -> tuple[int, ...]:
        """Ids before a single text."""
        return _tokens(self.single[: _slots(self.single)[0]])

    @property
    def suffix(self) -> tuple[int, ...]:
        """Ids after a single text."""
        return _tokens(self.single[_slots(self.single)[-1] + 1 :])

    def beginning(self, bos: int, begins: bool) -> "Template":
        """Returns the same template with `bos` before each text, or without it."""
        if begins == (self.prefix[:1] == (bos,)):
            return self
        if not begins:
            return self._without(bos)
        mark, second = Part(bos, None, 0), _slots(self.pair)[-1]
        between = mark._replace(type=self.pair[second].type)
        return Template((mark, *self.single), (mark, *self.pair[:second], between, *self.pair[second:]))

    def ending(self, eos: int, ends: bool) -> "Template":
        """Returns the same template with `eos` after each text, or without it."""
        if ends == (self.suffix[-1:] == (eos,)):
            return self
        if not ends:
            return self._without(eos)
        pair: list[Part] = []
        for part in self.pair:
            pair += [part] if part.text is None else [part, Part(eos, None, part.type)]
        return Template((*self.single, Part(eos, None, 0)), tuple(pair))

    def _without(self, token: int) -> "Template":
        single, pair = (tuple(p for p in parts if p.token != token) for parts in (self.single, self.pair))
        return Template(single, pair)

    def processor(self, backend: Backend) -> processors.TemplateProcessing:
        """Returns the template as a post-processor of the `tokenizers` library."""
        name = {
            p.token: str(backend.id_to_token(p.token))
            for p in (*self.single, *self.pair)
            if p.token is not None
        }
        single, pair = (
            [f"{name[p.token] if p.token is not None else ('$A', '$B')[p.text or 0]}:{p.type}" for p in parts]
            for parts in (self.single, self.pair)
        )
        tokens = [(text, token) for token, text in name.items()]
        return processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)

    def parts(self, texts: Sequence[Sequence[int]], *, bos: bool, eos: bool) -> list[Part]:
        """Returns the parts around `texts`; without `bos` nothing precedes the first, without `eos` nothing follows the
        last. A token that the first text begins with already is not put before it again."""
        parts = self.single if len(texts) == 1 else self.pair
        places = _slots(parts)
        first, last = (0 if bos else places[0]), (len(parts) if eos else places[-1] + 1)
        chosen = list(parts[first:last])
        if chosen and chosen[0].token is not None and list(texts[0][:1]) == [chosen[0].token]:
            del chosen[0]
        return chosen


BARE = Template((A,), (A, B._replace(type=0)))
"""A template that adds no tokens; two texts have the same token type."""


def fill(parts: Sequence[Part], encodings: Sequence[Encoding]) -> Encoded:
    """Fills the texts' encodings into their places in the parts."""
    encoded = Encoded([], [], [], [])
    for token, text, kind in parts:
        encoding = None if text is None else encodings[text]
        ids = [token] if encoding is None else list(encoding.ids)
        encoded.ids.extend(ids)  # type: ignore[arg-type]
        encoded.token_types.extend([kind] * len(ids))
        encoded.offsets.extend(
            [None] if encoding is None else [(int(a), int(b)) for a, b in encoding.offsets]
        )
        encoded.texts.extend([text] * len(ids))
    return encoded


def roles(backend: Backend) -> dict[str, int]:
    """Returns the ids of cls and sep if the post-processor is BERT's or RoBERTa's, which name them."""
    states = [state for state in steps_of(backend.post_processor) if "cls" in state]
    return {role: int(states[-1][role][1]) for role in ("cls", "sep")} if states else {}


def _read(state: dict[str, Any]) -> Template | None:
    kind = state["type"]
    if kind == "ByteLevel":
        return None
    if kind == "TemplateProcessing":
        ids = {name: token["ids"] for name, token in state["special_tokens"].items()}
        return Template(_parse(state["single"], ids), _parse(state["pair"], ids))
    if kind not in ("BertProcessing", "RobertaProcessing"):
        raise DataError(f"this tokenizer.json has a post-processor of type {kind}, which is not known")
    bert = Template.bert(state["cls"][1], state["sep"][1])
    if kind == "BertProcessing":
        return bert
    cls, _, sep = bert.single
    return Template(bert.single, (cls, A, sep, sep, B._replace(type=0), sep))


def _parse(pieces: list[dict[str, Any]], ids: dict[str, list[int]]) -> tuple[Part, ...]:
    parts: list[Part] = []
    for piece in pieces:
        ((kind, value),) = piece.items()
        if kind == "Sequence":
            parts.append(Part(None, "AB".index(value["id"]), value["type_id"]))
        else:
            parts.extend(Part(i, None, value["type_id"]) for i in ids[value["id"]])
    return tuple(parts)


def _slots(parts: Sequence[Part]) -> list[int]:
    return [i for i, part in enumerate(parts) if part.text is not None]


def _tokens(parts: Sequence[Part]) -> tuple[int, ...]:
    return tuple(part.token for part in parts if part.token is not None)
