"""Attention that is declared by a pattern and computed by the backend best suited to the call."""

from headway.attention.attend import attend, attend_keys, attention_weights
from headway.attention.backends.base import Backend, Capabilities, Gradients, Status
from headway.attention.key_values import KeyValues
from headway.attention.plan import Entry, Plan, plan
from headway.attention.select import BACKENDS, Rule, choose, register

__all__ = [
    "BACKENDS",
    "Backend",
    "Capabilities",
    "Entry",
    "Gradients",
    "KeyValues",
    "Plan",
    "Rule",
    "Status",
    "attend",
    "attend_keys",
    "attention_weights",
    "choose",
    "plan",
    "register",
]
