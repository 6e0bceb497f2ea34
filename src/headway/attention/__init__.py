"""Attention: declared by a pattern, computed by the best backend that can."""

from headway.attention.attend import attend, attend_keys, attention_weights
from headway.attention.backends import ABILITIES, Ability, choose
from headway.attention.keys import Keys
from headway.attention.plan import Entry, Plan, plan, simplify

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
