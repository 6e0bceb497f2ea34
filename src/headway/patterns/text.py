"""The text form of patterns: `parse(str(p)) == p`."""

from __future__ import annotations

import ast
from collections.abc import Callable

from headway.errors import PatternError, did_you_mean
from headway.patterns.base import Pattern, PerHead
from headway.patterns.leaves import Causal, Full, Global, GlobalKeys, GlobalQueries, Sink, Window

NAMES: dict[str, Callable[..., Pattern]] = {
    "Full": Full,
    "Causal": Causal,
    "Window": Window,
    "Window.last": Window.last,
    "Window.around": Window.around,
    "Sink": Sink,
    "GlobalKeys": GlobalKeys,
    "GlobalQueries": GlobalQueries,
    "Global": Global,
    "PerHead": PerHead,
}


def parse(text: str) -> Pattern:
    """The pattern that `text` spells: names and calls of this module, joined by & and |, with parentheses.

    `Window.last(512) & Causal() | Sink(4)`; & binds closer than |; a name without arguments may drop its
    parentheses. Nothing is evaluated but these names.

    Raises:
        PatternError: with the place in the text and, for a name, the nearest known one.
    """
    if not isinstance(text, str) or not text.strip():
        raise PatternError(f'pattern: a text such as "Window.last(512) & Causal()" is needed, got {text!r}')
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        at = error.offset or len(text.strip()) + 1  # Python counts 0 where the text ends too early
        raise PatternError(f"pattern {text!r}: cannot be read at character {at}: {error.msg}") from None
    except UnicodeEncodeError as error:
        raise PatternError(
            f"pattern {text!r}: cannot be read at character {error.start + 1}: {error.reason}"
        ) from None
    return _pattern(tree.body, text.strip())


def _pattern(node: ast.expr, text: str) -> Pattern:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        left, right = _pattern(node.left, text), _pattern(node.right, text)
        return left & right if isinstance(node.op, ast.BitAnd) else left | right
    if isinstance(node, ast.Name | ast.Attribute):
        return _call(node, [], {}, text)
    if isinstance(node, ast.Call):
        name = _name(node.func, text)
        read = _pattern if name == "PerHead" else _number
        keywords = {k.arg or "**": _number(k.value, text) for k in node.keywords}
        return _call(node.func, [read(a, text) for a in node.args], keywords, text)
    raise PatternError(
        f"pattern {text!r}: {ast.unparse(node)!r} at character {node.col_offset + 1} is no pattern; "
        f"known are {', '.join(NAMES)}, joined by & and |"
    )


def _call(func: ast.expr, args: list[Pattern | int], keywords: dict[str, int], text: str) -> Pattern:
    name = _name(func, text)
    try:
        return NAMES[name](*args, **keywords)
    except TypeError as error:
        raise PatternError(f"pattern {text!r}: {name} at character {func.col_offset + 1}: {error}") from None
    except PatternError as error:
        raise PatternError(f"pattern {text!r}: {error}") from None


def _name(func: ast.expr, text: str) -> str:
    name = ast.unparse(func)
    if name not in NAMES:
        raise PatternError(
            f"pattern {text!r}: unknown name {name!r} at character {func.col_offset + 1}"
            f"{did_you_mean(name, NAMES)}; known are {', '.join(NAMES)}"
        )
    return name


def _number(node: ast.expr, text: str) -> int:
    sign = -1 if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else 1
    inner = node.operand if isinstance(node, ast.UnaryOp) and sign < 0 else node
    if isinstance(inner, ast.Constant) and type(inner.value) is int:
        return sign * inner.value
    raise PatternError(
        f"pattern {text!r}: {ast.unparse(node)!r} at character {node.col_offset + 1} must be a whole number"
    )
