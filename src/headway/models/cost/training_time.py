"""The minimum time that training on a data set takes, and the utilization that a measured time implies."""

from dataclasses import dataclass

from headway.errors import ConfigError
from headway.models.cost.operations import train_flops
from headway.models.spec import ModelSpec


@dataclass(frozen=True)
class TrainingTime:
    """The cost of training on `rows` full rows for `epochs` epochs, on `devices` devices of equal peak.

    Attributes:
        tokens: rows x context x epochs, an upper bound, since shorter rows have fewer tokens.
        flops: model FLOPs, without the recomputation of checkpointed blocks.
        seconds: time at the peak of all devices, which no run reaches.
        hours: the measured hours, and share: seconds / (3600 hours), the utilization; both None if no hours are given.
    """

    rows: int
    epochs: int
    devices: int
    tokens: int
    flops: float
    seconds: float
    hours: float | None = None
    share: float | None = None


def training_time(
    spec: ModelSpec,
    context: int,
    rows: int,
    peak: float,
    *,
    epochs: int = 1,
    devices: int = 1,
    hours: float | None = None,
    source: int | None = None,
) -> TrainingTime:
    """Returns the operations of training (`train_flops`), and the seconds they take at the peak (FLOP/s of one device).

    Raises ConfigError if hours is not above 0.
    """
    if hours is not None and hours <= 0:
        raise ConfigError(f"plan: hours must be above 0, got {hours:g}")
    tokens = rows * context * epochs
    flops = tokens * train_flops(spec, context, source)
    seconds = flops / (peak * devices)
    share = None if hours is None else seconds / (3600 * hours)
    return TrainingTime(rows, epochs, devices, tokens, flops, seconds, hours, share)
