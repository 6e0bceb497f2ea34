"""Attention: declared by a pattern, computed by the best backend that can."""

from headway.attention.attend import attend, attend_keys, attention_weights
from headway.attention.key_values import KeyValues
from headway.attention.plan import Entry, Plan, plan, simplify
from headway.attention.select import CAPABILITIES, Capabilities, choose

__all__ = [
    "CAPABILITIES",
    "Capabilities",
    "Entry",
    "KeyValues",
    "Plan",
    "attend",
    "attend_keys",
    "attention_weights",
    "choose",
    "plan",
    "simplify",
]
