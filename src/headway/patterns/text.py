"""The text form of patterns: `parse(str(p)) == p`."""

import ast
from collections.abc import Callable
from operator import and_, or_
from typing import Any

from headway.errors import PatternError, as_error, did_you_mean
from headway.patterns.base import Pattern, PerHead
from headway.patterns.leaves import Causal, Chunk, Full, Global, GlobalKeys, GlobalQueries, Sink, Window

SPELLED = (
    Full, Causal, Window, Window.last, Window.around, Chunk, Sink, GlobalKeys, GlobalQueries, Global, PerHead
)  # fmt: skip
NAMES: dict[str, Callable[..., Pattern]] = {spelled.__qualname__: spelled for spelled in SPELLED}
_KNOWN = f"known: {', '.join(NAMES)}, joined by & and |"


def parse(text: str) -> Pattern:
    """Returns the pattern that `text` spells: names and calls of this package, joined by & and |, with parentheses.

    Example: `Window.last(512) & Causal() | Sink(4)`; & binds tighter than |; a name without arguments may omit its
    parentheses. Nothing but these names is evaluated.

    Raises:
        PatternError: with the position in the text and, for an unknown name, the nearest known one.
    """
    if not isinstance(text, str) or not text.strip():
        raise PatternError(f'pattern must be text such as "Window.last(512) & Causal()", got {text!r}')
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        at = error.offset or len(text.strip()) + 1  # the offset is 0 if the text ends too early
        raise PatternError(f"pattern {text!r}: cannot be read at character {at}: {error.msg}") from None
    except UnicodeEncodeError as error:
        raise PatternError(
            f"pattern {text!r}: cannot be read at character {error.start + 1}: {error.reason}"
        ) from None
    except (RecursionError, MemoryError):
        raise _too_deep(text) from None
    try:
        pattern = _value(tree.body)
    except PatternError as error:
        raise PatternError(f"pattern {text!r}: {error}") from None
    except RecursionError:
        raise _too_deep(text) from None
    if not isinstance(pattern, Pattern):
        raise PatternError(f"pattern {text!r}: {pattern!r} is not a pattern; {_KNOWN}")
    return pattern


def _too_deep(text: str) -> PatternError:
    return PatternError(
        f"pattern: the text of {len(text)} characters has too many nested operators or parentheses; simplify it"
    )


def _value(node: ast.expr) -> Any:
    """Returns the value of a part of the text: a pattern, or a number among its arguments."""
    place = f"{ast.unparse(node)!r} at character {node.col_offset + 1}"
    match node:
        case ast.BinOp(left, ast.BitAnd() | ast.BitOr() as sign, right):
            parts = _value(left), _value(right)
            if not isinstance(parts[0], Pattern):
                raise PatternError(f"{place}: {parts[0]} is not a pattern; {_KNOWN}")
            return and_(*parts) if isinstance(sign, ast.BitAnd) else or_(*parts)
        case ast.UnaryOp(ast.USub(), ast.Constant(int(number))):
            return -number
        case ast.Constant(value):
            if type(value) is not int:
                raise PatternError(f"{place} is neither a pattern nor a whole number")
            return value
        case ast.Call(func, arguments, keywords):
            return _called(func, arguments, keywords)
        case ast.Name() | ast.Attribute():
            return _called(node, [], [])
    raise PatternError(f"{place} is not a pattern; {_KNOWN}")


def _called(func: ast.expr, arguments: list[ast.expr], keywords: list[ast.keyword]) -> Pattern:
    """Returns the pattern of a name with its arguments. Raises PatternError for an unknown name or arguments that
    do not fit."""
    name, at = ast.unparse(func), func.col_offset + 1
    if name not in NAMES:
        raise PatternError(f"unknown name {name!r} at character {at}{did_you_mean(name, NAMES)}; {_KNOWN}")
    positional, named = (
        [_value(argument) for argument in arguments],
        {k.arg or "**": _value(k.value) for k in keywords},
    )
    with as_error(PatternError, f"{name} at character {at}", TypeError):
        return NAMES[name](*positional, **named)
