"""How the processes of a run share its work."""

from dataclasses import dataclass, fields
from itertools import product

from headway.errors import ConfigError, listed


@dataclass(frozen=True)
class Mesh:
    """Processes numbered along five axes, the last fastest: the process at (d, f, e, c, t) has rank
    (((d fsdp + f) expert + e) cp + c) tp + t.

    Attributes:
        dp: data parallel: processes that share the micro-batches of a step.
        fsdp: fully sharded data parallel: these also share micro-batches, and each has a part of every weight.
        expert: expert parallel: these also share micro-batches, and each has experts of its own in every layer
            (`ExpertParallel`); cannot be combined with fsdp or tp.
        cp: context parallel: processes that share the tokens of each row (`ContextParallel`).
        tp: tensor parallel: processes that share the heads and the hidden units of each layer.

    Raises ConfigError for axes that cannot be combined.
    """

    dp: int = 1
    fsdp: int = 1
    expert: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if self.expert > 1 and self.fsdp * self.tp > 1:
            axis = "fsdp" if self.fsdp > 1 else "tp"
            raise ConfigError(
                f"mesh {self}: expert cannot be combined with {axis} yet; leave out one of them"
            )

    @staticmethod
    def of(text: str | None, ranks: int) -> "Mesh":
        """Returns the mesh of `dp=2,cp=4` for 8 processes; None makes all of them data parallel.

        Raises ConfigError for a mesh of another number of processes than `ranks`, and for a text that is not a mesh."""
        if text is None:
            return Mesh(dp=ranks)
        mesh = Mesh.read(text)
        if mesh.ranks != ranks:
            raise ConfigError(
                f"mesh {text!r} needs {mesh.ranks} processes, but the run has {ranks}; start {mesh.ranks} (headway "
                f"train --processes {mesh.ranks}, or torchrun), or change the mesh"
            )
        return mesh

    @staticmethod
    def read(text: str) -> "Mesh":
        """Returns the mesh that a text such as `dp=2,cp=4` describes. Raises ConfigError for a text that is not a
        mesh."""
        axes = [field.name for field in fields(Mesh)]
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition("=")
            if name not in axes or name in sizes or not number.isdecimal() or int(number) < 1:
                raise ConfigError(
                    f"mesh {text!r}: {part.strip()!r} is not axis=size with a size of at least 1; axes are "
                    f"{listed(axes)}, each at most once, as in dp=2,cp=4"
                )
            sizes[name] = int(number)
        return Mesh(**sizes)

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.batches * self.cp * self.tp

    @property
    def batches(self) -> int:
        """Number of processes, or groups of them, that share the micro-batches of a step."""
        return self.dp * self.fsdp * self.expert

    def share(self, rank: int, count: int) -> range:
        """Returns the indices of a process's micro-batches, or rows, out of `count`: each is assigned once over the
        axes dp, fsdp and expert. With dp=2, the first process has 0, 2 and 4 of 5."""
        return range(rank // (self.cp * self.tp), count, self.batches)

    def place(self, rank: int) -> "Mesh":
        """Returns the number of a process along each axis."""
        places = {}
        for axis, size in reversed(vars(self).items()):
            rank, places[axis] = divmod(rank, size)  # dp=2,tp=4: rank 6 has tp 2, then dp 1
        return Mesh(**places)

    def groups(self, *axes: str) -> list[list[int]]:
        """Returns the groups of processes whose places differ along these axes alone."""
        groups: dict[tuple[int, ...], list[int]] = {}
        sizes = vars(self)
        for rank, place in enumerate(product(*map(range, sizes.values()))):
            key = tuple(p for p, axis in zip(place, sizes, strict=True) if axis not in axes)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())

    def __str__(self) -> str:
        """Returns the axes that have more than one process."""
        return ",".join(f"{axis}={size}" for axis, size in vars(self).items() if size > 1) or "dp=1"
