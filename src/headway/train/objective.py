"""What a model is trained to say: the token that follows, or the tokens that are hidden.

An objective turns a token file into examples, (ids, targets, tokens) with -100 where nothing is to be said; the loss
is the same for all: cross entropy over the targets, summed, divided by their number.
"""

# Legend: B rows, L slots of a row, N trained tokens of a batch.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from headway.data import FramedRows, MaskedRows, Masking, Rows, TokenFile
from headway.errors import ConfigError
from headway.models import Decoder, Encoder, Model, ModelSpec
from headway.nn import OutputLayer
from headway.text import Tokenizer
from headway.tokens import Tokens
from headway.train.config import TrainConfig
from headway.train.loss import IGNORED, Losses, cross_entropy_sum

Batch = tuple[Tensor, Tensor, Tokens]
Trained = Decoder | Encoder
HELD_OUT = -1  # the draw of every evaluation: steps are numbered from 0


class Examples(Protocol):
    """Rows of a token file with what is to be said in them."""

    @property
    def file(self) -> TokenFile:
        """Where the text is from."""

    def __len__(self) -> int:
        """Rows."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """ids [B, L], targets [B, L] and the tokens' description, for the given rows."""


class Objective(Protocol):
    """What is trained. `says_text`: the trained tokens are the text, so that their loss can be stated per byte."""

    @property
    def says_text(self) -> bool:
        """Whether every token of a text is said once."""

    def examples(self, file: TokenFile, length: int, draw: int) -> Examples:
        """The examples of a token file in rows of `length`, as they are in step `draw` (`HELD_OUT`: when measured)."""

    def redrawn(self, examples: Examples, draw: int) -> Examples:
        """The same examples in step `draw`."""


@dataclass(frozen=True)
class NextToken:
    """Every token from those before it: a decoder's objective. Nothing in it is drawn, so all steps are alike."""

    says_text: bool = field(default=True, init=False)

    def examples(self, file: TokenFile, length: int, draw: int) -> Rows:
        """See `Objective`."""
        return Rows(file, length)

    def redrawn(self, examples: Examples, draw: int) -> Examples:
        """See `Objective`."""
        return examples


@dataclass(frozen=True)
class MaskedLM:
    """Hidden tokens from those on both sides: an encoder's objective (Devlin et al. 2019, section 3.1).

    Each step has masks of its own, drawn by (seed, step, row); held-out text has one for good, drawn by (seed, row).

    Attributes:
        masking: which tokens are hidden, and behind what.
        prefix: what the tokenizer's template puts before a text. suffix: and after it.
        seed: of the masks.
        packed: parts of several documents in a row; False is one part a row.
    """

    masking: Masking
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    seed: int = 0
    packed: bool = True
    says_text: bool = field(default=False, init=False)

    @staticmethod
    def of(
        tokenizer: Tokenizer,
        *,
        share: float = 0.15,
        whole_words: bool = False,
        seed: int = 0,
        packed: bool = True,
    ) -> MaskedLM:
        """For a tokenizer; arguments and errors as in `Masking.of`."""
        template = tokenizer.template
        masking = Masking.of(tokenizer, share=share, whole_words=whole_words)
        return MaskedLM(masking, template.prefix, template.suffix, seed, packed)

    def examples(self, file: TokenFile, length: int, draw: int) -> MaskedRows:
        """See `Objective`."""
        rows = FramedRows(file, length, prefix=self.prefix, suffix=self.suffix, packed=self.packed)
        return MaskedRows(rows, self.masking, self.seed, draw)

    def redrawn(self, examples: Examples, draw: int) -> Examples:
        """See `Objective`."""
        assert isinstance(examples, MaskedRows)
        return examples.drawn(draw)


def objective_name(spec: ModelSpec) -> str:
    """`next-token` or `masked-lm`: what a model of this spec can be trained on.

    Raises ConfigError for encoder-decoders, and for encoders without a masked-lm head."""
    if spec.encoder is not None:
        raise ConfigError(
            f"this is an encoder-decoder ({spec.family}), which is trained on pairs of texts; text alone trains "
            "decoders (next-token) and encoders (masked-lm)"
        )
    if spec.causal:
        return "next-token"
    if spec.head.task != "masked-lm":
        raise ConfigError(
            f"this encoder ({spec.family}) has Head({spec.head.task!r}); it is pre-trained with its masked-lm head, so "
            "give a folder that has one"
        )
    return "masked-lm"


def objective_of(config: TrainConfig, spec: ModelSpec, tokenizer: Tokenizer) -> Objective:
    """The objective of a run. Raises ConfigError where settings and model do not fit, DataError for a tokenizer
    without a mask."""
    check_objective(config, spec)
    if spec.causal:
        return NextToken()
    given: dict[str, Any] = {
        "share": config.mask_share,
        "whole_words": config.whole_words,
        "packed": config.pack,
    }
    return MaskedLM.of(tokenizer, seed=config.seed, **{k: v for k, v in given.items() if v is not None})


def check_objective(config: TrainConfig, spec: ModelSpec) -> None:
    """ConfigError where the settings ask for another objective than the model's, or for masks without one."""
    name = objective_name(spec)
    if config.objective not in (None, name):
        raise ConfigError(
            f"objective={config.objective} was asked for, but {spec.family} is "
            f"{'a decoder, trained on next-token' if spec.causal else 'an encoder, trained on masked-lm'}; leave "
            "objective out, or choose another family or model"
        )
    if name == "next-token":
        wrong = [n for n in ("mask_share", "whole_words", "pack") if getattr(config, n) is not None]
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)}: for masked-lm, but {spec.family} is a decoder and nothing is masked; leave it out"
            )


def losses(model: Trained, batch: Batch) -> Losses:
    """The loss over a batch's N trained tokens: `each` [N] and `hits` [N] in the order of the slots.

    An encoder's head is computed for the trained tokens alone; hits are counted for encoders. Where global tokens have
    projections of their own, each text's first token ([CLS]) is global, as in classification (Beltagy et al. 2020,
    section 3.1): without one these projections would never be trained."""
    ids, targets, described = batch
    if model.spec.global_projections:
        described = described.with_global(described.index == 0)
    hidden, trained = model.hidden(ids, tokens=described), targets != IGNORED
    if isinstance(model, Decoder):
        found = _through(model.lm_head, hidden, targets, model.model.embedding, hits=False)
        return found._replace(each=found.each[trained])
    out = model.head.out
    assert isinstance(out, OutputLayer)
    x = model.head.before_output(hidden[trained])
    return _through(out, x, targets[trained], model.model.embedding, hits=True)


def _through(layer: OutputLayer, x: Tensor, targets: Tensor, embedding: Tensor, *, hits: bool) -> Losses:
    weight = embedding if layer.weight is None else layer.weight
    x = x if layer.scale == 1.0 else x * layer.scale
    return cross_entropy_sum(x, weight, targets, bias=layer.bias, hits=hits)


def trainable(model: Model) -> Trained:
    """The same model. Raises ConfigError for one that text alone does not train (see `objective_name`)."""
    objective_name(model.spec)
    assert isinstance(model, (Decoder, Encoder))
    return model
