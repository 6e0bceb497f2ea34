"""The check of numbers quoted from docs/results accepts right quotations and notices wrong ones."""

import re
from pathlib import Path

import pytest

from tests.quotes import check, quotes_of

RESULT = """
| stage | loss | right | tokens |
| --- | --- | --- | --- |
| a, b | 4.397 ± 0.0079 | 0.867 | 12 000 |
| twice | 1 | 2 | 3 |
| twice | 1 | 2 | 3 |

### part

In steps of 5 it falls 50-fold,
from 1,095 to 22.
"""


@pytest.mark.parametrize(
    ("link", "fails"),
    [
        ('[4.40 ± 0.008](../results/x.md "a, b, loss")', ""),
        ('[4.41](../results/x.md "a, b, loss")', "has '4.397"),
        ('[86.7 %](../results/x.md "a, b, right")', ""),
        ('[87 %](../results/x.md "a, b, right")', ""),
        ('[86 %](../results/x.md "a, b, right")', "has '0.867'"),
        ('[12000](../results/x.md "a, b, tokens")', ""),
        ('[12000 or 5](../results/x.md "a, b, tokens")', "has '12 000'"),
        ('[1](../results/x.md "twice, loss")', "neither the words nor the cell"),
        ('[4.4](../results/x.md "a, loss")', "neither the words nor the cell"),
        ('[fifty](../results/x.md#part "falls 50-fold")', "no number"),
        ('[50](../results/x.md#part "falls 50-fold, from 1,095 to 22")', ""),
        ('[1095](../results/x.md "falls 50-fold,\n from 1,095 to 22")', ""),
        ('[5](../results/x.md#part "falls 50-fold")', "no ['5']"),
        ('[51](../results/x.md#part "falls 51-fold")', "neither the words nor the cell"),
        ('[50](../results/x.md#parts "falls 50-fold")', "no section parts"),
    ],
)
def test_another_number_than_that_of_the_results_is_noticed(link: str, fails: str, tmp_path: Path) -> None:
    (tmp_path / "x.md").write_text(RESULT)
    ((quote),) = quotes_of(link)
    if not fails:
        check(quote, tmp_path / "x.md")
        return
    with pytest.raises(AssertionError, match=re.escape(fails)):
        check(quote, tmp_path / "x.md")
