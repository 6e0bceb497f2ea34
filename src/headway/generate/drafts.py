"""Speculative decoding: drafts guess the next tokens of a sequence cheaply, and one step of the model verifies them.

Two kinds of drafts: what followed the same tokens earlier in the sequence (`NgramDraft`), and what a smaller model
chooses (`ModelDraft`).

A sequence of n new tokens gets the token

    x_n = choose(logits(prompt, x_0 ... x_{n-1}); uniform(seed, request, n))

which is a function of its logits and of a random number tied to its place. So no further randomness is needed to accept
or reject a draft d_n ... d_{n+k-1}: one call of the model gives the logits after x_{n-1}, d_n, ..., d_{n+k-1}; the
first of them choose x_n as without drafts, those after d_n choose x_{n+1} if d_n = x_n, and so on until a token
differs. The text equals the one without drafts, at any temperature and for any draft, except for the rounding of
products with several rows. (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", sample
again instead: their text has the same distribution, but is a different text.)

Legend: R rows, V vocab.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from headway.cache import PageTable
from headway.errors import ConfigError, check_whole
from headway.generate.constraints import Text
from headway.generate.reader import Reader
from headway.generate.requests import Request
from headway.generate.sampling import broken_rows, no_numbers
from headway.generate.sequences import Job, SampledText, choose_tokens
from headway.models import Decoder
from headway.models.mixers import state_kinds

MOST_CREDIT = 16.0
PAID_BY_ACCEPTED = 4.0
EARNED = 1 / 128
Propose = Callable[[Sequence[Text], Sequence[int]], list[list[int]]]
"""Returns at most counts[i] draft ids for texts[i], the sequences being generated; any ids are valid, and so is
none."""


class Draft:
    """How draft tokens are guessed: at most `tokens` at a time, by `propose`, or by the result of `open` for a draft
    with state per engine.

    Raises ConfigError unless 1 <= tokens."""

    tokens: int

    def __post_init__(self) -> None:
        check_whole("draft: tokens, proposed at a time,", self.tokens)

    def check(self, model: Decoder, requests: Sequence[Request]) -> None:
        """Raises ConfigError if the draft cannot serve these requests of `model`."""

    def open(self) -> Propose:
        """Returns the function that guesses for one engine."""
        return self.propose

    def propose(self, texts: Sequence[Text], counts: Sequence[int]) -> list[list[int]]:
        """Returns at most counts[i] draft ids for texts[i]; the set of sequences changes from call to call."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class NgramDraft(Draft):
    """Prompt lookup: proposes what followed the last tokens where they occurred earlier in prompt and text.

    The longest suffix of `most` to `least` ids that occurred earlier, at its most recent occurrence, determines the
    draft: up to `tokens` ids after that occurrence, continuing cyclically from there at the end of the sequence.
    (Saxena 2023, "Prompt Lookup Decoding"; `prompt_lookup_num_tokens` and `max_matching_ngram_size` of `transformers`,
    which takes the first occurrence.) Raises ConfigError unless 1 <= least <= most and 1 <= tokens.
    """

    tokens: int = 8
    most: int = 4
    least: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.least <= self.most:
            raise ConfigError(
                f"NgramDraft: needs 1 <= least <= most, got least={self.least}, most={self.most}"
            )

    def propose(self, texts: Sequence[Text], counts: Sequence[int]) -> list[list[int]]:
        sizes = self.least, self.most
        return [continuation(text.tokens, *sizes, n) for text, n in zip(texts, counts, strict=True)]


@dataclass(frozen=True, kw_only=True)
class ModelDraft(Draft):
    """Drafts by a smaller model of the same vocabulary, sampled with each request's settings and random numbers.

    With the same random numbers both models choose the same tokens where their probabilities are similar. The draft
    model has a KV cache of its own for each engine. Raises ConfigError for a model that is not a decoder or is sharded
    across ranks, and unless 1 <= tokens.
    """

    model: Decoder
    tokens: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, Decoder):
            raise ConfigError(f"ModelDraft: the model must be a Decoder, got {type(self.model).__name__}")
        if self.model.shards is not None:
            raise ConfigError("ModelDraft: the model is sharded, but rank 0 drafts alone; load it unsharded")
        check_trims(self.model, "the draft model")

    def check(self, model: Decoder, requests: Sequence[Request]) -> None:
        draft, target = self.model.spec, model.spec
        if draft.vocab != target.vocab:
            raise ConfigError(
                f"draft: the draft model has a vocabulary of {draft.vocab} ids, the model of {target.vocab}; ids must "
                "mean the same to both, so give one with the same tokenizer"
            )
        limit = draft.context_limit
        for request in requests:
            need = len(request.prompt) + request.max_new_tokens
            if limit is not None and need > limit:
                raise ConfigError(
                    f"draft: the draft model can take {limit} tokens, and prompt {request.number} with its new tokens "
                    f"has up to {need}; ask for fewer new tokens, or give another draft model"
                )

    def open(self) -> Propose:
        return partial(_guess, Reader(self.model, slack=self.tokens), {})


def check_trims(model: Decoder, name: str) -> None:
    """Raises ConfigError for a model whose cache cannot discard rejected draft tokens."""
    if names := state_kinds(model.spec):
        raise ConfigError(
            f"draft: {name} has layers of {names}, whose state cannot be rolled back to drop rejected tokens; "
            "leave the draft out"
        )


