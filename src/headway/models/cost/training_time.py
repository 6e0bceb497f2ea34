"""The least time that training on a data set takes, and the share of the peak that a given time implies."""

from dataclasses import dataclass

from headway.errors import ConfigError
from headway.models.cost.operations import train_flops
from headway.models.spec import ModelSpec


@dataclass(frozen=True)
class TrainingTime:
    """The cost of training on `rows` full rows, `epochs` times, on `devices` of one peak.

    Attributes:
        tokens: rows x context x epochs: the most that there are, since shorter rows have fewer.
        flops: operations, without what checkpointed blocks compute again.
        seconds: at the peak of all devices, which no run reaches.
        hours: as given, and share: seconds / (3600 hours); both None where no hours are given.
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
    """The operations of training (`train_flops`), and the seconds that they take at the peak (FLOP/s, of one device).

    Raises ConfigError for hours that are not above 0."""
    if hours is not None and hours <= 0:
        raise ConfigError(f"plan: a training takes hours above 0, got {hours:g}")
    tokens = rows * context * epochs
    flops = tokens * train_flops(spec, context, source)
    seconds = flops / (peak * devices)
    share = None if hours is None else seconds / (3600 * hours)
    return TrainingTime(rows, epochs, devices, tokens, flops, seconds, hours, share)
