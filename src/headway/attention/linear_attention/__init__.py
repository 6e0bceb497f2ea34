"""Linear attention: sums over the keys instead of weights of all pairs."""

from headway.attention.linear_attention.algorithms import FORMS
from headway.attention.linear_attention.attend import (
    Prepared,
    check_form,
    choose_form,
    linear_attend,
    linear_state,
    linear_weights,
    prepare,
)
from headway.attention.linear_attention.spec import FEATURES, LinearAttentionSpec
from headway.attention.linear_attention.state import LinearState
from headway.attention.linear_attention.validate import check_pattern, forbid_weights

__all__ = [
    "FEATURES",
    "FORMS",
    "LinearAttentionSpec",
    "LinearState",
    "Prepared",
    "check_form",
    "check_pattern",
    "choose_form",
    "forbid_weights",
    "linear_attend",
    "linear_state",
    "linear_weights",
    "prepare",
]
