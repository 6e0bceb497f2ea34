"""Source texts of syntax tree nodes of a Python file, and the faults that replace them."""

import ast
import itertools
import re

from tests.mutants.drawn.fault import Fault, fault


class Places(ast.NodeVisitor):
    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source, self.found = file, source, list[Fault]()
        self.begins = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self.begins[node.lineno - 1] + node.col_offset,
            self.begins[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, node: ast.expr | ast.keyword) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def put(self, start: int, end: int, new: str, operator: str) -> None:
        if self.source[start:end].decode() != new:
            self.found.append(fault(self.file, self.source, start, end, new, operator))

    def swap(self, node: ast.expr | ast.stmt, new: str, operator: str) -> None:
        self.put(*self.span(node), new, operator)

    def between(self, left: ast.expr, right: ast.expr, pattern: str, new: str, operator: str) -> None:
        """Replaces the operator between two operands, found by `pattern` outside comments."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = re.sub(rb"#[^\n]*", lambda m: b" " * len(m.group()), self.source[start:end])
        if match := re.search(pattern.encode(), gap):
            self.put(start + match.start(), start + match.end(), new, operator)

    def grouped(self, node: ast.expr) -> str:
        return (
            self.text(node)
            if isinstance(node, (ast.Name, ast.Attribute, ast.Call))
            else f"({self.text(node)})"
        )
