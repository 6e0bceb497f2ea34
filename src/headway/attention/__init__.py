"""Attention: declared by a pattern, computed by the best backend that can."""

from headway.attention.attend import attend, attend_keys, attention_weights
from headway.attention.key_values import Keys
from headway.attention.plan import Entry, Plan, plan, simplify
from headway.attention.select import ABILITIES, Ability, choose

__all__ = [
    "ABILITIES",
    "Ability",
    "Entry",
    "Keys",
    "Plan",
    "attend",
    "attend_keys",
    "attention_weights",
    "choose",
    "plan",
    "simplify",
]
