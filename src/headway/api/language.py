"""A decoder with its tokenizer: text in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack, overload

from torch import Tensor

from headway.api.pretrained import Pretrained, check_options
from headway.cache import DecoderCache
from headway.errors import DataError
from headway.generate import Beams, Delta, Generation, GenerationConfig, Sampling
from headway.generate import generate as generate_ids
from headway.generate import stream as stream_ids
from headway.generate.loop import collect
from headway.models import Decoder
from headway.text import Tokenizer
from headway.text.chat import Message
from headway.tokens import Tokens


class Options(TypedDict, total=False):
    """How to generate. Whatever is not given is greedy, seed 0, up to 128 new tokens, until EOS.

    max_new_tokens: at most so many (None: 128, or what the context has room for).
    temperature, top_k, top_p, min_p, repetition_penalty: see `Sampling`; temperature 0 is greedy.
    beams: search for the text of the highest score instead, with so many beams, or as `Beams` says.
    seed: equal seeds give equal text.   stop: strings that end the text.
    eos: ids that end the text, instead of the model's.   beyond_context: go on past the trained context.
    min_new_tokens, no_repeat_ngram, use_cache, kv_cache_dtype, prefill_chunk: see `GenerationConfig`.
    """

    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    beams: Beams | int | None
    min_new_tokens: int
    no_repeat_ngram: int
    seed: int
    stop: Sequence[str]
    eos: Sequence[int]
    beyond_context: bool
    use_cache: bool
    kv_cache_dtype: str
    prefill_chunk: int | None


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class LanguageModel(Pretrained[Decoder, Tokenizer]):
    """A decoder, its tokenizer and how it ends its texts.

    >>> lm = headway.load("runs/demo")
    >>> print(lm.generate("def main(", max_new_tokens=40, temperature=0.8))
    >>> for delta in lm.stream("def main("): print(delta.text, end="", flush=True)

    Attributes:
        model: the `Decoder`.   tokenizer: None when the folder has none; then prompts are ids.
        generation: the content of generation_config.json; of it, only `eos_token_id` decides anything here.
    """

    @property
    def eos(self) -> tuple[int, ...]:
        """Ids that end a text: generation_config.json's, else the tokenizer's."""
        given = self.generation.get("eos_token_id")
        if given is None:
            own = self.tokenizer.eos if self.tokenizer else None
            return () if own is None else (own,)
        return tuple(given) if isinstance(given, (list, tuple)) else (int(given),)

    @overload  # a str is a Sequence[str], too
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: str | Tensor | Sequence[int],
        *,
        batch_size: int | None = ...,
        special: bool = ...,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]],
        *,
        batch_size: int | None = ...,
        special: bool = ...,
        **options: Unpack[Options],
    ) -> list[Generation]: ...

    def generate(
        self, prompt: Any, *, batch_size: int | None = None, special: bool = False, **options: Unpack[Options]
    ) -> Generation | list[Generation]:
        """Continues one prompt (a text, or ids), or each of a list of prompts.

        A Generation prints as its text; it has `ids`, `finish_reason` ("eos", "stop", "length") and
        `tokens_per_second`, and with beams `score` and `hypotheses`. Texts begin with BOS when the tokenizer does
        so, and stay open at the end; prompts given as ids are taken as they are. `special`: control tokens
        written in the prompt are control tokens, not text. `batch_size`: how many prompts of a list are worked
        on at once. It changes no text, and neither does what else is in the list: prompt i draws from (seed, i).
        """
        prompts, one = self._ids(prompt, special)
        found = generate_ids(
            self.model, prompts, self._settings(options), tokenizer=self.tokenizer, batch_size=batch_size
        )
        return found[0] if one else found

    def stream(
        self, prompt: str | Sequence[int] | Tensor, *, special: bool = False, **options: Unpack[Options]
    ) -> Iterator[Delta]:
        """Continues one prompt token by token: `delta.text` is what became certain. All texts together are the
        text of `generate` with the same arguments."""
        prompts, one = self._ids(prompt, special)
        if not one:
            raise DataError(
                "stream continues one prompt, got a list; use generate, or headway.generate.stream"
            )
        return stream_ids(self.model, prompts, self._settings(options), tokenizer=self.tokenizer)

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Generation:
        """The reply to a conversation, [{"role": "user", "content": "..."}, ...], through the chat template."""
        ids = self.need_tokenizer().render_chat(messages)
        return collect(list(self.stream(ids, **options)), len(ids))

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Iterator[Delta]:
        """`chat`, token by token."""
        return self.stream(self.need_tokenizer().render_chat(messages), **options)

    def __call__(
        self,
        ids: Tensor,
        *,
        tokens: Tokens | None = None,
        cache: DecoderCache | None = None,
        logits_for: Tensor | slice | None = None,
    ) -> Tensor:
        """Logits [B, T, V] of the token after each slot of `ids` [B, T]: `Decoder.forward`."""
        logits: Tensor = self.model(ids, tokens=tokens, cache=cache, logits_for=logits_for)
        return logits

    def _ids(self, prompt: Any, special: bool) -> tuple[list[list[int]], bool]:
        """The prompts as ids, and whether it was one."""
        if prompt is None:
            raise DataError("the prompt is None; give a text, token ids, or a list of either")
        if isinstance(prompt, Tensor):
            if prompt.dim() not in (1, 2) or prompt.is_floating_point():
                raise DataError(
                    f"ids are an integer tensor [T] or [B, T], got {prompt.dtype} {[*prompt.shape]}"
                )
            prompt, one = prompt.tolist(), prompt.dim() == 1
            return ([prompt] if one else prompt), one
        if isinstance(prompt, str):
            return [self.need_tokenizer().encode(prompt, eos=False, special=special)], True
        prompts = list(prompt)
        if prompts and isinstance(prompts[0], str):
            return self.need_tokenizer().encode_batch(prompts, eos=False, special=special), False
        if prompts and isinstance(prompts[0], int):
            return [prompts], True
        if any(isinstance(p, Mapping) for p in prompts):
            raise DataError("these are messages of a conversation, not prompts; use chat(messages)")
        return prompts, False

    def _settings(self, options: Options) -> GenerationConfig:
        check_options("generate", options, Options.__annotations__)
        given: dict[str, Any] = dict(options)
        sampling = Sampling(**{name: given.pop(name) for name in _SAMPLING if name in given})
        if isinstance(given.get("beams"), int):
            given["beams"] = Beams(given["beams"])
        unused = self.tokenizer.unused_ids(self.spec.vocab) if self.tokenizer else []
        return GenerationConfig(**{"eos": self.eos, **given}, sampling=sampling, forbidden=unused)
