"""Operators of drawn faults: what each makes of a source, and what they leave alone."""

import pytest

from tests.mutants.drawn import cpp_faults, python_faults


def of_python(text: str) -> set[str]:
    """Returns what a source can become: the changed source of each fault."""
    source = text.encode()
    faults = python_faults.faults("a.py", source)
    for fault in faults:
        assert fault.old.encode() == source[fault.start : fault.end]
        assert python_faults.changes(source, fault.apply(source)), str(fault)
    return {fault.apply(source).decode() for fault in faults}


def of_cpp(text: str) -> set[str]:
    source = text.encode()
    return {fault.apply(source).decode() for fault in cpp_faults.faults("a.h", source)}


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("x = a < b", {"x = a <= b"}),
        ("x = a == b is not c", {"x = a != b is not c", "x = a == b is c"}),
        ("x = a not in (b)", {"x = a in (b)"}),
        ("x = (a) + (  # not -\n b)", {"x = (a) - (  # not -\n b)"}),
        ("x = a and b", {"x = a or b"}),
        ("x = not a", {"x = a"}),
        ("x = -a", {"x = a"}),
        ("x = 2", {"x = 3", "x = 1", "x = 0"}),
        ("x = 0.5", {"x = 1.0"}),
        ("x = True", {"x = False"}),
        ("x = a[i:]", {"x = a[i + 1:]"}),
        ("x = a['é']", {"x = a['é_']"}),
        ("x = {'a': b}", {"x = {'a_': b}"}),
        ("x = a == 'b'", {"x = a != 'b'", "x = a == 'b_'"}),
        ("x = 'a'", set()),
        ("for i in range(n): f", {"for i in range(n - 1): f"}),
        ("x += y", {"pass", "x = y", "x -= y"}),
        ("a.b = c", {"pass"}),
        ("a[b] = c", {"pass"}),
        ("a.f()", {"pass"}),
        ("if a: b", {"if True: b", "if False: b"}),
        ("x = a if b else c", {"x = a if True else c", "x = a if False else c"}),
        ("x = [a for a in b if c]", {"x = [a for a in b if True]"}),
        ("while a: b", {"while False: b"}),
        ("while a:\n break", {"while a:\n pass", "while False:\n break"}),
        ("def f(): return a", {"def f(): return None"}),
        ("def f(): return a.g(b)", {"def f(): return None", "def f(): return a", "def f(): return b"}),
        ("raise E(f'{1}') from None", {"pass"}),
        ("x = f(a, b)", {"x = a", "x = f(b, a)"}),
        ("x = f(a, *b)", {"x = a"}),
        ("x = f(k=a,\n  l=b)", {"x = f(l=b)", "x = f(k=a)"}),
        ("x = f(k=a)", {"x = f()"}),
        ("x = min(a)", {"x = max(a)", "x = a"}),
        ("f(len(a))", {"pass", "f((len(a) - 1))"}),
    ],
)
def test_what_each_change_makes_of_python(text: str, broken: set[str]) -> None:
    assert of_python(text) == broken


@pytest.mark.parametrize(
    "text",
    [
        '"""1 < 2"""',
        "x: Literal[1]",
        "def f(x: Literal[1]) -> Literal[2]: ...",
        "@f(1)\nclass A: ...",
        "__all__ = ['a', 'b']",
        "if TYPE_CHECKING:\n x = 1",
        "if __name__ == '__main__':\n x = 1",
        "x = f'{1 + a}'",
        "assert 1 < a",
        "raise NotImplementedError(1)",
        "x = y | None",
        "import a",
        "x = option(help='a' + b(1))",
        "x = zip(strict=True)",
    ],
)
def test_what_is_there_to_be_read_is_left_alone(text: str) -> None:
    assert not of_python(text) - {text.replace("option(help='a' + b(1))", "'a'")}


def test_the_words_of_a_warning_are_left_alone_and_the_warning_is_not() -> None:
    assert of_python("warn('a', stacklevel=2 + n)") == {"pass"}


def test_what_is_no_other_program_is_no_fault() -> None:
    assert not python_faults.changes(b"x = 1", b"x = (1)")
    assert not python_faults.changes(b"x = 1", b"x = ")
    assert not python_faults.changes(b"while a: x", b"while a: break; return")
    assert python_faults.changes(b"x = 1", b"x = 2")


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("x = a < b ? a : b;", {"x = a <= b ? a : b;", ";"}),
        ("int x = 2;  // 3 < 4", {f"int x = {n};  // 3 < 4" for n in (0, 1, 3)}),
        ("f(\"1 < 2\", '3');", {";"}),
        ("#define A 1\n/* 1\n 2 */", set()),
        ("x[i] += 1.5f;", {"x[i] -= 1.5f;", "x[i] = 1.5f;", "x[i] += 3.0f;", "x[i + 1] += 1.5f;", ";"}),
        ("  f(a, b);", {"  ;", "  f(b, a);"}),
        ("  b);", set()),  # only the end of a statement
        ("return a;", {"return {};"}),
        ("if (a && !b) f();", {"if (a || !b) f();", "if (a && b) f();", "if (true) f();", "if (false) f();"}),
        ("auto x = std::min(a, b);", {"auto x = std::max(a, b);", "auto x = std::min(b, a);"}),
        ("x = vec<8>(a);", {"x = vec<7>(a);", "x = vec<9>(a);", "x = vec<0>(a);", ";"}),
    ],
)
def test_what_each_change_makes_of_cpp(text: str, broken: set[str]) -> None:
    assert of_cpp(text) == broken
