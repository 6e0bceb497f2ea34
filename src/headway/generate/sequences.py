"""Requests in progress, whose sequences grow by one chosen token per step.

Legend: R rows, V vocab.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from headway.cache import PagePool, PageTable
from headway.generate.config import GenerationConfig
from headway.generate.constraints import Text, constrain
from headway.generate.requests import Request, by_config
from headway.generate.results import Delta, FinishReason, ToldToken, TopLogProbs
from headway.generate.sampling import broken_rows, no_numbers, uniform
from headway.generate.stop import StopScanner
from headway.text import MarianTokenizer, StreamDecoder, Tokenizer

AnyTokenizer = Tokenizer | MarianTokenizer


class Job:
    """A request in an engine, and the sequences that are generated for it: one, or several in a beam search.

    texts: its sequences, as they are stored; empty once the engine has finished it.
    goes_on: whether another token will follow.   count: number of new tokens so far.
    stored: number of prompt tokens that were found in the prefix cache.
    source: page table of its source, for an encoder-decoder.
    error: why it failed; None unless it did.
    deltas: what each step added, unless that is uncertain before the end (beams).
    draft: draft tokens that the current step reads.   right: how many of them, from the first, were accepted.
    follows: whether the last chosen token equals its draft token.
    """

    def __init__(self, request: Request, texts: Sequence[Text]) -> None:
        self.request, self.texts = request, texts
        self.goes_on, self.count, self.stored = True, 0, 0
        self.source: PageTable | None = None
        self.error: BaseException | None = None
        self.deltas: list[Delta] = []
        self.draft: list[int] = []
        self.right, self.follows = 0, False

    @property
    def ended(self) -> bool:
        """Whether the engine has finished it."""
        return not self.texts

    @property
    def untold(self) -> int:
        """Number of prompt tokens whose log probabilities are still to be computed."""
        return 0

    def tell(self, logits: Tensor) -> None:
        """Takes logits [N, V] for the prompt's next tokens that have no log probabilities yet."""

    @property
    def is_ready(self) -> bool:
        """Whether each of its sequences has been read up to its last token."""
        return all(text.is_read for text in self.texts)

    def fail(self, error: BaseException) -> None:
        """Ends the job with this error."""
        self.goes_on, self.error = False, error

    def store(self, pool: PagePool) -> None:
        """Updates its sequences and their pages after a step, to those that continue."""


