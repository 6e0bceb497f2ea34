"""Claims about the measures of stages: `mean.val_loss < first.val_loss < random.val_loss`, seen or not."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError, did_you_mean

Measures = Mapping[str, Mapping[str, Any]]
"""stage -> name of a measure -> value, of one seed."""
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True)
class Claim:
    """`text`, and the comparison that it stands or falls with. Measures are STAGE.MEASURE; numbers, + - * / and
    parentheses may be used; a chain a < b < c means both."""

    text: str
    rule: str

    @staticmethod
    def read(text: str, rule: str, stages: Sequence[str]) -> Claim:
        """Raises ConfigError for a rule that is no comparison, or names a stage that is not there."""
        claim = Claim(str(text), str(rule))
        for node in ast.walk(claim._tree()):
            if isinstance(node, ast.Name) and node.id not in stages:
                raise ConfigError(
                    f"claim {text!r}: there is no stage {node.id!r}{did_you_mean(node.id, stages)}"
                )
        return claim

    def holds(self, measures: Measures) -> bool:
        """For one seed. Raises ConfigError for a measure that a stage does not have."""
        tree = self._tree()
        sides = [_value(side, measures, self) for side in (tree.left, *tree.comparators)]
        return all(
            _COMPARISONS[type(sign)](a, b) for sign, a, b in zip(tree.ops, sides, sides[1:], strict=False)
        )

    def verdict(self, seeds: Sequence[Measures]) -> str:
        """`seen`, or `not seen at this size`, with the number of seeds for which it holds."""
        count = sum(map(self.holds, seeds))
        said = "seen" if count == len(seeds) else "not seen at this size"
        return f"{said} ({count} of {len(seeds)} seeds)"

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
            tree = ast.parse(_name(self.rule), mode="eval").body
        except SyntaxError as error:
            raise ConfigError(f"claim {self.text!r}: {self.rule!r} is no comparison: {error.msg}") from None
        if not (isinstance(tree, ast.Compare) and all(type(sign) in _COMPARISONS for sign in tree.ops)):
            raise ConfigError(f"claim {self.text!r}: {self.rule!r} must compare by <, <=, > or >=")
        return tree


def _name(measure: str) -> str:
    """A measure's name, such as val_accuracy@128, as Python's."""
    return measure.replace("@", "_at_")


def _value(node: ast.expr, measures: Mapping[str, Mapping[str, Any]], claim: Claim) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Attribute(value=ast.Name(id=stage), attr=name):
            values = {_name(key): value for key, value in measures[stage].items()}
            if not isinstance(values.get(name), int | float):
                numbers = [key for key, value in measures[stage].items() if isinstance(value, int | float)]
                raise ConfigError(
                    f"claim {claim.text!r}: stage {stage} has no measure {name!r}; it has {', '.join(numbers)}"
                )
            return float(values[name])
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _ARITHMETIC:
            return _ARITHMETIC[type(sign)](_value(left, measures, claim), _value(right, measures, claim))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, measures, claim)
    raise ConfigError(f"claim {claim.text!r}: {ast.unparse(node)} is neither a number nor STAGE.MEASURE")
