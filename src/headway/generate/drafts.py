"""Drafts: guesses at the next tokens of a text, cheap enough that the model only has to confirm them.

Two of them: what followed the same words earlier in the text (`NgramDraft`), and what a smaller model would say
(`ModelDraft`). What is done with them is said in `headway.generate.speculation`.

Legend: R rows, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from headway.cache import PageTable
from headway.errors import ConfigError
from headway.generate.constraints import Text
from headway.generate.reader import Reader
from headway.generate.requests import Request
from headway.generate.sampling import check_logits
from headway.generate.sequences import choose_tokens
from headway.models import Decoder


class DraftSession(Protocol):
    """The drafts of texts that grow together, and come and go; the number of its request says which a text is."""

    def propose(self, texts: Sequence[Text], counts: Sequence[int]) -> list[list[int]]:
        """At most counts[i] ids that may follow texts[i]: any at all, none included."""
        ...

    def forget(self, number: int) -> None:
        """The text of this request has ended."""
        ...


@runtime_checkable
class Draft(Protocol):
    """How tokens are guessed."""

    @property
    def tokens(self) -> int:
        """At most so many at a time."""
        ...

    def check(self, model: Decoder, requests: Sequence[Request]) -> None:
        """Raises ConfigError where it cannot guess for these texts of `model`."""
        ...

    def open(self, model: Decoder) -> DraftSession:
        """For texts of `model`."""
        ...


@dataclass(frozen=True, kw_only=True)
class NgramDraft(Draft):
    """Prompt look-up: what followed when the last words of the row, prompt and text, occurred before.

    The longest suffix of `most` to `least` ids that occurred earlier, at its most recent occurrence, says what comes
    next: up to `tokens` ids, on to the end of the row and from that occurrence on again. (Saxena 2023, "Prompt Lookup
    Decoding"; `prompt_lookup_num_tokens` and `max_matching_ngram_size` of `transformers`, which takes the first
    occurrence.) Raises ConfigError unless 1 <= least <= most and 1 <= tokens.
    """

    tokens: int = 8
    most: int = 4
    least: int = 2

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)
        if not 1 <= self.least <= self.most:
            raise ConfigError(
                f"NgramDraft: suffixes have `least` to `most` ids, 1 or more, got least={self.least}, most={self.most}"
            )

    def check(self, model: Decoder, requests: Sequence[Request]) -> None:
        """Guesses for any text."""

    def open(self, model: Decoder) -> NgramSession:
        return NgramSession(self)


@dataclass(frozen=True, kw_only=True)
class ModelDraft(Draft):
    """What a smaller model of the same vocabulary would choose: by the settings of each request, and with its noise, so
    that both models choose alike where their probabilities are alike.

    It reads texts into a cache of its own. Raises ConfigError for what is not a decoder, and unless 1 <= tokens.
    """

    model: Decoder
    tokens: int = 4

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)
        if not isinstance(self.model, Decoder):
            raise ConfigError(f"ModelDraft: the model must be a Decoder, got {type(self.model).__name__}")
        check_trims(self.model, "the draft model")

    def check(self, model: Decoder, requests: Sequence[Request]) -> None:
        own, theirs = self.model.spec, model.spec
        if own.vocab != theirs.vocab:
            raise ConfigError(
                f"draft: the draft model has a vocabulary of {own.vocab} ids, the model of {theirs.vocab}; ids must "
                "mean the same to both, so give one with the same tokenizer"
            )
        limit = own.context_limit
        for request in requests:
            need = len(request.prompt) + request.max_new_tokens
            if limit is not None and need > limit:
                raise ConfigError(
                    f"draft: the draft model can take {limit} tokens, and prompt {request.number} with its new tokens "
                    f"has up to {need}; ask for fewer new tokens, or give another draft model"
                )

    def open(self, model: Decoder) -> ModelSession:
        return ModelSession(self)


def check_trims(model: Decoder, name: str) -> None:
    """Raises ConfigError for a model whose cache cannot take back tokens that were guessed wrong."""
    if model.spec.linear is not None:
        raise ConfigError(
            f"draft: {name} has linear attention, whose cache is a sum that no token can be taken out of again; leave "
            "the draft out"
        )


def _check_tokens(tokens: int) -> None:
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ConfigError(f"draft: tokens counts what is proposed at a time, 1 or more, got {tokens!r}")


class Suffixes:
    """A row of ids that grows, and where each of its n-grams, `least` <= n <= `most`, was followed last."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self.ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, ids: Sequence[int]) -> None:
        """Adds ids to the row, each in constant time."""
        for token in ids:
            end = len(self.ids)
            for n in range(self.least, min(self.most, end) + 1):
                self._after[tuple(self.ids[end - n :])] = end
            self.ids.append(token)

    def continuation(self, count: int) -> list[int]:
        """`count` ids that followed the longest suffix before; none where none occurred.

        After 5 6 7 5 6 come 7 5 6 7 5 ..., as if the row went on in circles."""
        for n in range(min(self.most, len(self.ids)), self.least - 1, -1):
            begin = self._after.get(tuple(self.ids[-n:]))
            if begin is not None:
                period = len(self.ids) - begin
                return [self.ids[begin + i % period] for i in range(count)]
        return []


