"""Choices with their reasons: the choice of a backend, a cache, a dtype or a plan returns one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """A choice and its reason.

    Attributes:
        what: name of what was chosen ("sdpa", "ring").
        why: one clause that gives the reason.
        flops: expected floating-point operations, if known (a multiply-add counts as two).
        bytes: bytes that will be held or moved, if known; `why` says which.
        rejected: pairs (name, reason) of the rejected alternatives.
    """

    what: str
    why: str
    flops: float | None = None
    bytes: float | None = None
    rejected: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        rejected = "".join(f"; not {name}: {reason}" for name, reason in self.rejected)
        return f"{self.what}: {self.why}{rejected}"
