"""What autograd keeps for a backward."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Yields a list that every tensor is added to that autograd saves inside the context."""
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with saved_tensors_hooks(keep, lambda t: t):
        yield saved


def storage_sizes(tensors: Iterable[Tensor], without: Iterable[Tensor] = ()) -> list[int]:
    """Returns the bytes of each distinct storage of `tensors` that is none of `without`."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    for t in without:
        sizes.pop(t.untyped_storage().data_ptr(), None)
    return [*sizes.values()]
