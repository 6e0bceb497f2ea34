"""Finds the possible faults of a Python file by its syntax tree; all other bytes of the file stay as they are.

What people and tools read is left alone: docstrings, annotations, decorators, texts of errors, warnings and help,
`__all__`, code for type checkers, and f-strings.
"""

import ast
import itertools
import re
import warnings

from tests.mutants.drawn.fault import Fault, numbered
from tests.mutants.drawn.python_places import Places

COMPARED = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: (r"not\s+in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
}  # fmt: skip
COMPUTED = {
    ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "+"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"), ast.Pow: (r"\*\*", "*"), ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"), ast.BitOr: (r"\|", "&"), ast.BitAnd: ("&", "|"), ast.BitXor: (r"\^", "|"),
}  # fmt: skip
TWINS = {"min": "max", "any": "all", "amin": "amax", "argmin": "argmax", "minimum": "maximum"}
TWINS |= {new: old for old, new in TWINS.items()}
SAYING = {"warn", "print", "say", "echo", "log", "debug", "info", "warning", "error", "exception", "secho",
          "rule"}  # fmt: skip
"""Functions whose arguments people read."""
TYPING = {"cast", "TypeVar", "NewType", "ParamSpec", "TypeAlias", "overload"}
HELP = {"help", "description", "doc", "title", "epilog", "metavar", "short_help", "name", "examples"}
SAFE = {"strict", "encoding", "newline"}
"""Arguments that guard against errors that do not occur in tests."""
BY_KEY = {"get", "pop", "setdefault", "getattr", "hasattr", "setattr", "startswith", "endswith", "removeprefix",
          "removesuffix", "split", "partition", "index", "find"}  # fmt: skip
"""Functions whose string arguments are keys or are compared."""
PLAIN = re.compile(r"""("[^"\\\n]*"|'[^'\\\n]*')""")


def faults(file: str, source: bytes) -> list[Fault]:
    """Returns all faults of a Python file in order of place; a place has one for each text that can replace it."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return numbered(finder.found)


def changes(source: bytes, broken: bytes) -> bool:
    """Returns whether a changed source still compiles and has another syntax tree."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(broken)
            compile(tree, "broken", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return False
    return ast.dump(tree) != ast.dump(ast.parse(source))


def called(node: ast.Call) -> str:
    """Returns the last name of the called expression."""
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    )


