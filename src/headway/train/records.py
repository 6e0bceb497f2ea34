"""The records of a run: which of them are trained on, which are held out, which are left out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from headway.data import Permutation
from headway.data.record_kinds import Record
from headway.data.records import read_records
from headway.errors import DataError
from headway.train.rows_config import RowsConfig

BROKEN = 0.01  # share of the records that may be left out, because they cannot be read

Kinds = tuple[type[Record], ...]


class Split(NamedTuple):
    """Records to train on, those that are held out (None without any), and what is said of them."""

    train: list[Record]
    held: list[Record] | None
    remarks: list[str]


def split(config: RowsConfig, kinds: Kinds, measured: Kinds) -> Split:
    """The records of the settings; `validation_share` of them, at least one, are drawn by `seed`. Raises as `read_all`
    does."""
    train, remarks = read_all(config.data, kinds)
    if config.validation is not None:
        held, more = read_all(config.validation, measured)
        return Split(train, held, remarks + more)
    if not config.validation_share:
        return Split(train, None, remarks)
    count = max(1, round(config.validation_share * len(train)))
    if count >= len(train):
        raise DataError(
            f"{config.data}: {len(train)} records leave none to train on where {count} are held out"
        )
    chosen = {*map(Permutation(config.seed, 0, len(train)), range(count))}
    rest = [record for i, record in enumerate(train) if i not in chosen]
    return Split(rest, [train[i] for i in sorted(chosen)], remarks)


def measured_records(
    config: RowsConfig, kinds: Kinds, limit: int | None = None
) -> tuple[list[Record], list[str]]:
    """The records that a model is measured on: all of `data`, or with `validation_share` those that a run of these
    settings holds out; of them `limit`, drawn whatever their order. And what is said of them. Raises as `split`."""
    if config.validation_share:
        _, held, remarks = split(config, kinds, kinds)
        assert held is not None
    else:
        held, remarks = read_all(config.data, kinds)
    if limit is not None and limit < len(held):
        remarks = [*remarks, f"{limit} of {len(held)} records are measured, drawn by a fixed seed"]
    return [held[i] for i in sample(len(held), limit)], remarks


def sample(count: int, limit: int | None) -> list[int]:
    """`limit` numbers below `count` in their order, the same ones each time; all of them without a limit."""
    return sorted(map(Permutation(0, 0, count), range(min(count, limit or count))))


def read_all(path: str, kinds: Kinds) -> tuple[list[Record], list[str]]:
    """The records of a file, and what is said of those that cannot be read and are left out: up to `BROKEN` of them.
    Raises DataError where they are more, or none is left."""
    broken: list[DataError] = []
    records = list(read_records(path, *kinds, skipped=broken.append))
    if len(broken) > BROKEN * (len(records) + len(broken)):
        raise DataError(f"{broken[0]} ({len(broken)} of {len(records) + len(broken)} records cannot be read)")
    if not records:
        raise DataError(f"{path}: no record in it")
    return records, [f"{path}: {len(broken)} records are left out, as {broken[0]}"] if broken else []


def described(records: Sequence[Record]) -> Mapping[str, Any]:
    """What tells these records from others, their order included; where they stood does not."""
    digest = hashlib.blake2b(digest_size=8)
    for record in records:
        digest.update(repr(replace(record, where="")).encode("utf-8", "surrogatepass"))
    return {"records": len(records), "digest": digest.hexdigest()}
