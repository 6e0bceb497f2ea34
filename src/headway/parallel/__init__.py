"""The processes of a distributed run, and how they share its work: context parallelism shards the tokens of rows for
declared patterns (partial attention results merge exactly), tensor parallelism shards heads and hidden units, expert
parallelism shards experts."""

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
