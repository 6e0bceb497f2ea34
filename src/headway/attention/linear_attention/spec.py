"""Linear attention as a value: the feature maps, and where rotary positions act.

Legend: B rows, H query heads, K kv heads, T queries, S keys, D per head, F features per head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.errors import ConfigError, check_known
from headway.positions import Rotation
from headway.tokens import Tokens

FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "elu+1": lambda x: F.elu(x).add_(1),
    "relu": torch.relu,
    "square": torch.square,
    "exp": torch.exp,
    "softmax": lambda x: torch.softmax(x, -1),
}
"""The feature maps phi, by name; all are >= 0.

"elu+1"     elu(x) + 1 > 0 (Katharopoulos et al. 2020, equation 7)
"relu"      max(x, 0)
"square"    x^2
"exp"       e^x, which overflows float32 beyond x = 88
"softmax"   over the features of each query or key by itself (queries of Shen et al. 2018, section 3.3)
"""

COSINE = "cosine"
"""The features (1, x / |x|), of which the product of two is 1 + their cosine, in [0, 2]; a zero vector has cosine 0
with everything."""

TOKENS = "softmax over tokens"
"""A feature map of keys: the softmax of each feature over all keys of the document (Shen et al. 2018, section 3.3;
Su, "Does attention need a softmax?", 2020). Later keys change earlier ones, so it is bidirectional only. With
"softmax" on the queries every denominator is 1."""

ROTARY = ("numerator", "both", "none")


@dataclass(frozen=True)
class LinearAttentionSpec:
    """Attention whose weights are products of features, so that sums over the keys replace them:

        out_i = sum_j sim(q_i, k_j) v_j / sum_j sim(q_i, k_j)         sim(q, k) = phi(q) . phi'(k) >= 0
              = phi(q_i) . (sum_j phi'(k_j) v_j^T) / (phi(q_i) . sum_j phi'(k_j))

    (Katharopoulos et al. 2020, equations 3 to 5.) There is no scale: a factor on a query's features cancels between
    numerator and denominator.

    feature        phi by name, see `FEATURES`; "cosine" is sim = 1 + q/|q| . k/|k|
    key_feature    phi', by default `feature`. "softmax over tokens" is for keys only
    rotary         where a rotation R acts, if one is given:
                   "numerator"   on the numerator's features only (Su et al. 2021, equation 19): shift-invariant and
                                 bounded by the positive denominator, but weights may be negative and need not sum
                                 to 1
                   "both"        in numerator and denominator. This suits "cosine", because R preserves lengths:
                                 weights stay >= 0 and sum to 1. With other features it is UNSAFE, and supported only
                                 to demonstrate that: the denominator may be negative or 0, nothing guards it, and
                                 the result may be of any size
                   "none"        nowhere: passing a rotation is an error
                   By default "both" for "cosine", "numerator" for the others
    eps            the denominator is max(sum, eps), so that a query whose products are all 0 gets 0, and rows with a
                   larger sum are exact; not applied in the unsafe case

    Raises ConfigError for an unknown name, for "cosine" on one side only or with "numerator" (its weights would no
    longer be a distribution), and for an eps that is not positive.
    """

    feature: str = "elu+1"
    key_feature: str | None = None
    rotary: str | None = None
    eps: float = 1e-6

    def __post_init__(self) -> None:
        keys = self.feature if self.key_feature is None else self.key_feature
        rotary = ("both" if self.is_cosine else "numerator") if self.rotary is None else self.rotary
        for name, value, known in (
            ("feature", self.feature, (*FEATURES, COSINE)),
            ("key_feature", keys, (*FEATURES, COSINE, TOKENS)),
            ("rotary", rotary, ROTARY),
        ):
            check_known(value, known, f"linear attention: there is no {name}")
        if (self.feature == COSINE) != (keys == COSINE):
            raise ConfigError(
                f'linear attention: "cosine" (1 + q/|q| . k/|k|) must be the feature of both queries and keys; '
                f"got feature={self.feature!r} and key_feature={keys!r}"
            )
        if self.is_cosine and rotary == "numerator":
            raise ConfigError(
                'linear attention: with feature="cosine" and rotary="numerator" the weights are no distribution; use '
                'rotary="both", or another feature'
            )
        if not 0 < self.eps < float("inf"):
            raise ConfigError(
                f"linear attention: eps, the smallest denominator, must be finite and above 0, got {self.eps}"
            )
        object.__setattr__(self, "key_feature", keys)
        object.__setattr__(self, "rotary", rotary)

    @property
    def is_cosine(self) -> bool:
        return self.feature == COSINE

    @property
    def is_distribution(self) -> bool:
        """Whether weights are >= 0 and sum to 1 also with a rotation (without one they always do)."""
        return self.is_cosine or self.rotary == "none"

    @property
    def is_safe(self) -> bool:
        """Whether the denominator is a sum of products that are all >= 0."""
        return self.is_cosine or self.rotary != "both"

    @property
    def is_causal(self) -> bool:
        """Whether the features of a key depend on no later key: true of all but "softmax over tokens"."""
        return self.key_feature != TOKENS

    def features(self, head_dim: int) -> int:
        """Returns F for heads of width D: D, plus one for the 1 of "cosine"."""
        return head_dim + self.is_cosine

    def __str__(self) -> str:
        keys = "" if self.key_feature == self.feature else f", keys {self.key_feature}"
        return f"{self.feature}{keys}, rotary {self.rotary}"


def marked(
    x: Tensor, feature: str, rotary: str, rotation: Rotation | None, tokens: Tokens
) -> tuple[Tensor, Tensor]:
    """Returns the features of queries or keys [B, H, T, D] for (numerator, denominator), each [B, H, T, F]; the same
    tensor if both are equal."""
    if feature == COSINE:
        unit = F.normalize(x, dim=-1)
        unit = unit if rotation is None else rotation.apply(unit)
        features = torch.cat((torch.ones_like(unit[..., :1]), unit), -1)
        return features, features
    plain = over_tokens(x, tokens) if feature == TOKENS else FEATURES[feature](x)
    if rotation is None:
        return plain, plain
    turned = rotation.apply(plain)
    return turned, turned if rotary == "both" else plain


def over_tokens(k: Tensor, tokens: Tokens) -> Tensor:
    """Returns e^k over its sum over the keys of the same document, feature by feature: [B, K, S, D]."""
    documents = torch.where(tokens.valid, tokens.documents, -1)
    names, number = documents.unique(return_inverse=True)
    at = number[:, None, :, None].expand(k.shape)
    shape = (*k.shape[:2], len(names), k.shape[3])
    is_token = tokens.valid[:, None, :, None]
    most = k.new_full(shape, -torch.inf).scatter_reduce(
        2, at, k.detach().masked_fill(~is_token, -torch.inf), "amax"
    )
    powers = torch.exp(k - most.nan_to_num(neginf=0.0).gather(2, at)) * is_token
    return powers / k.new_zeros(shape).scatter_add(2, at, powers).clamp_min(1).gather(2, at)
