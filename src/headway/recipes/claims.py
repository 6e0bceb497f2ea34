"""The claims of a recipe: comparisons of the measures of its stages, and the verdict over the seeds."""

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

from headway.errors import ConfigError, check_known

Measures = Mapping[str, Mapping[str, Any]]
"""stage -> name of a measure -> value, of one seed."""
FEWEST = 3
"""Seeds that a verdict takes."""
SIGNS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
OR_EQUAL = (ast.LtE, ast.GtE)
PARTS = (*SIGNS, ast.Compare, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UnaryOp, ast.USub, ast.Load)


@dataclass(frozen=True)
class Claim:
    """`text`, and the comparison that it stands or falls with, which Python evaluates. Measures are STAGE.MEASURE;
    numbers, + - * / and parentheses may be used; a chain a < b < c means both."""

    text: str
    rule: str

    @staticmethod
    def read(text: str, rule: str, stages: Sequence[str]) -> "Claim":
        """Raises ConfigError for a rule that is no comparison, or names a stage that is not there."""
        claim = Claim(str(text), str(rule))
        tree = claim._tree()
        measured = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                check_known(node.id, stages, f"claim {text!r}: there is no stage")
            match node:
                case ast.Constant(value=int() | float()) | ast.Attribute(value=ast.Name()):
                    pass
                case _ if not isinstance(node, PARTS) and node not in measured:
                    raise ConfigError(
                        f"claim {text!r}: {ast.unparse(node)} is neither a number nor STAGE.MEASURE"
                    )
        return claim

    def holds(self, measures: Measures) -> bool:
        """Whether it holds for one seed. Raises ConfigError for a measure that a stage does not have."""
        signs = [type(sign) for sign in self._tree().ops]
        pairs = zip(self.margins(measures), signs, strict=True)
        return all(margin > 0 or (margin == 0 and sign in OR_EQUAL) for margin, sign in pairs)

    def margins(self, measures: Measures) -> list[float]:
        """The margin by which each comparison of the chain holds, for one seed; below zero, it does not. a < b < c has
        the margins b - a and c - b. Raises ConfigError for a measure that a stage does not have."""
        stages = {stage: SimpleNamespace(**_numbers(figures)) for stage, figures in measures.items()}
        tree = self._tree()
        try:
            values = [_value(side, stages) for side in (tree.left, *tree.comparators)]
        except AttributeError as error:
            stage = next(name for name, figures in stages.items() if figures is error.obj)
            raise ConfigError(
                f"claim {self.text!r}: stage {stage} has no measure {error.name!r}; it has {', '.join(vars(error.obj))}"
            ) from None
        rises = [isinstance(sign, ast.Lt | ast.LtE) for sign in tree.ops]
        return [(b - a) if rise else (a - b) for a, b, rise in zip(values, values[1:], rises, strict=False)]

    def verdict(self, seeds: Sequence[Measures]) -> str:
        """`seen` where it holds for each seed, by margins beyond the seeds' spread: the mean of each is at least twice
        its standard error, the standard deviation over the root of the number of seeds. Else `not seen at this size`,
        or `within the spread of seeds` where it holds for each and by less. With the number of seeds for which it
        holds; of fewer than `FEWEST`, how many they are and for how many of them it holds, which is no verdict."""
        count = sum(map(self.holds, seeds))
        if len(seeds) < FEWEST:
            how = ("it does not hold", "it holds in one", "it holds in both")[count]
            return f"two seeds, {how}" if len(seeds) == 2 else f"one seed, {how.removesuffix(' in one')}"
        outcome = "not seen at this size"
        if count == len(seeds):
            by_comparison = zip(*map(self.margins, seeds), strict=True)
            outcome = "seen" if all(map(_beyond_spread, by_comparison)) else "within the spread of seeds"
        return f"{outcome} ({count} of {len(seeds)} seeds)"

    @property
    def operands(self) -> list[tuple[str, str]]:
        """The measures that it compares, as (stage, measure)."""
        return [
            (node.value.id, node.attr.replace("_at_", "@"))
            for node in ast.walk(self._tree())
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        ]

    def _tree(self) -> ast.Compare:
        try:
            tree = ast.parse(self.rule.replace("@", "_at_"), mode="eval").body
        except SyntaxError as error:
            raise ConfigError(f"claim {self.text!r}: {self.rule!r} is no comparison: {error.msg}") from None
        if not (isinstance(tree, ast.Compare) and all(isinstance(sign, SIGNS) for sign in tree.ops)):
            raise ConfigError(f"claim {self.text!r}: {self.rule!r} must compare by <, <=, > or >=")
        return tree


def _value(side: ast.expr, stages: Mapping[str, SimpleNamespace]) -> float:
    """The value of one side of a comparison."""
    code = compile(ast.Expression(side), "<claim>", "eval")
    return float(
        eval(code, {"__builtins__": {}}, {**stages})
    )  # of numbers, names and signs alone: `Claim.read`


def _beyond_spread(margins: Sequence[float]) -> bool:
    """0.1, 0.2 and 0.3 have the mean 0.2, the standard deviation 0.1 and the standard error 0.058: beyond it."""
    return fmean(margins) >= 2 * stdev(margins) / math.sqrt(len(margins))


def _numbers(measures: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among measures, by names that Python takes: val_accuracy@128 is val_accuracy_at_128."""
    return {name.replace("@", "_at_"): v for name, v in measures.items() if isinstance(v, int | float)}
