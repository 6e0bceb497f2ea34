"""How the processes of a run share its work."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod

from headway.errors import ConfigError, listed


@dataclass(frozen=True)
class Mesh:
    """Processes numbered along two axes, the last fastest: rank = dp_rank cp + cp_rank.

    Attributes:
        dp: data parallel: processes that share the micro batches of a step.
        cp: context parallel: processes that share the tokens of each row (`ContextParallel`).
    """

    dp: int = 1
    cp: int = 1

    @staticmethod
    def of(text: str | None, ranks: int) -> Mesh:
        """`dp=2,cp=4` for 8 processes; all of them data parallel where nothing is asked for.

        Raises ConfigError for another number of processes than there are, and for what is no mesh."""
        if text is None:
            return Mesh(dp=ranks)
        axes = [field.name for field in fields(Mesh)]
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition("=")
            if name not in axes or name in sizes or not number.isdecimal() or int(number) < 1:
                raise ConfigError(
                    f"mesh {text!r}: {part.strip()!r} is no axis; write {listed(axes)}, each at most once, as in "
                    "dp=2,cp=4"
                )
            sizes[name] = int(number)
        if (asked := prod(sizes.values())) != ranks:
            raise ConfigError(
                f"mesh {text!r} is of {asked} processes, and the run has {ranks}; start as many (headway train "
                f"--processes {asked}, or torchrun), or give another mesh"
            )
        return Mesh(**sizes)

    @property
    def ranks(self) -> int:
        """How many processes there are."""
        return self.dp * self.cp

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
