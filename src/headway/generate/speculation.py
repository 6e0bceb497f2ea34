"""Speculative decoding: a step reads the tokens that a draft expects as well, and keeps those that the model chooses.

A text of n new tokens gets the token

    x_n = choose(logits(prompt, x_0 ... x_{n-1}); uniform(seed, request, n))

which is a function of its logits and of a number that belongs to its place. So nothing is drawn to accept or refuse a
draft d_n ... d_{n+k-1}: one call of the model gives the logits after x_{n-1}, d_n, ..., d_{n+k-1}; the first of them
choose x_n as ever, those after d_n choose x_{n+1} if d_n = x_n, and so on until a token differs. The text is the one
without drafts, at any temperature and whatever the draft, but for the rounding of products of several rows. (Leviathan
et al. 2023, "Fast Inference from Transformers via Speculative Decoding", draw anew instead: their text has the same
distribution, but is another text.)
"""

from collections.abc import Sequence

from headway.errors import ConfigError
from headway.generate.drafts import Draft, check_trims
from headway.generate.requests import Request
from headway.generate.sequences import Job, SampledText
from headway.models import Decoder

MOST_CREDIT = 16.0
PAID_BY_ACCEPTED = 4.0
EARNED = 1 / 128


class Speculation:
    """The drafts of a run: how many tokens they propose, and what comes of them.

    The run has a credit c of tokens, at first and at most MOST_CREDIT. A step asks for drafts of

        min(draft.tokens, floor(c))

    tokens, and then c changes by (means over the rows of the step)

        + PAID_BY_ACCEPTED * accepted - drafted      where something was drafted
        + EARNED                                     else

    so that of all tokens of a row, in a run of s steps without drafts,

        drafted <= MOST_CREDIT + PAID_BY_ACCEPTED * accepted + EARNED * s

    Where drafts come true they are as long as they may be, and where they do not, a token is tried once in 128 steps.
    A pure function of what was accepted: no time is measured.
    """

    def __init__(self, draft: Draft) -> None:
        self.tokens, self.credit = draft.tokens, MOST_CREDIT
        self._propose = draft.open()

    def propose(self, texts: Sequence[SampledText]) -> None:
        """Expects what is to be read behind the last token of each text."""
        count = min(self.tokens, int(self.credit))
        # The last token of a text is chosen, not read, so that a draft ends before it.
        counts = [min(count, text.request.max_new_tokens - len(text.ids) - 1) for text in texts]
        drafts = self._propose(texts, counts) if any(counts) else [[] for _ in texts]
        for text, draft in zip(texts, drafts, strict=True):
            text.expect(_until_eos(draft, text.request.config.eos))

    def settle(self, texts: Sequence[Job]) -> None:
        """Learns from what came of the drafts of a step."""
        if not texts:
            return
        drafted, accepted = sum(len(text.draft) for text in texts), sum(text.right for text in texts)
        change = (PAID_BY_ACCEPTED * accepted - drafted) / len(texts) if drafted else EARNED
        self.credit = min(MOST_CREDIT, self.credit + change)


def check_draft(model: Decoder, requests: Sequence[Request]) -> None:
    """Raises ConfigError for a model or requests that take no drafts."""
    check_trims(model, "the model")
    if any(scheme.length_dependent for scheme in model.spec.layer_positions):
        raise ConfigError(
            f"draft: the rotations of {model.spec.positions} depend on how long a row is, so that tokens read together "
            "are not what they are one by one; leave the draft out"
        )
    if any(request.config.beams is not None for request in requests):
        raise ConfigError("draft: a beam search has no one next token to guess; leave out the draft or beams")


def _until_eos(draft: list[int], eos: Sequence[int]) -> list[int]:
    """The draft up to its first EOS, which nothing follows."""
    return next((draft[: i + 1] for i, token in enumerate(draft) if token in eos), draft)
