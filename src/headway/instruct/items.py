"""Seed tasks, the prompt that shows them, and the parsing and filtering of the instructions in a reply.

The prompt, the format of the list and the filters are those of Stanford Alpaca (generate_instruction.py, Apache 2.0),
except that an item without an output is rejected, too.
"""

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from headway.data.values import values
from headway.endpoints import Reply
from headway.errors import DataError

NO_INPUT = "<noinput>"
PROMPT = (files("headway.instruct") / "prompt.txt").read_text(encoding="utf-8") + "\n"
_UNSUITABLE = re.compile(
    r"\b(images?|graphs?|pictures?|files?|maps?|draw|plot|go to|video|audio|music|flowchart|diagram)\b",
    re.IGNORECASE,
)
_BEGINS = re.compile(r"\s*(\d+)\.\s+Instruction:")
_BETWEEN = re.compile(r"###|\n(?=\d+\.\s+Instruction:)")


@dataclass(frozen=True)
class Item:
    """An instruction with its input ("" if it needs none) and its output: a record of Alpaca's format."""

    instruction: str
    input: str
    output: str


@dataclass(frozen=True)
class Rejected:
    """A rejected part of a reply: the reason, its text or instruction, and details of the reason."""

    reason: str
    text: str
    detail: str = ""


def read_seeds(path: str | Path) -> list[Item]:
    """Reads seed tasks: {"instruction": ..., "instances": [{"input": ..., "output": ...}]} (Wang et al.; the first
    instance of each), or records of Alpaca's format.

    Raises DataError, with file and line, for another record."""
    return [_seed(value, where) for where, value in values(path)]


def _seed(value: Any, where: str) -> Item:
    try:
        first = value["instances"][0] if "instances" in value else value
        fields = (value["instruction"], first.get("input", ""), first["output"])
    except (KeyError, IndexError, TypeError, AttributeError):
        raise DataError(
            f'{where}: a seed task has "instruction" and "instances" with "input" and "output" (or "input" and '
            f'"output" themselves), got {sorted(value) if isinstance(value, dict) else type(value).__name__}'
        ) from None
    if not all(isinstance(text, str) for text in fields):
        raise DataError(f"{where}: instruction, input and output must be texts")
    return Item(*fields)


def prompt(examples: Sequence[Item]) -> str:
    """Returns the request that shows these tasks and asks for more."""
    parts = [PROMPT]
    for number, item in enumerate(examples, 1):
        instruction = re.sub(r"\s+", " ", item.instruction).strip().rstrip(":")
        parts.append(f"###\n{number}. Instruction: {instruction}\n")
        parts.append(f"{number}. Input:\n{item.input or NO_INPUT}\n{number}. Output:\n{item.output}\n")
    return "".join([*parts, f"###\n{len(examples) + 1}. Instruction:"])


def parse(reply: Reply, first: int) -> list[Item | Rejected]:
    """Returns the items of a reply, in order. A reply may continue after the prompt's last words ("4. Instruction:",
    with `first` = 4) or repeat them. Rejects the last item of a truncated reply, parts without the three fields, and
    `unsuitable` items."""
    if not reply.text.strip():
        return [Rejected("no text", "", f"finish_reason {reply.finish_reason}")]
    text = reply.text.strip().removeprefix("###")
    if not _BEGINS.match(text):
        text = f"{first}. Instruction: {text}"
    parts = [part.strip() for part in _BETWEEN.split(text) if part.strip()]
    items: list[Item | Rejected] = [_parsed(part) for part in parts]
    if reply.finish_reason == "length":
        items[-1] = Rejected("cut off", parts[-1])
    return items


def _parsed(text: str) -> Item | Rejected:
    begins = _BEGINS.match(text)
    number = begins[1] if begins else ""
    fields = re.split(rf"{number}\.\s+(Instruction|Input|Output):", text) if begins else []
    if len(fields) != 7 or fields[1::2] != ["Instruction", "Input", "Output"]:
        return Rejected("malformed", text)
    instruction, inputs, output = (field.strip() for field in fields[2::2])
    item = Item(instruction, "" if inputs.lower() == NO_INPUT else inputs, output)
    reason, detail = unsuitable(item)
    return Rejected(reason, instruction, detail) if reason else item


def unsuitable(item: Item) -> tuple[str, str]:
    """Returns the reason for which an item is filtered out, and the detail that caused it; ("", "") if it is kept."""
    count, match = len(item.instruction.split()), _UNSUITABLE.search(item.instruction)
    if not 3 < count <= 150:
        return ("too short" if count <= 3 else "too long"), f"{count} words"
    if match:
        return "unsuitable word", match[0]
    if item.instruction.startswith("Write a program"):
        return "a program", ""
    if item.instruction[0] in string.punctuation or not item.instruction[0].isascii():
        return "first character", item.instruction[0]
    return ("", "") if item.output else ("no output", "")
