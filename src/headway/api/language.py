"""A decoder with its tokenizer: text in, text out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack, overload

import torch
from torch import Tensor

from headway.api.looking import Looks
from headway.api.pretrained import OneOrSeveral, Scoring, Writer, config_of, make_draft, scoring_of
from headway.cache import kv_dtype
from headway.choice import Choice
from headway.errors import DataError
from headway.generate import Delta, Draft, Generation, GenerationConfig, Reader, Score, rolling_windows
from headway.generate import generate as generate_ids
from headway.generate import score as score_ids
from headway.generate import stream as stream_ids
from headway.generate.loop import collect
from headway.generate.requests import check_prompts
from headway.models import Decoder
from headway.nn import Cut
from headway.nn.cuts import patterns_without
from headway.nn.record import Record
from headway.text import Tokenizer
from headway.text.chat import Message

OnePrompt = str | Tensor | Sequence[int]
Prompts = Sequence[str] | Sequence[Sequence[int]]


class LanguageModel(Writer[Decoder, Tokenizer], Looks):
    """A decoder with its tokenizer and its EOS ids.

    >>> lm = headway.load("runs/demo")
    >>> print(lm.generate("def main(", max_new_tokens=40, temperature=0.8))
    >>> for delta in lm.stream("def main("): print(delta.text, end="", flush=True)

    Attributes:
        model: the `Decoder`.   tokenizer: None if the folder has none; prompts are then token ids.
        generation: the content of generation_config.json; only its `eos_token_id` is used here.
    """

    @property
    def eos(self) -> tuple[int, ...]:
        """Ids that end a sequence: those of generation_config.json, or else the tokenizer's."""
        ids = self.generation.get("eos_token_id")
        if ids is None:
            token = self.tokenizer.eos if self.tokenizer else None
            return () if token is None else (token,)
        return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)

    @overload  # a str is a Sequence[str], too
    def generate(
        self, prompt: OnePrompt, *, batch_size: int | None = ..., special: bool = ..., **options: Any
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Prompts, *, batch_size: int | None = ..., special: bool = ..., **options: Any
    ) -> list[Generation]: ...

    def generate(
        self, prompt: Any, *, batch_size: int | None = None, special: bool = False, **options: Any
    ) -> Generation | list[Generation]:
        """Continues one prompt (a text, or token ids), or each of a list of prompts.

        A Generation prints as its text; it has `ids`, `finish_reason` ("eos", "stop", "length") and
        `tokens_per_second`, and with beams `score` and `hypotheses`. A text gets BOS if the tokenizer adds it, and no
        EOS; token ids are read as they are. `special`: control tokens written in the prompt are control tokens, not
        text. `batch_size`: number of prompts of a list that run at once. Neither it nor the other prompts of the list
        change a result: prompt i draws its random numbers from (seed, i).

        `options` are fields of `GenerationConfig`, `Sampling` and `Beams` by name; the default is greedy, up to 128 new
        tokens, until EOS. `beams` is a number of beams, or a `Beams`, for beam search. `draft` is speculative decoding:
        the same text in fewer steps if the next tokens, at most `draft_tokens` at a time, can be guessed from the text
        itself ("ngram"), by a smaller `LanguageModel` with the same tokenizer, or by a `Draft`.
        """
        prompts, single = self._prompts(prompt, special)
        config, draft = self._settings(options)
        generations = generate_ids(
            self.model, prompts, config, tokenizer=self.tokenizer, batch_size=batch_size, draft=draft,
            engine=self.engine,
        )  # fmt: skip
        return generations[0] if single else generations

    def stream(self, prompt: OnePrompt, *, special: bool = False, **options: Any) -> Iterator[Delta]:
        """Continues one prompt token by token and yields deltas; `delta.text` is the text that became certain.
        Concatenated, they are the text of `generate` with the same arguments."""
        rows, single = self._prompts(prompt, special)
        if not single:
            raise DataError("stream takes one prompt, got several; use generate, or headway.generate.stream")
        config, draft = self._settings(options)
        return stream_ids(self.model, rows, config, tokenizer=self.tokenizer, draft=draft, engine=self.engine)

    def chat(self, messages: Sequence[Message], **options: Any) -> Generation:
        """Returns the reply to a conversation, [{"role": "user", "content": "..."}, ...], rendered by the chat
        template. Earlier turns come from the prefix cache, unless prefix_cache=False."""
        ids = self.need_tokenizer().render_chat(messages)
        return collect(list(self.stream(ids, **_in_turn(options))), len(ids))

    def stream_chat(self, messages: Sequence[Message], **options: Any) -> Iterator[Delta]:
        """Yields the reply of `chat` token by token."""
        return self.stream(self.need_tokenizer().render_chat(messages), **_in_turn(options))

    def decoding(self, *, kv_cache_dtype: str = "auto") -> Choice:
        """Returns whether decoding steps are "native" kernel calls or run by "modules", and why, for a KV cache of this
        dtype."""
        return Reader(self.model, kv_dtype=kv_dtype(kv_cache_dtype)).steps

    @property
    def prefix(self) -> int:
        """The token that stands for an empty context: BOS, or else EOS. Raises DataError for a model that has
        neither."""
        bos = self.tokenizer.bos if self.tokenizer is not None else None
        if bos is None and not self.eos:
            raise DataError("this model has neither BOS nor EOS to begin a text with; give a context")
        return self.eos[0] if bos is None else bos

    @overload  # a str is a Sequence[str], too
    def score(  # type: ignore[overload-overlap]
        self, context: str, continuation: str, **how: Unpack[Scoring]
    ) -> Score: ...

    @overload
    def score(
        self, context: str | Sequence[str], continuation: Sequence[str], **how: Unpack[Scoring]
    ) -> list[Score]: ...

    def score(self, context: Any, continuation: Any, **how: Unpack[Scoring]) -> Score | list[Score]:
        """Returns the log-probability of a continuation given its context, as a `Score` with `log_prob`, `is_greedy`
        and the log-probability of each token.

        Lists of equal length are scored pair by pair; one context is scored with each of a list of continuations. They
        are encoded as in lm-evaluation-harness: spaces at the end of the context belong to the continuation, both are
        encoded as one text and split where the context's own tokens end; an empty context is `prefix`. Other pairs of
        the list change a result by rounding only.

        >>> lm.score("The capital of France is", [" Paris", " a cat"])

        Raises DataError for a continuation without a token of its own, ConfigError for a pair beyond the model's
        context."""
        options, special = scoring_of("score", how)
        single = isinstance(context, str) and isinstance(continuation, str)
        targets = [continuation] if isinstance(continuation, str) else list(continuation)
        contexts = [context] * len(targets) if isinstance(context, str) else list(context)
        if len(contexts) != len(targets):
            raise DataError(
                f"score: {len(contexts)} contexts for {len(targets)} continuations; give one for each, or one for all"
            )
        pairs = [self._pair(i, *both, special) for i, both in enumerate(zip(contexts, targets, strict=True))]
        scores = score_ids(self.model, pairs, **options)
        return scores[0] if single else scores

    @OneOrSeveral
    def score_text(
        self, texts: Sequence[str], *, window: int | None = None, **how: Unpack[Scoring]
    ) -> list[Score]:
        """Returns the log-probability of a text of any length, with each token predicted once; for a list, each text by
        itself.

        The text follows `prefix` and is read in windows of `window` tokens (default: the trained context); the last
        window looks back as far as it can: `rolling_windows`. -log_prob / ln 2 / bytes is its bits per byte."""
        options, special = scoring_of("score_text", how)
        length = self.spec.usual_context if window is None else window
        encoded = self.need_tokenizer().encode_batch([*texts], bos=False, special=special)
        windows = [rolling_windows(ids, self.prefix, length) for ids in encoded]
        parts = score_ids(self.model, [pair for pairs in windows for pair in pairs], **options)
        remaining, scores = iter(parts), []
        for ids, pairs in zip(encoded, windows, strict=True):
            scored = [next(remaining) for _ in pairs]
            log_probs = [value for part in scored for value in part.log_probs]
            scores.append(Score.of(ids, log_probs, all(part.is_greedy for part in scored)))
        return scores

    def next_log_probs(self, text: OnePrompt, *, cuts: Sequence[Cut] = (), special: bool = False) -> Tensor:
        """Returns the log-probability of each token of the vocabulary after a text (or token ids), [V], in float32 or
        float64, without attention over the pairs in `cuts`: those of a head, an edge, or a span of the text.

        >>> lm.next_log_probs("The cat sat on the", cuts=[Cut(layer=1, head=2)])

        Raises ConfigError for a layer, head or span that does not exist."""
        layers = [block.self_attn for block in self.model.stack.blocks]
        record = Record(patterns=patterns_without(layers, cuts))
        self._record(text, special, record)
        with torch.inference_mode():
            logits = self.model.logits(record.states[-1][0, -1])
        return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)

    def _row(self, text: OnePrompt, special: bool) -> dict[str, Any]:
        rows, single = self._prompts(text, special)
        if not single:
            raise DataError("attention and hidden_states take one text or its token ids, got several")
        ids = torch.tensor(check_prompts(rows, self.spec.vocab), device=self.model.model.like.device)
        return {"ids": ids}

    def _pair(self, i: int, context: str, continuation: str, special: bool) -> tuple[list[int], list[int]]:
        """Returns the token ids of a context and of its continuation; see `score`."""
        tokenizer, stem = self.need_tokenizer(), context.rstrip()
        if not stem:
            before = [self.prefix]
            whole = [*before, *tokenizer.encode(context + continuation, bos=False, special=special)]
        else:
            before, whole = tokenizer.encode_batch([stem, context + continuation], eos=False, special=special)
        if len(whole) <= len(before):
            raise DataError(
                f"continuation {i} ({continuation!r}) has no token of its own after its context: give it some text"
            )
        return before, whole[len(before) :]

    def _prompts(self, prompt: Any, special: bool) -> tuple[list[list[int]], bool]:
        """Returns the prompts as token ids, and whether it was a single prompt."""
        if prompt is None:
            raise DataError("the prompt is None; give a text, token ids, or a list of either")
        if isinstance(prompt, Tensor):
            if prompt.dim() not in (1, 2) or prompt.is_floating_point():
                raise DataError(
                    f"ids are an integer tensor [T] or [B, T], got {prompt.dtype} {[*prompt.shape]}"
                )
            ids, single = prompt.tolist(), prompt.dim() == 1
            return ([ids] if single else ids), single
        if isinstance(prompt, str):
            return [self.need_tokenizer().encode(prompt, eos=False, special=special)], True
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | Mapping):
            raise DataError(
                f"a prompt is a text, token ids, or a list of either; got {prompt!r} of type {type(prompt).__name__}"
            )
        prompts = [row.tolist() if hasattr(row, "tolist") else row for row in prompt]
        if prompts and isinstance(prompts[0], str):
            return self.need_tokenizer().encode_batch(prompts, eos=False, special=special), False
        if prompts and isinstance(prompts[0], int):
            return [prompts], True
        if any(isinstance(p, Mapping) for p in prompts):
            raise DataError("these are messages of a conversation, not prompts; use chat(messages)")
        return prompts, False

    def _settings(self, options: Mapping[str, Any]) -> tuple[GenerationConfig, Draft | None]:
        unused = self.tokenizer.unused_ids(self.spec.vocab) if self.tokenizer else []
        config, draft = config_of("generate", {"eos": self.eos, **options}, unused, ("draft", "draft_tokens"))
        return config, make_draft(draft.get("draft"), draft.get("draft_tokens"), self)


def _in_turn(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a conversation turn: with the prefix cache, since each turn begins with the earlier
    ones."""
    return {"prefix_cache": options.get("use_cache", True), **options}
