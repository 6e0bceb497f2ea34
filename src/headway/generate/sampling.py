"""Sampling of the next token, in a fixed order, after the constraints (the repetition penalty first):

    temperature -> top-k -> top-p -> min-p -> draw

Legend: R rows, V vocab.

The draw inverts the cumulative distribution at one uniform number, which is a pure function of (seed, request, step).
So the text of a request does not depend on the rest of the batch, and no generator has a state.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.data.order import keyed
from headway.errors import ConfigError, HeadwayError


def penalize_repetition(logits: Tensor, penalty: float, seen: Tensor) -> Tensor:
    """Penalizes logits of tokens that are `seen`, bool [R, V]: l / penalty if l > 0, else l * penalty (Keskar et al.
    2019, CTRL, as in Hugging Face's code). 1 changes nothing."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def penalize_counts(logits: Tensor, ids: Sequence[int], each: float, once: float) -> Tensor:
    """Subtracts from the logits [V] of each token in `ids`: `each` per occurrence, and `once` in total (OpenAI's
    frequency and presence penalties)."""
    tokens, counts = torch.tensor(ids, dtype=torch.int64, device=logits.device).unique(return_counts=True)
    return logits.index_add(0, tokens, -(counts.to(logits.dtype) * each + once))


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keeps the `k` largest logits, exactly k of them: ties go to smaller ids. The others become -inf."""
    k = min(k, logits.shape[-1])
    kth = logits.topk(k, -1).values[..., -1:]
    above, equal = logits > kth, logits == kth
    keep = above | (equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)))
    return logits.masked_fill(~keep, float("-inf"))


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keeps the fewest most likely tokens whose probabilities sum to `p` or more (Holtzman et al. 2020)."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1, dtype=torch.float64)
    mass_before = probabilities.cumsum(-1) - probabilities
    drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, mass_before >= p)
    return logits.masked_fill(drop, float("-inf"))


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keeps the tokens that are at least `p` times as likely as the most likely one (Nguyen et al. 2024)."""
    log_ratio = logits - logits.amax(-1, keepdim=True)
    return logits.masked_fill(log_ratio < torch.tensor(p).log(), float("-inf"))


LEAST = 1e-10
"""The smallest positive temperature and repetition penalty: dividing logits by less would overflow."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. The default is greedy: the most likely token, of equals the smallest id.

    temperature: logits are divided by it; 0 is greedy.  top_k: 0 is no filter.  top_p: 1 is no filter.
    min_p: 0 is no filter.  repetition_penalty: over prompt and text; 1 is none; also applies to greedy decoding.
    frequency_penalty, presence_penalty: over the text alone, for each occurrence of a token and once for its presence;
        0 is none; they also apply to greedy decoding.

    Raises ConfigError, naming the setting, for values outside their range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name, valid, allowed in (
            (
                "temperature",
                self.temperature == 0 or self.temperature >= LEAST,
                f"0 (greedy), or {LEAST} or more",
            ),
            ("top_k", self.top_k >= 0 and self.top_k % 1 == 0, "0 (no filter) or a whole number above 0"),
            ("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1 (1 is no filter)"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1 (0 is no filter)"),
            ("repetition_penalty", self.repetition_penalty >= LEAST, f"{LEAST} or more (1 is none)"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 2, "-2 to 2 (0 is none)"),
            ("presence_penalty", abs(self.presence_penalty) <= 2, "-2 to 2 (0 is none)"),
        ):
            value = getattr(self, name)
            if not valid or value != value or abs(value) == float("inf"):
                raise ConfigError(f"{name} must be {allowed}, got {value}")

    @property
    def penalties(self) -> "Sampling":
        """Greedy sampling with the same penalties, which a beam search applies too."""
        return Sampling(**{name: getattr(self, name) for name in vars(self) if name.endswith("penalty")})

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def filter(self, logits: Tensor) -> Tensor:
        """Returns the logits [R, V] after all steps before the draw; -inf for tokens that are never drawn."""
        if self.greedy:
            return logits
        if self.temperature != 1:
            logits = logits / self.temperature
        if self.top_k:
            logits = top_k(logits, int(self.top_k))
        if self.top_p != 1:
            logits = top_p(logits, self.top_p)
        return min_p(logits, self.min_p) if self.min_p else logits

    def choose(self, logits: Tensor, noise: Sequence[float]) -> Tensor:
        """Returns the next token of each row.

        Args:
            logits: finite or -inf, [R, V].
            noise: one uniform number in [0, 1) per row (see `uniform`); may be empty if greedy.
        Returns:
            ids [R], int64, on the device of the logits.
        """
        values = self.filter(logits.float())
        return values.argmax(-1) if self.greedy else draw(values, noise)


def draw(logits: Tensor, noise: Sequence[float]) -> Tensor:
    """Draws token i with probability softmax(logits)_i if `noise` is uniform: the first i whose cumulative probability
    exceeds it. A token of probability 0 is never drawn."""
    cumulative = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    thresholds = torch.tensor(list(noise), dtype=torch.float64, device=logits.device).unsqueeze(1) * total
    # the last token with nonzero probability is the first whose cumulative sum is the total
    # probabilities .2 .5 .3 0: cumulative .2 .7 1 1, last 2; noise .2 draws token 1, the first above it
    last_likely = torch.searchsorted(cumulative, total)
    return torch.minimum(torch.searchsorted(cumulative, thresholds, right=True), last_likely).squeeze(1)


def broken_rows(logits: Tensor) -> list[int]:
    """Returns the rows of logits [R, V] whose maximum is NaN or infinite."""
    return [row for row, largest in enumerate(logits.amax(-1).tolist()) if not math.isfinite(largest)]


def no_numbers(request: int, step: int, model: str = "the model") -> HeadwayError:
    """Returns the error for a row of logits that are not finite."""
    return HeadwayError(
        f"{model}'s logits for request {request} at step {step} are not numbers (NaN or "
        "infinity): its weights are broken, or the dtype overflows (try --dtype float32)"
    )


def uniform(seed: int, request: int, step: int) -> float:
    """Returns a number in [0, 1) that is a pure function of its arguments (53 random bits)."""
    return (keyed(seed, request, step) >> 11) * 2.0**-53  # the upper 53 of 64 bits: 1 << 63 gives 0.5
