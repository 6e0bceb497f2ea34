"""Which records of a file are trained on, and which are held out."""

import json
from pathlib import Path

import pytest

from headway.data.record_kinds import Text
from headway.errors import DataError
from headway.train import TextConfig
from headway.train.records import split


@pytest.mark.parametrize(("count", "share", "held"), [(7, 0.01, 1), (7, 0.25, 2), (7, 0.3, 2), (8, 0.2, 2)])
def test_a_share_of_the_records_is_held_out_and_at_least_one(
    count: int, share: float, held: int, tmp_path: Path
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(count)))
    drawn = []
    for seed in (0, 0, 1, 2):
        config = TextConfig.of({"data": str(file), "validation_share": share, "seed": seed})
        train, out, _ = split(config, (Text,), (Text,))
        assert out is not None
        assert len(out) == held
        assert sorted(r.text for r in [*train, *out] if isinstance(r, Text)) == [*map(str, range(count))]
        drawn.append([r.where for r in out])
    assert drawn[0] == drawn[1]
    assert len({*map(tuple, drawn)}) > 1


def test_something_is_left_to_train_on(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "a"}\n')
    config = TextConfig.of({"data": str(file), "validation_share": 0.1})
    with pytest.raises(DataError, match="1 records leave none to train on where 1 are held out"):
        split(config, (Text,), (Text,))
