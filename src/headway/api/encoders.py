"""Encoders with their tokenizers, one class for each task.

Legend: N texts, B rows, T slots, M width, V vocab.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from headway.api.looking import Looks
from headway.api.pretrained import BATCH, OneOrSeveral, Pretrained, refuse_empty
from headway.data.encoded import encoder_inputs, shortened
from headway.errors import ConfigError, DataError, check_whole
from headway.generate.requests import check_prompts
from headway.models import Encoder
from headway.nn.products import FEW, filled_rows, fills
from headway.similarity import normalize
from headway.text import Encoded, Tokenizer
from headway.text.tokenizer import Text

DIMENSIONS = "matryoshka_dimensions"  # the key in config.json
Input = Text | Sequence[int]
"""A text, a pair of texts, or the token ids of a text, which are read as they are."""
Read = Callable[[Sequence[Encoded]], list[Tensor]]


@dataclass(frozen=True)
class Candidate:
    """A token for a mask. `text` is how it reads in place, `piece` its name in the vocabulary."""

    token: int
    piece: str
    text: str
    probability: float


class TextEncoder(Pretrained[Encoder, Tokenizer], Looks):
    """An encoder and its tokenizer: computes the last hidden states of texts. Subclasses add a head.

    Attributes:
        model: the `Encoder`, in evaluation mode.   tokenizer: None if the folder has none.
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
        """Returns the last hidden states [T, M] of each text or pair, including the special tokens that the tokenizer
        adds. `cut`: as in `Classifier.classify`."""
        return self._outputs(self._read(texts, cut), batch_size, self._states)

    @torch.inference_mode()
    def read(self, texts: Sequence[Encoded]) -> list[Tensor]:
        """Returns the head's output for each text, [T, ...] over its slots or one vector, from one forward pass: the
        texts are packed in one row, without attention between them."""
        if self.spec.head.task in ("classify", "embed"):
            filled = [*texts, *self._filling(texts)]
            vectors = self.model(**encoder_inputs(filled, self.spec, self.device, packed=True))
            return [*vectors[: len(texts)].float()]
        inputs = encoder_inputs(texts, self.spec, self.device, packed=True)
        states, slots_per_text = self.model.hidden(**inputs), [self._wanted(text) for text in texts]
        firsts = accumulate((len(text.ids) for text in texts), initial=0)
        # texts of 3 and 2 slots, with outputs wanted at [1] and [0, 1]: slots [1, 3, 4] of the row
        slots_of_row = [
            first + i for first, slots in zip(firsts, slots_per_text, strict=False) for i in slots
        ]
        out = self.model.head(states[:, slots_of_row], inputs["tokens"])
        return [*out[0].float().split([len(slots) for slots in slots_per_text])]

    def _filling(self, texts: Sequence[Encoded]) -> list[Encoded]:
        """Returns a text that extends the row to a number of slots for which matrix products need no padded copy, if
        they would pad it; no text otherwise."""
        slots = sum(len(text.ids) for text in texts)
        missing = filled_rows(slots) - slots if slots >= FEW and fills(self.model.model.like) else 0
        return [Encoded.of([0] * missing)] if 0 < missing <= self.limit else []

    def _wanted(self, text: Encoded) -> Sequence[int]:
        """Returns the slots of a text for which the head's output is computed."""
        return range(len(text.ids))

    @torch.inference_mode()
    def _states(self, texts: Sequence[Encoded]) -> list[Tensor]:
        states = self.model.hidden(**encoder_inputs(texts, self.spec, self.device, packed=True))
        return [*states[0].split([len(text.ids) for text in texts])]

    def _row(self, text: Text, special: bool) -> dict[str, Any]:
        (read,) = self._read([text], special=special)
        self._check_length(0, read)
        return encoder_inputs([read], self.spec, self.device)

    @property
    def limit(self) -> int:
        """Maximum number of tokens of a text, including the special tokens that the tokenizer adds."""
        return self.spec.usual_context

    @property
    def device(self) -> torch.device:
        return self.model.model.like.device

    def _read(self, texts: Sequence[Input], cut: bool = False, special: bool = False) -> list[Encoded]:
        if isinstance(texts, str) or len(texts) == 0:
            problem = "one text" if isinstance(texts, str) else "no texts"
            raise DataError(f"texts must be a list of one or more texts, got {problem}")
        if not isinstance(texts[0], str | tuple):
            read = [Encoded.of(ids) for ids in check_prompts(texts, self.spec.vocab)]  # type: ignore[arg-type]
        else:
            refuse_empty(texts)  # type: ignore[arg-type]
            read = self.need_tokenizer().inputs(texts, special=special)  # type: ignore[arg-type]
        return [shortened(text, self.limit) for text in read] if cut else read

    def _check_length(self, number: int, text: Encoded) -> None:
        if len(text.ids) > self.limit:
            raise ConfigError(
                f"text {number} has {len(text.ids)} tokens, but this model reads at most {self.limit}; shorten it, or "
                "in classify, logits, embed and states set cut=True (--cut; truncate over HTTP)"
            )

    def _outputs(self, texts: Sequence[Encoded], batch_size: int, read: Read | None = None) -> list[Tensor]:
        """Returns the output of `read` (default: `self.read`) for each text, computed in batches of `batch_size` texts.

        Raises ConfigError for a text beyond the context, naming it, and for a batch_size below 1."""
        check_whole("batch_size", batch_size)
        for i, text in enumerate(texts):
            self._check_length(i, text)
        batches = (texts[at : at + batch_size] for at in range(0, len(texts), batch_size))
        return [output for batch in batches for output in (read or self.read)(batch)]


