"""The processes of a run, and how they share its work: rows by context parallel for declared patterns, by the law that
partials merge; heads and hidden units by tensor parallel; experts by expert parallel."""

from headway.parallel.context import ContextParallel
from headway.parallel.exchange import DistributedExchange, Exchange
from headway.parallel.experts import ExpertParallel
from headway.parallel.layout import ShardLayout, choose_layout
from headway.parallel.mesh import Mesh
from headway.parallel.plan import ContextPlan
from headway.parallel.processes import Parallel, joined
from headway.parallel.tensor import Shards, TensorParallel

__all__ = [
    "ContextParallel",
    "ContextPlan",
    "DistributedExchange",
    "Exchange",
    "ExpertParallel",
    "Mesh",
    "Parallel",
    "ShardLayout",
    "Shards",
    "TensorParallel",
    "choose_layout",
    "joined",
]
