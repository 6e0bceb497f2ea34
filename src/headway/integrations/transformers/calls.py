"""What a layer's code passes to the functions that it calls, read from its source."""

import ast
from collections.abc import Callable
from functools import cache
from inspect import getsource, unwrap
from textwrap import dedent
from typing import Any

ATTENTION = "attention_interface"
"""What every layer calls the attention function that its config has named."""


@cache
def calls(function: Callable[..., Any], name: str) -> tuple[ast.Call, ...]:
    """The calls of what is called `name`; none where a function has no source."""
    try:
        tree = ast.parse(dedent(getsource(unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return ()
    made = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return tuple(call for call in made if isinstance(call.func, ast.Name) and call.func.id == name)


def names_of(call: ast.Call) -> frozenset[str]:
    """The names of its arguments that have one."""
    return frozenset(word.arg for word in call.keywords if word.arg)


def passed(forward: Callable[..., Any]) -> frozenset[str]:
    """The names of the arguments that a layer's own code gives to its attention function."""
    return frozenset[str]().union(*map(names_of, calls(forward, ATTENTION)))
