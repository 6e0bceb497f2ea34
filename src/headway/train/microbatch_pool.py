"""Computing micro-batches: the number format, the threads, and the weights.

Micro-batches run in parallel, each on one thread, instead of one after the other with all threads in each operation.

Torch's threads synchronize at the end of every operation. In a small model that is thousands of times per step, and if
another process uses one of the cores, all threads wait for that core every time. Workers synchronize once per step.
"""

import copy
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from headway.choice import Choice
from headway.errors import ConfigError
from headway.hardware import multiplies
from headway.models import ModelSpec
from headway.parallel import Mesh
from headway.processor import cpu_name
from headway.train.rows_config import RowsConfig

GRADIENT_BYTES = 1 << 30
T = TypeVar("T")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class MicrobatchPool:
    """A pool of `count` worker threads, in each of which torch uses one CPU thread. With a count of 1 the caller itself
    computes, with all of torch's threads.

    A context manager: while it is open with several workers, torch uses one CPU thread in the calling thread, too.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None

    def map(self, run: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """Calls `run` for every item; returns the results in the order of the items."""
        return map(run, items) if self._pool is None else self._pool.map(run, items)

    def __enter__(self) -> "MicrobatchPool":
        if self.count > 1:
            self._before = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(self.count, initializer=torch.set_num_threads, initargs=(1,))
            torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
            torch.set_num_threads(self._before)


ALONE = MicrobatchPool(1)


def choose_workers(config: RowsConfig, spec: ModelSpec, gradient: int) -> Choice:
    """Chooses the number of micro-batches of a step that run in parallel (`what` of the choice). `gradient` is the
    number of bytes of the gradients that one worker holds.

    As many as there are CPU threads or micro-batches, whichever is less; but 1 if the loss compares all rows of a step,
    if dropout draws its seeds in the order of the micro-batches, if weights or experts are sharded, or if the gradients
    of all workers would take more than a GiB. Raises ConfigError for several `workers` with dropout.
    """
    if config.in_one_pass:
        return Choice("1", "the loss compares all rows of a step, which is one forward pass")
    workers, threads = config.workers, config.threads or torch.get_num_threads()
    micro_batches = -(-config.rows_per_step // (config.micro_batch or 1))
    rates = {name: getattr(spec, name) for name in ("attention_dropout", "dropout", "activation_dropout")}
    rates["adapter_dropout"] = config.adapter_dropout
    dropout = next((f"{name.replace('_', ' ')} {p}" for name, p in rates.items() if p), None)
    if dropout is not None:
        if workers is not None and workers > 1:
            raise ConfigError(
                f"workers={workers} with {dropout}: dropout draws its seeds in the order of the micro batches, which "
                "therefore cannot run in parallel; leave workers out, or set it to 1"
            )
        return Choice("1", "dropout draws its seeds in the order of the micro batches")
    if workers is not None:
        return Choice(str(min(workers, micro_batches)), "asked for")
    mesh = Mesh() if config.mesh is None else Mesh.read(config.mesh)
    if mesh.fsdp > 1:
        return Choice("1", "sharded weights are gathered for one micro batch at a time")
    if mesh.expert > 1:
        return Choice("1", "rows are sent to their experts for one micro batch at a time")
    gradient_bytes = threads * gradient
    if threads > 1 and gradient_bytes > GRADIENT_BYTES:
        return Choice("1", f"the gradients of {threads} workers would take {gradient_bytes / 2**30:.1f} GiB")
    return Choice(str(min(threads, micro_batches)), "micro batches side by side, one CPU thread each")


def choose_precision(dtype: str) -> Choice:
    """Chooses the dtype of matrix products for the setting `dtype`; `what` of the choice is "bf16" or "fp32".

    Raises ConfigError for fp16: CPUs without native fp16 products are some 500 times slower in it than in bf16, and its
    range needs loss scaling.
    """
    if dtype == "fp16":
        raise ConfigError(
            "dtype=fp16: training on a CPU in fp16 is some 500 times slower than in bf16 and overflows at 65504; use "
            "dtype=bf16 (same size, range of fp32) or dtype=fp32"
        )
    if dtype == "fp32":
        return Choice("fp32", "asked for")
    native = multiplies(torch.bfloat16)
    if dtype == "bf16":
        slow = "" if native else f", although {cpu_name()} has no bf16 instructions: slower than fp32"
        return Choice("bf16", "asked for" + slow)
    if native:
        return Choice("bf16", "this CPU multiplies bf16 natively", rejected=(("fp32", "slower here"),))
    return Choice("fp32", "this CPU has no bf16 instructions", rejected=(("bf16", "emulated here"),))


class MasterWeights(Generic[M]):
    """fp32 master weights, and the modules that compute with them.

    In fp32 the master module itself computes; in bf16 a copy does, which shares frozen weights. A copy is used rather
    than autocast, under which every activation is cast before every product and the residual stream stays fp32: for a
    small model, that takes more time than the products.

    The `replicas` share the weights that compute but have gradients of their own, so that as many micro-batches can run
    `.backward()` in parallel. `collect` adds their gradients to the master's in the order of the replicas, so that the
    sum does not depend on which finished first.

    Args:
        master: the module that is trained. Its frozen parts should be in `dtype`, so that they are held only once.
        dtype: dtype of the weights that compute.
        replicas: number of micro-batches that run in parallel.
    """

    def __init__(self, master: M, dtype: torch.dtype, replicas: int = 1) -> None:
        self.master = master
        self.compute: M = master if dtype == torch.float32 else _copy(master, _is_frozen).to(dtype)
        self.replicas = [self.compute, *(_copy(self.compute, lambda t: True) for _ in range(replicas - 1))]

    def collect(self) -> None:
        """Adds the gradients of the replicas to `.grad` of the master weights, and frees them."""
        for replica in self.replicas:
            if replica is self.master:
                continue  # its gradients are the master's
            for param, copied in zip(self.master.parameters(), replica.parameters(), strict=True):
                if copied.grad is not None:
                    param.grad = copied.grad.float() if param.grad is None else param.grad.add_(copied.grad)
                    copied.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the master weights to those that compute; to be called after an optimizer step."""
        if self.compute is not self.master:
            for param, copied in zip(self.master.parameters(), self.compute.parameters(), strict=True):
                if param.requires_grad:
                    copied.copy_(param)


def _is_frozen(tensor: Tensor) -> bool:
    """Returns whether a parameter is not trained, or a buffer has an integer dtype."""
    return not (tensor.requires_grad if isinstance(tensor, nn.Parameter) else tensor.is_floating_point())


def _copy(module: M, shares: Callable[[Tensor], bool]) -> M:
    """Returns a copy of a module with gradients of its own. Parameters and buffers for which `shares` returns true use
    the same memory as the original's."""
    memo: dict[int, Tensor] = {id(b): b for b in module.buffers() if shares(b)}
    for p in filter(shares, module.parameters()):
        memo[id(p)] = nn.Parameter(p.detach(), requires_grad=p.requires_grad)
    return copy.deepcopy(module, memo)