class NgramSession(DraftSession):
    """The drafts of `NgramDraft`."""

    def __init__(self, draft: NgramDraft) -> None:
        self.draft = draft
        self.texts: dict[int, Suffixes] = {}

    def propose(self, texts: Sequence[Text], counts: Sequence[int]) -> list[list[int]]:
        drafts = []
        for text, count in zip(texts, counts, strict=True):
            number = text.request.number
            if number not in self.texts:
                self.texts[number] = Suffixes(self.draft.least, self.draft.most)
                self.texts[number].extend(text.request.prompt)
            suffixes = self.texts[number]
            suffixes.extend(text.ids[len(suffixes.ids) - len(text.request.prompt) :])
            drafts.append(suffixes.continuation(count))
        return drafts

    def forget(self, number: int) -> None:
        self.texts.pop(number, None)


class ModelSession(DraftSession):
    """The drafts of `ModelDraft`; its pages hold what was read of each text, guesses included."""

    def __init__(self, draft: ModelDraft) -> None:
        self.reader = Reader(draft.model, slack=draft.tokens)
        self.tables: dict[int, PageTable] = {}

    def propose(self, texts: Sequence[Text], counts: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in texts]
        wanted = [i for i, count in enumerate(counts) if count > 0]
        pieces = {i: self._rest(texts[i]) for i in wanted}
        guesses = {i: Text(texts[i].request, list(texts[i].ids)) for i in wanted}
        while wanted:
            chunks = [(self.tables[texts[i].request.number], pieces[i]) for i in wanted]
            last = self.reader.read(chunks, [[len(pieces[i]) - 1] for i in wanted])
            self.reader.end()
            check_logits(
                last, [(texts[i].request.number, len(guesses[i].ids)) for i in wanted], "the draft model"
            )
            chosen = choose_tokens(last, [guesses[i] for i in wanted])
            going = []
            for i, token in zip(wanted, chosen, strict=True):
                if token is not None:
                    drafts[i].append(token)
                    guesses[i] = Text(texts[i].request, [*texts[i].ids, *drafts[i]])
                    if len(drafts[i]) < counts[i]:
                        pieces[i] = [token]
                        going.append(i)
            wanted = going
        return drafts

    def _rest(self, text: Text) -> list[int]:
        """The tokens of a text that are to be read: those behind what was read of it already and still stands."""
        ids = [*text.request.prompt, *text.ids]
        table = self.tables.setdefault(text.request.number, self.reader.cache.pool.open())
        agreed = next((n for n, (a, b) in enumerate(zip(table.ids, ids, strict=False)) if a != b), len(table))
        self.reader.trim(table, len(table) - min(agreed, len(ids) - 1))
        return ids[len(table) :]

    def forget(self, number: int) -> None:
        if number in self.tables:
            self.reader.cache.pool.close(self.tables.pop(number))
