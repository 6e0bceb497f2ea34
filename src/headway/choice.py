"""Choices are values with reasons: backend, cache, dtype and plan each return one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """A choice and its reason.

    Attributes:
        what: the name of what was chosen ("sdpa", "ring").
        why: one clause that gives the reason.
        flops: floating-point operations that it will spend, where known (a multiply-add counts as two).
        bytes: bytes that it will hold or move, where known; `why` says which.
        rejected: pairs (name, reason) of what was not chosen.
    """

    what: str
    why: str
    flops: float | None = None
    bytes: float | None = None
    rejected: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        rest = "".join(f"; not {name}: {reason}" for name, reason in self.rejected)
        return f"{self.what}: {self.why}{rest}"
