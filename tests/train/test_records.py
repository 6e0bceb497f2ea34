"""Which records of a file are trained on and which are held out."""

import json
from pathlib import Path

import pytest

from headway.data.record_kinds import Labelled
from headway.errors import DataError
from headway.train import TextConfig
from headway.train.tasks.records import sample, split


@pytest.mark.parametrize(("count", "share", "held"), [(7, 0.01, 1), (7, 0.25, 2), (7, 0.3, 2), (8, 0.2, 2)])
def test_a_share_of_the_records_is_held_out_and_at_least_one(
    count: int, share: float, held: int, tmp_path: Path
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps({"text": str(i), "label": 1}) + "\n" for i in range(count)))
    drawn = []
    for seed in (0, 0, 1, 2):
        config = TextConfig.of({"data": str(file), "validation_share": share, "seed": seed})
        train, held_records, _ = split(config, (Labelled,), (Labelled,))
        assert held_records is not None
        assert len(held_records) == held
        assert sorted(r.text for r in [*train, *held_records] if isinstance(r, Labelled)) == [
            *map(str, range(count))
        ]
        drawn.append([r.where for r in held_records])
    assert drawn[0] == drawn[1]
    assert len({*map(tuple, drawn)}) > 1


def test_something_is_left_to_train_on(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "a", "label": 1}\n')
    config = TextConfig.of({"data": str(file), "validation_share": 0.1})
    with pytest.raises(
        DataError, match="validation_share holds out 1 of 1 records, which leaves none to train on"
    ):
        split(config, (Labelled,), (Labelled,))


def test_a_sample_is_drawn_whatever_the_order_and_is_always_the_same() -> None:
    """In a file sorted by class, each class has its share, to 4 standard deviations of draws without replacement."""
    drawn = sample(3000, 300)
    assert drawn == sorted({*drawn}) == sample(3000, 300)
    assert len(drawn) == 300
    assert 0 <= drawn[0] <= drawn[-1] < 3000
    deviation = (300 * 1 / 3 * 2 / 3 * 2700 / 2999) ** 0.5
    for begin in (0, 1000, 2000):
        assert abs(sum(begin <= i < begin + 1000 for i in drawn) - 100) < 4 * deviation
    assert sample(5, None) == sample(5, 5) == sample(5, 9) == [0, 1, 2, 3, 4]
