"""The claims of a recipe: comparisons between the measures of its stages, and their verdicts over the seeds."""

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

from headway.errors import ConfigError, check_known

Measures = Mapping[str, Mapping[str, Any]]
"""stage -> name of a measure -> value, for one seed."""
FEWEST = 3
"""Number of seeds that a verdict needs."""
SIGNS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
OR_EQUAL = (ast.LtE, ast.GtE)
PARTS = (*SIGNS, ast.Compare, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UnaryOp, ast.USub, ast.Load)


@dataclass(frozen=True)
class Claim:
    """A claim in words (`text`), and the comparison that decides it (`rule`), in Python's syntax. Operands are measures
    (STAGE.MEASURE) and numbers, combined by + - * / and parentheses; a chain a < b < c means both comparisons."""

    text: str
    rule: str

    @staticmethod
    def read(text: str, rule: str, stages: Sequence[str]) -> "Claim":
        """Parses a claim. Raises ConfigError for a rule that is no comparison, or that names an unknown stage."""
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
        """Returns whether the claim holds for one seed. Raises ConfigError for a measure that a stage does not have."""
        signs = [type(sign) for sign in self._tree().ops]
        pairs = zip(self.margins(measures), signs, strict=True)
        return all(margin > 0 or (margin == 0 and sign in OR_EQUAL) for margin, sign in pairs)

    def margins(self, measures: Measures) -> list[float]:
        """Returns the margin by which each comparison of the chain holds for one seed, negative if it does not: for
        a < b < c, the margins b - a and c - b. Raises ConfigError for a measure that a stage does not have."""
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
        """Returns the verdict over the seeds, with the number of seeds for which the claim holds:

            seen                         holds for each seed, and the mean of each margin is at least twice its standard
                                         error (standard deviation / sqrt(number of seeds))
            within the spread of seeds   holds for each seed, by smaller margins
            not seen at this size        does not hold for each seed

        For fewer than `FEWEST` seeds there is no verdict: returns for how many of them the claim holds."""
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
        """The measures that the rule uses, as (stage, measure)."""
        return [
            (node.value.id, node.attr.replace("_at_", "@"))
            for node in ast.walk(self._tree())
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        ]

    def _tree(self) -> ast.Compare:
        try:
            tree = ast.parse(self.rule.replace("@", "_at_"), mode="eval").body
        except SyntaxError as error:
            raise ConfigError(
                f"claim {self.text!r}: {self.rule!r} is not a comparison: {error.msg}"
            ) from None
        if not (isinstance(tree, ast.Compare) and all(isinstance(sign, SIGNS) for sign in tree.ops)):
            raise ConfigError(f"claim {self.text!r}: {self.rule!r} must be a comparison with <, <=, > or >=")
        return tree


def _value(side: ast.expr, stages: Mapping[str, SimpleNamespace]) -> float:
    """Evaluates one side of a comparison."""
    code = compile(ast.Expression(side), "<claim>", "eval")
    return float(
        eval(code, {"__builtins__": {}}, {**stages})
    )  # safe: `Claim.read` allows numbers, names and operators only


def _beyond_spread(margins: Sequence[float]) -> bool:
    """Returns whether the mean is at least twice its standard error. 0.1, 0.2 and 0.3 have the mean 0.2, the standard
    deviation 0.1 and the standard error 0.058: true."""
    return fmean(margins) >= 2 * stdev(margins) / math.sqrt(len(margins))


def _numbers(measures: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers among measures, by names that Python can parse: val_accuracy@128 is val_accuracy_at_128."""
    return {name.replace("@", "_at_"): v for name, v in measures.items() if isinstance(v, int | float)}
