"""Linear attention: sums over the keys in place of weights for every pair."""

from headway.attention.linear.attend import (
    Prepared,
    check_form,
    choose_form,
    linear_attend,
    linear_state,
    linear_weights,
    prepare,
)
from headway.attention.linear.check import check_pattern, forbid_weights
from headway.attention.linear.features import FEATURES
from headway.attention.linear.forms import FORMS
from headway.attention.linear.state import LinearState
from headway.attention.linear.value import Linear

__all__ = [
    "FEATURES",
    "FORMS",
    "Linear",
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
