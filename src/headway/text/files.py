"""The files of a tokenizer, as they lie in Hugging Face folders."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from headway.errors import DataError
from headway.text import sentencepiece


@dataclass(frozen=True)
class Found:
    """What the files say; None where they say nothing."""

    backend: Backend
    bos: int | None = None
    eos: int | None = None
    begins_with_bos: bool | None = None
    chat_template: str | None = None
    config: dict[str, Any] = field(default_factory=dict)


def find(path: Path) -> Found:
    """Reads a folder or one tokenizer file; a file's companions beside it are read, too."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; a tokenizer was to be read from it")
    if path.is_file():
        return _read(path, path.parent)
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer.bin"):
        if (path / name).is_file():
            return _read(path / name, path)
    there = ", ".join(sorted(p.name for p in path.iterdir())[:12]) or "nothing"
    raise DataError(f"{path}: no tokenizer.json or tokenizer.model in this folder (it holds: {there})")


def _read(file: Path, folder: Path) -> Found:
    if file.stat().st_size == 0:
        raise DataError(f"{file}: the file is empty")
    if file.suffix == ".bin":
        spec = sentencepiece.read_llama2c(file)
        return Found(sentencepiece.build(spec), spec.bos, spec.eos, True, None, _classless())
    if file.suffix == ".model":
        if sentencepiece.looks_like_tiktoken(file):
            raise DataError(
                f"{file}: tiktoken ranks are not read; the tokenizer.json of the same model is: put it beside"
            )
        spec = sentencepiece.read_model(file)
        backend, bos, eos = sentencepiece.build(spec), spec.bos, spec.eos
    else:
        backend, bos, eos = _backend(file), None, None
    config = read_json(folder / "tokenizer_config.json")
    names = {**read_json(folder / "special_tokens_map.json"), **config}
    bos = _special(backend, names, "bos_token", file, default=bos)
    eos = _special(backend, names, "eos_token", file, default=eos)
    model = {**read_json(folder / "config.json"), **read_json(folder / "generation_config.json")}
    if "bos_token" not in names and bos is None:
        bos = _known(backend, model.get("bos_token_id"))
    if "eos_token" not in names and eos is None:
        eos = _known(backend, model.get("eos_token_id"))
    begins = config.get("add_bos_token")
    return Found(backend, bos, eos, begins, _template(folder, config), config or _classless())


def _classless() -> dict[str, Any]:
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


def _backend(file: Path) -> Backend:
    try:
        return Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        start = file.read_bytes()[:40]
        if start.startswith(b"version https://git-lfs"):
            raise DataError(f"{file}: a git-lfs pointer, not the file itself; run `git lfs pull`") from None
        raise DataError(f"{file}: not a tokenizer.json of the tokenizers library: {error}") from None


def _special(
    backend: Backend, names: dict[str, Any], key: str, file: Path, *, default: int | None
) -> int | None:
    value = names.get(key)
    if value is None:
        return None if key in names else default
    name = value["content"] if isinstance(value, dict) else value
    found = backend.token_to_id(name)
    if found is None:
        raise DataError(
            f"{file}: {key} is {name!r} in the configuration, but the tokenizer has no such token"
        )
    return int(found)


def _known(backend: Backend, value: Any) -> int | None:
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, int) and backend.id_to_token(first) is not None else None


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {one["name"]: one["template"] for one in found}
        if "default" not in named:
            raise DataError(f"{folder}: chat templates {sorted(named)}, none of them named default")
        found = named["default"]
    return found


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; {} when there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{file}: an object is expected, got {type(value).__name__}")
    return value


def write(
    folder: Path, tokenizer: str, config: dict[str, Any], names: dict[str, str], template: str | None
) -> None:
    """Writes the files that `find` reads. A template goes to its own file, as `transformers` writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in config.items() if k != "chat_template"}
    texts = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        "special_tokens_map.json": json.dumps(names, indent=2, ensure_ascii=False) + "\n",
    }
    if template is not None:
        texts["chat_template.jinja"] = template
    for name, text in texts.items():
        _write_atomic(folder / name, text.encode())


def _write_atomic(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
