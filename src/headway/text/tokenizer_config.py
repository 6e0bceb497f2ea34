"""The files next to a vocabulary, validated when read: tokenizer_config.json, special_tokens_map.json,
added_tokens.json, and the chat template."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.errors import DataError, HeadwayError, as_error
from headway.storage import reading
from headway.text.chat import ChatTemplate, one_template
from headway.text.vocabulary import LARGEST_ID

CLASSLESS = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
"""The configuration of a tokenizer that its tokenizer.json defines completely."""
LONGEST = 256 << 20
"""Most bytes of a text file that are read."""
MOST_SENTINELS = 10_000
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of named chat templates, such as tool_use.jinja."""
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def is_id(value: Any) -> bool:
    """Returns whether a value can be a token id."""
    return type(value) is int and 0 <= value < LARGEST_ID


def _flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _token(value: Any) -> bool:
    named = value.get("content") if isinstance(value, dict) else value
    flags = [value.get(name) for name in FLAGS] if isinstance(value, dict) else []
    return isinstance(named, str) and all(map(_flag, flags))


def _listed(value: Any) -> bool:
    return isinstance(value, dict) and all(
        key.isdecimal() and len(key) < 9 and isinstance(token, dict) and _token(token)
        for key, token in value.items()
    )


def _templates(value: Any) -> bool:
    named = value if isinstance(value, list) else [{"name": "default", "template": value}]
    return all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in named
    )


Rule = tuple[Callable[[Any], bool], str]
_SWITCH: Rule = (_flag, "true, false or null")
KEYS: Mapping[str, Rule] = {
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space", "trim_offsets"), _SWITCH),
    **dict.fromkeys(("do_lower_case", "do_basic_tokenize", "strip_accents"), _SWITCH),
    **dict.fromkeys(("tokenize_chinese_chars", "separate_vocabs"), _SWITCH),
    **{
        f"{role}_token": (lambda v: v is None or _token(v), 'a text, or an object with "content"')
        for role in ("bos", "eos", "cls", "sep", "mask", "pad", "unk")
    },
    "tokenizer_class": (lambda v: v is None or isinstance(v, str), "a text"),
    "extra_ids": (
        lambda v: type(v) is int and 0 <= v <= MOST_SENTINELS,
        f"a whole number from 0 to {MOST_SENTINELS:,}",
    ),
    "added_tokens_decoder": (_listed, 'an object from ids to objects with "content"'),
    **{
        key: (
            lambda v: v is None or isinstance(v, dict) or (isinstance(v, list) and all(map(_token, v))),
            'a list of texts, or of objects with "content"',
        )
        for key in ("additional_special_tokens", "extra_special_tokens")
    },
    "chat_template": (
        lambda v: v is None or _templates(v),
        'a text, or a list of objects with "name" and "template"',
    ),
}


def content(value: Any) -> str:
    """Returns the text of a token that a config gives as a string or as an object."""
    return str(value["content"] if isinstance(value, dict) else value)


def token_names(config: Mapping[str, Any], usual: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the special tokens by role, from a config or else the usual ones; None if the config has null."""
    values = {role: config.get(f"{role}_token", name) for role, name in usual.items()}
    return {role: None if value is None else content(value) for role, value in values.items()}


def need_tokens(
    names: Mapping[str, str | None], roles: Iterable[str], pieces: Mapping[str, int], file: Path
) -> list[int]:
    """Returns the ids of the special tokens of these roles. Raises DataError for one that is not a piece of the
    file."""
    for role in roles:
        if names[role] not in pieces:
            raise DataError(
                f"{file}: the {role} token {str(names[role])[:80]!r} is not among its {len(pieces)} pieces; "
                f"check {role}_token in tokenizer_config.json"
            )
    return [pieces[str(names[role])] for role in roles]


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; {} if the file is absent. Raises CheckpointError for any other content,
    DataError for text in it that UTF-8 cannot encode."""
    value = reading.read_json(file) if file.is_file() else {}
    with as_error(DataError, f"{file}: a text in it has a lone surrogate", UnicodeEncodeError):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_config(file: Path) -> dict[str, Any]:
    """Returns `read_json` of tokenizer_config.json or special_tokens_map.json. Raises DataError for a value of the
    wrong type."""
    value = read_json(file)
    for key, (fits, expected) in KEYS.items():
        if key in value and not fits(value[key]):
            raise DataError(f'{file}: "{key}" must be {expected}, got {short(value[key])}')
    return value


def read_added(file: Path) -> dict[str, int]:
    """Returns the ids in added_tokens.json; {} if the file is absent. Raises DataError for an invalid id."""
    value = read_json(file)
    for name, i in value.items():
        if not is_id(i):
            raise DataError(f"{file}: the id of {name[:80]!r} must be a whole number from 0, got {short(i)}")
    return value


def read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the chat templates of a folder as one (`one_template`), from files of their own or from
    tokenizer_config.json; None without any. Raises DataError, naming the file, for an invalid template."""
    files = [folder / "chat_template.jinja", *sorted((folder / MORE_TEMPLATES).glob("*.jinja"))]
    configured = config.get("chat_template")
    if not isinstance(configured, list):
        configured = [] if configured is None else [{"name": "default", "template": configured}]
    file = folder / "tokenizer_config.json"
    sources = {entry["name"]: (file, entry["template"]) for entry in configured}
    if present := [file for file in files if file.is_file()]:
        sources = {"default" if file is files[0] else file.stem: (file, decoded(file)) for file in present}
    for file, source in sources.values():
        with naming(file):
            ChatTemplate(source)
    return one_template({name: source for name, (_, source) in sources.items()}) if sources else None


def decoded(file: Path) -> str:
    """Returns a file's text. Raises DataError for text that is not UTF-8, and for a file longer than `LONGEST`."""
    size = file.stat().st_size
    if size > LONGEST:
        raise DataError(f"{file} has {size:,} bytes, above the limit of {LONGEST:,} for a text file")
    raw = file.read_bytes()
    reading.refuse_impostor(file, raw[:512], "text")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8: {error.reason} at byte {error.start:,}") from None


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Prefixes the file's name to errors that are raised inside and lack it: headway's, and those of the `tokenizers`
    library, which raises many types."""
    with reading.naming(file):
        try:
            yield
        except HeadwayError:
            raise
        except Exception as error:
            first = str(error).split("\n")[0][:300] or type(error).__name__
            raise DataError(f"the tokenizers library rejects it: {first}") from error


def short(value: Any) -> str:
    """Returns the repr of a value in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
