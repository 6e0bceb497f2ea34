"""Finds the possible faults of a C++ file, line by line, outside comments, strings and preprocessor lines.

Whether the result compiles is left to the compiler.
"""

import re
from collections.abc import Iterator

from tests.mutants.drawn.fault import Fault, fault, numbered

HIDDEN = re.compile(
    rb'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"|' rb"'(?:[^'\\\n]|\\.)+'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*",
    re.DOTALL | re.MULTILINE,
)
OPERATORS = {
    " < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ", " && ": " || ",
    " || ": " && ", " + ": " - ", " - ": " + ", " * ": " + ", " / ": " * ", " % ": " / ", " << ": " >> ",
    " >> ": " << ", " & ": " | ", " | ": " & ", " ^ ": " | ", " += ": " -= ", " -= ": " += ", " *= ": " = ",
    " |= ": " = ", " &= ": " = ",
}  # fmt: skip
TWINS = {"min": "max", "max": "min", "true": "false", "false": "true"}
NUMBER = re.compile(
    r"(?<![\w.])(\d+\.\d*|\d*\.\d+|\d+)(?:e[-+]?\d+)?(f|u|l|ul|ll|ull)?(?![\w.])", re.IGNORECASE
)
STATEMENT = re.compile(r"\s*((?!return\b|using\b|else\b|if\b|for\b|while\b|const\b|auto\b|case\b|default\b|static\b|"
                       r"typedef\b|struct\b|template\b|namespace\b|goto\b|extern\b)"
                       r"(?:[\w:.>\[\]()*+\- ]+? [-+*/|&^]?= .*|[\w:.\->]+(?:<[^;=]*>)?\(.*\)|[-+]{2}[\w.]+|"
                       r"break|continue));\s*$")  # fmt: skip
DECLARED = re.compile(r"\s*(?:[\w:]+(?:<.*>)?[ *&]+)+\w+(?:\[.*\])? = ")
RETURNED = re.compile(r"\breturn ([^;{}]+);")
CONDITION = re.compile(r"\bif (?:constexpr )?\((.*)\)(?= \{|$| [\w*(]+.*;)")
INDEXED = re.compile(r"\[([a-z]\w*)\]")
PAIR = re.compile(r"(?<=[(,])\s*([\w.\->\[\]]+), ([\w.\->\[\]]+)(?=[,)])")


def faults(file: str, source: bytes) -> list[Fault]:
    """Returns all faults of a C++ file, in the order of their places."""
    code = HIDDEN.sub(lambda m: re.sub(rb"[^\n]", b" ", m.group()), source).decode("latin-1")
    result = []
    offset, previous = 0, ";"
    for line in code.splitlines(keepends=True):
        text = line.rstrip("\n")
        for start, end, new, operator in _of_line(text, begins=previous[-1] in ";{}:"):
            if text[start:end] != new:
                result.append(fault(file, source, offset + start, offset + end, new, operator))
        offset += len(line)
        previous = text.rstrip() or previous
    return numbered(result)


def _of_line(line: str, begins: bool) -> Iterator[tuple[int, int, str, str]]:
    """Yields the changes of a line: start, end, new text, kind. `begins`: a statement begins with the line."""
    for old, new in OPERATORS.items():
        for match in re.finditer(re.escape(old), line):
            yield match.start() + 1, match.end() - 1, new.strip(), "operator"
    for match in re.finditer(r" [-+*|&]= ", line):
        if not DECLARED.match(line):
            yield match.start() + 1, match.end() - 1, "=", "operator"
    for match in re.finditer(r"(?<![\w!])!(?=[\w(])", line):
        yield match.start(), match.end(), "", "operator"
    for match in re.finditer(r"(?<=[(,=] )-(?=[\w(])|(?<=return )-(?=[\w(])", line):
        yield match.start(), match.end(), "", "operator"
    for match in re.finditer(rf"\b({'|'.join(TWINS)})\b", line):
        yield match.start(), match.end(), TWINS[match.group()], "twin"
    for match in NUMBER.finditer(line):
        for new in _other_numbers(match.group(1)):
            yield match.start(1), match.end(1), new, "constant"
    for match in INDEXED.finditer(line):
        yield match.end(1), match.end(1), " + 1", "off by one"
    for match in PAIR.finditer(line):
        yield match.start(1), match.end(2), f"{match.group(2)}, {match.group(1)}", "arguments"
    for match in CONDITION.finditer(line):
        for new in ("true", "false"):
            yield match.start(1), match.end(1), new, "condition"
    for match in RETURNED.finditer(line):
        yield match.start(1), match.end(1), "{}", "dropped statement"
    if begins and (match := STATEMENT.match(line)) and not DECLARED.match(line):
        yield match.start(1), match.end(1), "", "dropped statement"


def _other_numbers(text: str) -> list[str]:
    if "." in text:
        return [repr(2 * float(text)) if float(text) else "1.0"]
    value = int(text)
    return [str(new) for new in sorted({value + 1, max(value - 1, 0), 0} - {value})]
