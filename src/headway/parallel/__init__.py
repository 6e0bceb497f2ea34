"""Rows sharded over ranks: context parallel for declared patterns, by the law that partials merge."""

from headway.parallel.context import ContextParallel
from headway.parallel.exchange import DistributedExchange, Exchange
from headway.parallel.layout import ShardLayout, choose_layout
from headway.parallel.plan import ContextPlan, Read
from headway.parallel.simulation import simulate

__all__ = [
    "ContextParallel",
    "ContextPlan",
    "DistributedExchange",
    "Exchange",
    "Read",
    "ShardLayout",
    "choose_layout",
    "simulate",
]