class MaskedLM(TextEncoder):
    """Predicts masked tokens (Devlin et al. 2019, section 3.1).

    >>> for candidate in headway.load("bert", task="masked-lm").fill_mask("Paris is the [MASK] of France.")[0]: ...
    """

    heads = ("masked-lm",)

    @OneOrSeveral
    def fill_mask(
        self, texts: Sequence[str], *, top_k: int = 5, batch_size: int = BATCH
    ) -> list[list[list[Candidate]]]:
        """Returns the `top_k` likeliest tokens for each mask of a text, in order, the best first; for a list of texts,
        one such list each.

        A mask is written as the tokenizer's mask token ("[MASK]", "<mask>"); other special tokens in the text are
        special too. Several masks are filled independently of each other.
        Raises DataError for a text without a mask, ConfigError for top_k outside 1..vocab.
        """
        tokenizer = self.need_tokenizer()
        mask, vocab = tokenizer.need("mask"), self.spec.vocab
        if not 1 <= top_k <= vocab:
            raise ConfigError(f"top_k must be in 1..{vocab}, the vocabulary, got {top_k}")
        read = self._read(texts, special=True)
        for i, text in enumerate(read):
            if mask not in text.ids:
                raise DataError(f"text {i} has no {tokenizer.token(mask)}: write it where a word is missing")
        unused = torch.tensor(tokenizer.unused_ids(vocab), dtype=torch.int64, device=self.device)
        filled = []
        for logits in self._outputs(read, batch_size):
            probabilities = logits.index_fill(1, unused, float("-inf")).softmax(-1)
            top = probabilities.topk(min(top_k, tokenizer.vocab_size))
            filled.append(
                [
                    [Candidate(i, tokenizer.token(i), tokenizer.decode([i], special=True).strip(), p)
                     for i, p in zip(ids, values, strict=True)]
                    for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
                ]
            )  # fmt: skip
        return filled

    def _wanted(self, text: Encoded) -> Sequence[int]:
        mask = self.need_tokenizer().need("mask")
        return [i for i, token in enumerate(text.ids) if token == mask]


class Embedder(TextEncoder):
    """Computes one vector per text, such that texts of similar meaning are close (Reimers and Gurevych 2019)."""

    heads = ("embed",)

    def __init__(
        self, model: Encoder, tokenizer: Tokenizer | None = None, *, dimensions: Sequence[int] = ()
    ) -> None:
        super().__init__(model, tokenizer)
        self.dimensions = tuple(dimensions)
        self.config_keys = {DIMENSIONS: [*dimensions]} if dimensions else {}

    def embed(
        self,
        texts: str | Sequence[Input],
        *,
        batch_size: int = BATCH,
        cut: bool = False,
        dimensions: int | None = None,
    ) -> Tensor:
        """Returns the embeddings [N, M] of texts, or [M] of a single one. The other texts of the list change an
        embedding by rounding only. A list may consist of lists of token ids, which are read as they are.

        cut: as in `Classifier.classify`.   dimensions: number of leading components to keep (renormalized if the
        model's vectors have unit length); one of `self.dimensions`, with which the model was trained to be truncated
        (Kusupati et al. 2022). Raises ConfigError for any other number.
        """
        if isinstance(texts, str):
            return self.embed([texts], batch_size=batch_size, cut=cut, dimensions=dimensions)[0]
        width = self.spec.width
        if dimensions not in (None, width, *self.dimensions):
            known = ", ".join(map(str, self.dimensions)) or "none (matryoshka_dimensions of config.json)"
            raise ConfigError(
                f"dimensions={dimensions}: this model's vectors have {width} dimensions; those that it was trained to "
                f"be truncated to: {known}; leave dimensions out, or give one of these"
            )
        vectors = torch.stack(self._outputs(self._read(texts, cut), batch_size))
        if dimensions in (None, width):
            return vectors
        return normalize(vectors[:, :dimensions]) if self.spec.head.unit else vectors[:, :dimensions]
