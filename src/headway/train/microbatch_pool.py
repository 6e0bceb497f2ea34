"""Computing micro batches: the number format, the threads, the weights.

Micro batches run side by side: a few threads compute alone, instead of one that calls for help at every product.

Torch's threads meet at the end of every operation. In a small model that is thousands of meetings a step, and when
another process holds one of the cores, everybody waits for it every time. Workers meet once a step.
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
    """`count` threads, each with one CPU thread of torch; one worker is the caller itself, with all of torch's.

    A context manager: while it is open with several workers, torch in the calling thread has one CPU thread too.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None

    def map(self, run: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """`run` of every item, results in the order of the items whoever is done first."""
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
    """The number of micro batches of a step that run side by side, as `what`. `gradient` is the bytes of one.

    As many as there are CPU threads, unless there are fewer micro batches, the gradients that all of them hold at
    once would take more than a GiB, or dropout draws its seeds in the order of the micro batches.
    """
    if config.in_one_pass:
        return Choice("1", "the loss compares all rows of a step, which is one forward pass")
    workers, threads = config.workers, config.threads or torch.get_num_threads()
    micro_batches = -(-config.rows_per_step // (config.micro_batch or 1))
    kinds = {kind: getattr(spec, kind) for kind in ("attention_dropout", "dropout", "activation_dropout")}
    kinds["adapter_dropout"] = config.adapter_dropout
    dropout = next((f"{kind.replace('_', ' ')} {p}" for kind, p in kinds.items() if p), None)
    if dropout is not None:
        if workers is not None and workers > 1:
            raise ConfigError(
                f"workers={workers} with {dropout}: its seeds are drawn in the order "
                "of the micro batches, so they run one after the other; leave workers out, or set it to 1"
            )
        return Choice("1", "dropout draws its seeds in the order of the micro batches")
    if workers is not None:
        return Choice(str(min(workers, micro_batches)), "asked for")
    mesh = Mesh() if config.mesh is None else Mesh.read(config.mesh)
    if mesh.fsdp > 1:
        return Choice("1", "sharded weights are gathered for one micro batch at a time")
    if mesh.expert > 1:
        return Choice("1", "rows are sent to their experts for one micro batch at a time")
    held = threads * gradient
    if threads > 1 and held > GRADIENT_BYTES:
        return Choice("1", f"the gradients of {threads} workers would take {held / 2**30:.1f} GiB")
    return Choice(str(min(threads, micro_batches)), "micro batches side by side, one CPU thread each")


def choose_precision(dtype: str) -> Choice:
    """The dtype of matrix products for `dtype`; `what` is "bf16" or "fp32".

    Raises ConfigError for fp16: CPUs without native fp16 products are some 500 times slower in it than in
    bf16, and its range needs loss scaling.
    """
    if dtype == "fp16":
        raise ConfigError(
            "dtype=fp16 was asked for, but training on a CPU in fp16 is some 500 times slower than in bf16 and "
            "overflows at 65504; use dtype=bf16 (same size, range of fp32) or dtype=fp32"
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
    """fp32 weights that are trained, and the modules that compute with them.

    In fp32 the module that computes is the trained one; in bf16 it is a copy, which shares frozen weights. A copy
    rather than autocast: under autocast every activation is cast on its way into every product and the residual stream
    stays fp32, which costs more time than the products of a small model.

    `replicas` share the weights that compute and have gradients of their own, so that as many micro batches can run
    their `.backward()` at the same time. `collect` adds their gradients to the fp32 ones, in the order of the
    replicas, so that the sum does not depend on which was done first.

    Args:
        master: the module that is trained. Its frozen parts should be in `dtype`: they are then held once.
        dtype: of the weights that compute.
        replicas: micro batches that run at the same time.
    """

    def __init__(self, master: M, dtype: torch.dtype, replicas: int = 1) -> None:
        self.master = master
        self.compute: M = master if dtype == torch.float32 else _copy(master, _is_frozen).to(dtype)
        self.replicas = [self.compute, *(_copy(self.compute, lambda t: True) for _ in range(replicas - 1))]

    def collect(self) -> None:
        """Add the gradients of the replicas to `.grad` of the fp32 weights, and drop them."""
        for replica in self.replicas:
            if replica is self.master:
                continue  # its gradients are the master's
            for param, copied in zip(self.master.parameters(), replica.parameters(), strict=True):
                if copied.grad is not None:
                    param.grad = copied.grad.float() if param.grad is None else param.grad.add_(copied.grad)
                    copied.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """After an optimizer step: the weights that compute take the new values."""
        if self.compute is not self.master:
            for param, copied in zip(self.master.parameters(), self.compute.parameters(), strict=True):
                if param.requires_grad:
                    copied.copy_(param)


def _is_frozen(tensor: Tensor) -> bool:
    """Whether a parameter is not trained, or a buffer has whole numbers."""
    return not (tensor.requires_grad if isinstance(tensor, nn.Parameter) else tensor.is_floating_point())


def _copy(module: M, shares: Callable[[Tensor], bool]) -> M:
    """A copy of a module with `.grad` of its own, of which parameters and buffers that it `shares` are the same
    memory."""
    memo: dict[int, Tensor] = {id(b): b for b in module.buffers() if shares(b)}
    for p in filter(shares, module.parameters()):
        memo[id(p)] = nn.Parameter(p.detach(), requires_grad=p.requires_grad)
    return copy.deepcopy(module, memo)
