"""The gated delta rule: attention by a state that decays, and that each token corrects by the error of its
prediction of the token's value; or that each token only adds to, which is state-space duality."""

from headway.attention.delta.attend import FORMS, DeltaResult, DeltaTransition, delta_attend, delta_transition
from headway.attention.delta.convolution import Convolved, short_convolution
from headway.attention.delta.spec import DeltaSpec, RuleSizes, SSDSpec

__all__ = [
    "FORMS",
    "Convolved",
    "DeltaResult",
    "DeltaSpec",
    "DeltaTransition",
    "RuleSizes",
    "SSDSpec",
    "delta_attend",
    "delta_transition",
    "short_convolution",
]
