"""Encoders with their tokenizers, one class for each thing that they are trained for.

Legend: N texts, B rows, T slots, M width, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from headway.api.looking import Looks
from headway.api.pretrained import BATCH, Pretrained, refuse_empty
from headway.data.encoded import by_length, encoder_inputs, shortened
from headway.errors import ConfigError, DataError
from headway.models import Encoder
from headway.text import Encoded, Tokenizer
from headway.text.tokenizer import Text


@dataclass(frozen=True)
class Candidate:
    """A token for a masked place. `text` is what it reads as there, `piece` its name in the vocabulary."""

    token: int
    piece: str
    text: str
    probability: float


class TextEncoder(Pretrained[Encoder, Tokenizer], Looks):
    """An encoder and its tokenizer: the last states of texts. Its subclasses add a head.

    Attributes:
        model: the `Encoder`, in evaluation mode.   tokenizer: None when the folder has none.
    """

    heads: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model: Encoder, tokenizer: Tokenizer | None = None) -> None:
        if self.heads and model.spec.head.task not in self.heads:
            raise ConfigError(
                f"{type(self).__name__} needs an encoder with the head {self.heads[0]!r}, and this one's is "
                f"{model.spec.head.task!r}"
            )
        super().__init__(model, tokenizer)

    def states(self, texts: Sequence[Text], *, batch_size: int = BATCH, cut: bool = False) -> list[Tensor]:
        """The last states [T, M] of each text or pair, T its tokens with those of the template. `cut`: as in
        `Classifier.classify`."""
        return self._run(self.model.hidden, self._read(texts, cut), batch_size, by_token=True)

    def _row(self, text: Text, special: bool) -> dict[str, Any]:
        (read,) = self._read([text], special=special)
        self._check_length(0, read)
        return encoder_inputs([read], self.spec, self.device)

    @property
    def limit(self) -> int:
        """The most tokens that a text may have, with those of the template."""
        return min(self.spec.trained_context, self.spec.context_limit or self.spec.trained_context)

    @property
    def device(self) -> torch.device:
        return self.model.model.like.device

    def _read(self, texts: Sequence[Text], cut: bool = False, special: bool = False) -> list[Encoded]:
        if isinstance(texts, str) or len(texts) == 0:
            what = "one text" if isinstance(texts, str) else "no texts"
            raise DataError(f"a list of texts is expected, got {what}")
        refuse_empty(texts)
        read = self.need_tokenizer().inputs(texts, special=special)
        return [shortened(one, self.limit) for one in read] if cut else read

    def _check_length(self, number: int, text: Encoded) -> None:
        if len(text.ids) > self.limit:
            raise ConfigError(
                f"text {number} has {len(text.ids)} tokens, and this model reads {self.limit}; give less of it, or "
                "cut=True (--cut) to read its beginning only"
            )

    def _outputs(self, texts: Sequence[Encoded], batch_size: int) -> list[Tensor]:
        """What the head gives for each text: [T, ...] of its own slots, or one row."""
        by_token = self.spec.head.task not in ("classify", "embed")
        return [out.float() for out in self._run(self.model, texts, batch_size, by_token=by_token)]

    def _run(
        self, call: Callable[..., Tensor], texts: Sequence[Encoded], batch_size: int, *, by_token: bool
    ) -> list[Tensor]:
        """What `call` gives for each text, in their order; `by_token`: of its own slots.

        Raises ConfigError for a text beyond the context, naming it, and for a batch_size below 1."""
        if batch_size < 1:
            raise ConfigError(f"batch_size must be 1 or more, got {batch_size}")
        for i, text in enumerate(texts):
            self._check_length(i, text)
        found: dict[int, Tensor] = {}
        with torch.inference_mode():
            for numbers in by_length(texts, batch_size):
                inputs = encoder_inputs([texts[i] for i in numbers], self.spec, self.device)
                for i, one in zip(numbers, call(**inputs), strict=True):
                    found[i] = one[: len(texts[i].ids)] if by_token else one
        return [found[i] for i in range(len(texts))]


class MaskedLM(TextEncoder):
    """Finds words for masked places (Devlin et al. 2019, section 3.1).

    >>> for candidate in headway.load("bert", task="fill-mask").fill_mask("Paris is the [MASK] of France.")[0]: ...
    """

    heads = ("masked-lm",)

    @overload  # a str is a Sequence[str], too
    def fill_mask(  # type: ignore[overload-overlap]
        self, texts: str, *, top_k: int = ..., batch_size: int = ...
    ) -> list[list[Candidate]]: ...

    @overload
    def fill_mask(
        self, texts: Sequence[str], *, top_k: int = ..., batch_size: int = ...
    ) -> list[list[list[Candidate]]]: ...

    def fill_mask(
        self, texts: str | Sequence[str], *, top_k: int = 5, batch_size: int = BATCH
    ) -> list[list[Candidate]] | list[list[list[Candidate]]]:
        """For each masked place of a text, in order, the `top_k` most likely tokens, the best first.

        A place is written as the tokenizer's own mask token ("[MASK]", "<mask>"); other special tokens in the text are
        special too. Several masks are filled independently of each other. A list of texts gives a list of that.
        Raises DataError for a text without a mask, ConfigError for top_k outside 1..vocab.
        """
        if isinstance(texts, str):
            return self.fill_mask([texts], top_k=top_k, batch_size=batch_size)[0]
        tokenizer = self.need_tokenizer()
        mask, vocab = tokenizer.need("mask"), self.spec.vocab
        if not 1 <= top_k <= vocab:
            raise ConfigError(f"top_k must be in 1..{vocab}, the vocabulary, got {top_k}")
        read = self._read(texts, special=True)
        for i, one in enumerate(read):
            if mask not in one.ids:
                raise DataError(
                    f"text {i} has no {tokenizer.token(mask)}: write it where a word is to be found"
                )
        unused = torch.tensor(tokenizer.unused_ids(vocab), dtype=torch.int64, device=self.device)
        found = []
        for one, logits in zip(read, self._outputs(read, batch_size), strict=True):
            at = torch.tensor([i for i, token in enumerate(one.ids) if token == mask], device=self.device)
            probabilities = logits[at].index_fill(1, unused, float("-inf")).softmax(-1)
            top = probabilities.topk(min(top_k, tokenizer.vocab_size))
            found.append(
                [
                    [Candidate(i, tokenizer.token(i), tokenizer.decode([i], special=True).strip(), p)
                     for i, p in zip(ids, values, strict=True)]
                    for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
                ]
            )  # fmt: skip
        return found


class Embedder(TextEncoder):
    """One vector for a text, so that texts of like meaning are near (Reimers and Gurevych 2019)."""

    heads = ("embed",)

    def embed(self, texts: str | Sequence[Text], *, batch_size: int = BATCH, cut: bool = False) -> Tensor:
        """Vectors [N, M] of texts, [M] of a single one; what else is in the list changes none. `cut`: as in
        `Classifier.classify`."""
        if isinstance(texts, str):
            return self.embed([texts], batch_size=batch_size, cut=cut)[0]
        return torch.stack(self._outputs(self._read(texts, cut), batch_size))