class _Finder(Places):
    def __init__(self, file: str, source: bytes) -> None:
        super().__init__(file, source)
        self.keys, self.modules, self.depth = set[ast.AST](), set[str](), 0

    # Nodes that are not visited.

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skips f-strings: positions inside them are not known before Python 3.12."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skips assertions: they are for readers and type checkers."""

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.modules |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}

    visit_ImportFrom = visit_Import

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.depth += 1
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value and not (isinstance(node.annotation, ast.Name) and node.annotation.id == "TypeAlias"):
            self.visit(node.value)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    # Statements.

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call):
            self.swap(node, "pass", "dropped statement")
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            return
        if all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self.swap(node, "pass", "dropped statement")
        self.skip_call(node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.swap(node, "pass", "dropped statement")
        target, value = self.span(node.target)[1], self.span(node.value)[0]
        sign = self.source.index(b"=", target, value) + 1
        twin = {ast.Add: "-=", ast.Sub: "+=", ast.Mult: "+=", ast.Div: "*="}.get(type(node.op))
        begin = target + len(self.source[target:value]) - len(self.source[target:value].lstrip())
        for new in ("=", twin) if twin else ("=",):
            self.put(begin, sign, new, "operator")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        if node.exc and not re.search("NotImplemented|Assertion|StopIteration", self.text(node.exc)):
            self.swap(node, "pass", "dropped statement")

    def visit_Break(self, node: ast.Break | ast.Continue) -> None:
        self.swap(node, "pass", "dropped statement")

    visit_Continue = visit_Break

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.swap(node, "return None", "dropped statement")
        self.skip_call(node.value)
        self.visit(node.value)

    def skip_call(self, value: ast.expr) -> None:
        """Adds the faults f(x, ...) -> x and x.f(...) -> x."""
        if not isinstance(value, ast.Call) or called(value) in TYPING:
            return
        if value.args and not isinstance(value.args[0], ast.Starred) and not is_text(value.args[0]):
            self.swap(value, self.text(value.args[0]), "skipped call")
        if isinstance(value.func, ast.Attribute) and not is_text(value.func.value):
            root = value.func.value
            if not (isinstance(root, ast.Name) and (root.id in self.modules or root.id == "self")):
                self.swap(value, self.text(root), "skipped call")

    def condition(self, test: ast.expr, *news: str) -> None:
        for new in news:
            self.swap(test, new, "condition")

    def visit_If(self, node: ast.If) -> None:
        test = self.text(node.test)
        if "TYPE_CHECKING" not in test and "__name__" not in test:
            self.condition(node.test, "True", "False")
            self.generic_visit(node)
        else:
            for statement in node.orelse:
                self.visit(statement)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.condition(node.test, "True", "False")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.condition(node.test, "False")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.condition(test, "True")
        self.generic_visit(node)

    # Expressions.

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operation, right in zip(operands, node.ops, operands[1:], strict=False):
            self.between(left, right, *COMPARED[type(operation)], "operator")
        for operand in operands:
            self.keys |= {
                operand,
                *(operand.elts if isinstance(operand, (ast.Tuple, ast.Set, ast.List)) else ()),
            }
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in itertools.pairwise(node.values):
            self.between(left, right, rf"\b{old}\b", new, "operator")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        types = not self.depth and isinstance(node.op, ast.BitOr)  # at module level `|` usually joins types
        if type(node.op) in COMPUTED and not types and not is_text(node.left) and not is_text(node.right):
            self.between(node.left, node.right, *COMPUTED[type(node.op)], "operator")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if not isinstance(node.op, ast.UAdd):
            self.swap(node, self.text(node.operand), "operator")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        match node.value:
            case bool(value):
                self.swap(node, str(not value), "constant")
            case int(value):
                for new in sorted({value + 1, max(value - 1, 0), 0} - {value}):
                    self.swap(node, str(new), "constant")
            case float(value):
                self.swap(node, repr(2 * value) if value else "1.0", "constant")
            case str() if node in self.keys and PLAIN.fullmatch(text := self.text(node)):
                self.swap(node, f"{text[:-1]}_{text[-1]}", "text")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.keys.add(node.slice)
        self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound and not isinstance(bound, ast.Constant):
                self.swap(bound, f"{self.grouped(bound)} + 1", "off by one")
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        self.keys |= {key for key in node.keys if key}
        self.generic_visit(node)

    def visit_MatchValue(self, node: ast.MatchValue) -> None:
        self.keys.add(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = called(node)
        if name in SAYING | TYPING:
            return
        if name in TWINS:
            end = self.span(node.func)[1]
            self.put(end - len(name), end, TWINS[name], "twin")
        if name in BY_KEY:
            self.keys |= {*node.args}
        if name == "range":
            for argument in node.args[:2]:
                if not isinstance(argument, (ast.Constant, ast.Starred)):
                    self.swap(argument, f"{self.grouped(argument)} - 1", "off by one")
        if name == "len":
            self.swap(node, f"({self.text(node)} - 1)", "off by one")
        self.arguments(node)
        self.visit(node.func)
        for value in (*node.args, *(k.value for k in node.keywords if k.arg not in HELP | SAFE)):
            self.visit(value)

    def arguments(self, node: ast.Call) -> None:
        """Adds faults that swap two neighbouring positional arguments, or leave out a keyword argument."""
        for first, second in itertools.pairwise(node.args):
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                (start, left), (right, end) = self.span(first), self.span(second)
                middle = self.source[left:right].decode()
                self.put(start, end, f"{self.text(second)}{middle}{self.text(first)}", "arguments")
        spans = sorted(self.span(argument) for argument in (*node.args, *node.keywords))
        for keyword in node.keywords:
            start, end = self.span(keyword)
            if keyword.arg is None or keyword.arg in HELP | SAFE:
                continue
            following = [begin for begin, _ in spans if begin > start]
            before = [stop for begin, stop in spans if begin < start]
            if following:
                self.put(start, following[0], "", "arguments")
            else:
                self.put(before[-1] if before else start, end, "", "arguments")
