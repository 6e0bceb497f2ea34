"""Claims about the measures of stages: `mean.val_loss < first.val_loss < random.val_loss`, seen or not."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from headway.errors import ConfigError, check_known

Measures = Mapping[str, Mapping[str, Any]]
"""stage -> name of a measure -> value, of one seed."""
SIGNS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
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
        if not (isinstance(tree, ast.Compare) and all(isinstance(sign, SIGNS) for sign in tree.ops)):
            raise ConfigError(f"claim {text!r}: {rule!r} must compare by <, <=, > or >=")
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
        """For one seed. Raises ConfigError for a measure that a stage does not have."""
        stages = {stage: SimpleNamespace(**_numbers(own)) for stage, own in measures.items()}
        try:
            code = compile(ast.Expression(self._tree()), "<claim>", "eval")
            return bool(eval(code, {"__builtins__": {}}, stages))  # of numbers, names and signs alone: `read`
        except AttributeError as error:
            stage = next(name for name, own in stages.items() if own is error.obj)
            raise ConfigError(
                f"claim {self.text!r}: stage {stage} has no measure {error.name!r}; it has {', '.join(vars(error.obj))}"
            ) from None

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

    def _tree(self) -> ast.expr:
        try:
            return ast.parse(self.rule.replace("@", "_at_"), mode="eval").body
        except SyntaxError as error:
            raise ConfigError(f"claim {self.text!r}: {self.rule!r} is no comparison: {error.msg}") from None


def _numbers(measures: Mapping[str, Any]) -> dict[str, float]:
    """By names that Python takes: val_accuracy@128 is val_accuracy_at_128."""
    return {name.replace("@", "_at_"): v for name, v in measures.items() if isinstance(v, int | float)}