def continuation(ids: Sequence[int], least: int, most: int, count: int) -> list[int]:
    """Returns `count` ids that followed the most recent earlier occurrence of the longest suffix of `ids`, of `most` to
    `least` ids; none if no suffix occurred earlier.

    After 5 6 7 5 6 come 7 5 6 7 5 ..., continuing cyclically at the end of `ids`."""
    row = "".join(map(chr, ids))  # one character per id, for `rfind`
    for n in range(min(most, len(ids) - 1), least - 1, -1):
        begin = row.rfind(row[-n:], 0, -1) + n
        if begin >= n:
            return [ids[begin + i % (len(ids) - begin)] for i in range(count)]
    return []


def _guess(
    reader: Reader, tables: dict[Text, PageTable], texts: Sequence[Text], counts: Sequence[int]
) -> list[list[int]]:
    """Returns the drafts of `ModelDraft`. `tables` keep what was read of each sequence, drafts included, until it is no
    longer among `texts`."""
    for text in tables.keys() - {*texts}:
        reader.cache.pool.close(tables.pop(text))
    live = [i for i, count in enumerate(counts) if count > 0]
    pieces = {i: _unread(reader, tables, texts[i]) for i in live}
    guesses = [text.copy() for text in texts]
    while live:
        chunks = [(tables[texts[i]], pieces[i]) for i in live]
        last = reader.read(chunks, [[len(pieces[i]) - 1] for i in live])
        reader.end()
        if bad := broken_rows(last):
            guess = guesses[live[bad[0]]]
            raise no_numbers(guess.request.number, len(guess.ids), "the draft model")
        chosen = dict(zip(live, choose_tokens(last, [guesses[i] for i in live]), strict=True))
        live = []
        for i, token in chosen.items():
            if token is not None:
                guesses[i].append(token)
                pieces[i] = [token]
                if len(guesses[i].ids) < len(texts[i].ids) + counts[i]:
                    live.append(i)
    return [guess.ids[len(text.ids) :] for guess, text in zip(guesses, texts, strict=True)]


def _unread(reader: Reader, tables: dict[Text, PageTable], text: Text) -> list[int]:
    """Discards what was read of a sequence beyond its agreement with its tokens, and returns the tokens to read
    next."""
    ids = text.tokens
    if text not in tables:
        tables[text] = reader.cache.pool.open()
    table = tables[text]
    matching = next((n for n, (a, b) in enumerate(zip(table.ids, ids, strict=False)) if a != b), len(table))
    reader.trim(table, len(table) - min(matching, len(ids) - 1))
    return ids[len(table) :]


class Speculation:
    """The drafting of an engine: how many tokens are proposed, depending on how many were accepted.

    It has a credit c of tokens, initially and at most MOST_CREDIT. A step requests drafts of

        min(draft.tokens, floor(c))

    tokens, and then c changes by (means over the rows of the step)

        + PAID_BY_ACCEPTED * accepted - drafted      if something was drafted
        + EARNED                                     otherwise

    so that over all tokens of a row, in a run with s steps without drafts,

        drafted <= MOST_CREDIT + PAID_BY_ACCEPTED * accepted + EARNED * s

    While drafts are accepted they have the full length; while they are rejected, one token is tried every 128 steps.
    The policy depends only on what was accepted: no time is measured.
    """

    def __init__(self, draft: Draft) -> None:
        self.tokens, self.credit = draft.tokens, MOST_CREDIT
        self._propose = draft.open()

    def propose(self, texts: Sequence[SampledText]) -> None:
        """Gives each sequence the draft tokens that are read after its last token."""
        count = min(self.tokens, int(self.credit))
        # The last token of a text is chosen but never read, so a draft ends before it.
        counts = [min(count, text.request.max_new_tokens - len(text.ids) - 1) for text in texts]
        drafts = self._propose(texts, counts) if any(counts) else [[] for _ in texts]
        for text, draft in zip(texts, drafts, strict=True):
            ends = (i + 1 for i, token in enumerate(draft) if token in text.request.config.eos)
            text.expect(draft[: next(ends, None)])  # nothing follows an EOS

    def settle(self, texts: Sequence[Job]) -> None:
        """Updates the credit by how many draft tokens of a step were accepted."""
        if not texts:
            return
        drafted, accepted = sum(len(text.draft) for text in texts), sum(text.right for text in texts)
        change = (PAID_BY_ACCEPTED * accepted - drafted) / len(texts) if drafted else EARNED
        self.credit = min(MOST_CREDIT, self.credit + change)


def check_draft(model: Decoder, requests: Sequence[Request]) -> None:
    """Raises ConfigError for a model or requests that do not support drafts."""
    check_trims(model, "the model")
    if any(scheme.length_dependent for scheme in model.spec.layer_positions):
        raise ConfigError(
            f"draft: the rotations of {model.spec.positions} depend on the row's length, so that tokens read together "
            "differ from tokens read one by one; leave the draft out"
        )
    if any(request.config.beams is not None for request in requests):
        raise ConfigError("draft: drafts are not supported in a beam search; leave out the draft or beams")