class SampledText(Text, Job):
    """A request with one sampled (or greedy) sequence. A decoder's text is decoded token by token, a translation at its
    end.

    deltas: as in `Job`; a single one without a token if `max_new_tokens` is 0.
    begun: when it was created, by `time.perf_counter`.   drafted, accepted: as in `Generation`, so far.
    """

    def __init__(self, request: Request, tokenizer: AnyTokenizer | None) -> None:
        Text.__init__(self, request, [])
        Job.__init__(self, request, [self])
        self.begun = time.perf_counter()
        self.drafted = self.accepted = 0
        tells = request.config.prompt_log_probs
        self._told = [ToldToken(request.prompt[0], None, ())] if tells else []
        empty_delta = Delta(request.number, None, "", "length", 0.0, prompt=tuple(self._told))
        self.deltas = [] if request.max_new_tokens or self.untold else [empty_delta]
        self._tokenizer = tokenizer
        self._decoder: StreamDecoder | None = None
        if isinstance(tokenizer, Tokenizer) and request.source is None:
            self._decoder = tokenizer.stream(after=request.prompt, special=request.config.shown)
        self._scanner = StopScanner(request.config.stop)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text; None if none did."""
        return self._scanner.hit

    @property
    def untold(self) -> int:
        return len(self.request.prompt) - len(self._told) if self._told else 0

    def tell(self, logits: Tensor) -> None:
        request, begin = self.request, len(self._told)
        if broken_rows(logits):
            self.fail(no_numbers(request.number, 0))
            return
        tokens = request.prompt[begin : begin + len(logits)]
        self._told += [ToldToken(*row) for row in log_probs_of(logits, tokens, request.config)]
        if not self.untold and not request.max_new_tokens:
            seconds, self.goes_on = time.perf_counter() - self.begun, False
            self.deltas.append(Delta(request.number, None, "", "length", seconds, prompt=tuple(self._told)))

    def expect(self, draft: list[int]) -> None:
        """Takes draft tokens, which the next step reads after the last token."""
        self.draft, self.right, self.drafted = draft, 0, self.drafted + len(draft)

    def advance(
        self, token: int, seconds: float, log_prob: float | None = None, top: TopLogProbs = ()
    ) -> None:
        """Adds a token that was chosen `seconds` after the request was created, and its log probabilities if they were
        requested."""
        self.follows = self.draft[self.right : self.right + 1] == [token]
        self.right, self.accepted = self.right + self.follows, self.accepted + self.follows
        self.append(token)
        self.count += 1
        text, reason = self._shown(token)
        self.goes_on = reason is None
        counts, number = (self.drafted, self.accepted), self.request.number
        prompt = () if self.deltas else tuple(self._told)
        self.deltas.append(Delta(number, token, text, reason, seconds, *counts, log_prob, top, prompt))

    def _shown(self, token: int) -> tuple[str, FinishReason | None]:
        """Returns the text that became certain, and the finish reason if the request ends."""
        eos, length = token in self.request.config.eos, len(self.ids) == self.request.max_new_tokens
        complete = self.state is not None and self.state.ended
        reason: FinishReason | None = "eos" if eos else "stop" if complete else "length" if length else None
        if self._decoder is None:
            return "" if reason is None else decoded(self.request, self.ids, self._tokenizer), reason
        text = "" if eos else self._scanner.push(self._decoder.push(token))
        if reason is not None and self._scanner.hit is None:
            text += self._scanner.push(self._decoder.flush())
        if self._scanner.hit is not None:
            return text, "stop"
        return text if reason is None else text + self._scanner.flush(), reason


def decoded(request: Request, ids: Sequence[int], tokenizer: AnyTokenizer | None) -> str:
    """Returns the text of new ids, without EOS; decoded on its own if there is a source, else as a continuation of the
    prompt."""
    if tokenizer is None:
        return ""
    text_ids = [i for i in ids if i not in request.config.eos]
    if isinstance(tokenizer, MarianTokenizer):
        return tokenizer.decode(text_ids)
    context = request.prompt if request.source is None else []
    return tokenizer.decode(text_ids, after=context, special=request.config.shown)


def log_probs_of(
    logits: Tensor, tokens: Sequence[int], config: GenerationConfig
) -> list[tuple[int, float, TopLogProbs]]:
    """Returns each token with its ln p under its row of the logits [N, V], and the `top_log_probs` most likely tokens.

    Computed in float32, or float64 for float64 logits."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    values = wide.log_softmax(-1)
    top = values.topk(min(config.top_log_probs, values.shape[-1]), dim=-1)
    chosen = values.gather(1, torch.tensor(tokens, device=values.device).unsqueeze(1)).squeeze(1)
    likely = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    rows = zip(tokens, chosen.tolist(), likely, strict=True)
    return [(token, value, tuple(zip(*pair, strict=True))) for token, value, pair in rows]


def choose_tokens(logits: Tensor, texts: Sequence[Text]) -> list[int | None]:
    """Returns the next token of each sequence, from logits [R, V]; None if its constraints exclude every token.

    A pure function of a sequence's own logits, tokens and request: its random number is `uniform(seed, request,
    step)`."""
    chosen: list[int | None] = [None] * len(texts)
    for places in by_config([text.request for text in texts]):
        group, config = [texts[i] for i in places], texts[places[0]].request.config
        rows = (logits if len(group) == len(texts) else logits[places]).float()
        values = constrain(rows, group, config)
        seed, drawn = config.seed, [] if config.sampling.greedy else group
        noise = [uniform(seed, text.request.number, len(text.ids)) for text in drawn]
        tokens = config.sampling.choose(values, noise).tolist()
        choosable = [True] * len(group) if values is rows else (values.amax(-1) > float("-inf")).tolist()
        for place, token, possible in zip(places, tokens, choosable, strict=True):
            chosen[place] = token if possible else None
    return chosen
