"""The files of a tokenizer in Hugging Face folders."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel, WordPiece

from headway.errors import DataError
from headway.text import bytelevel, sentencepiece, wordpiece
from headway.text.tokenizer_config import (
    naming,
    read_added,
    read_config,
    read_json,
    read_template,
    refuse_impostor,
)
from headway.text.vocabulary import LARGEST_ID

ROLES = ("cls", "sep", "mask", "pad", "unk")
T5 = {"t5", "mt5", "umt5", "longt5"}
# SentencePiece models whose ids or templates differ from the file's own.
SENTENCEPIECE_OTHERS = {"albert", "xlnet", "pegasus", "fnet", "bigbird", "rembert", "debertav2", "camembert",
                        "xlmroberta", "mbart", "mbart50", "nllb", "reformer", "speecht5"}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What the files declare; None where they declare nothing. `names`: special tokens by role, "bos" and "eos" too;
    `file`: the one with the vocabulary."""

    file: Path
    backend: Backend
    names: dict[str, str | None] = field(default_factory=dict)
    begins_with_bos: bool | None = None
    ends_with_eos: bool | None = None
    chat_template: str | None = None
    config: dict[str, Any] = field(default_factory=dict)


def find(path: Path) -> Found:
    """Reads a folder or one tokenizer file; the other files of its folder are read, too."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; a tokenizer was to be read from it")
    if path.is_file():
        return _read(path, path.parent)
    file = first_file(path)
    if file is not None:
        return _read(file, path)
    there = ", ".join(sorted(p.name for p in path.iterdir())[:12]) or "nothing"
    if (path / "source.spm").is_file():
        raise DataError(
            f"{path}: a translator's tokenizer of two sides (source.spm, target.spm, vocab.json); read it with "
            "headway.text.MarianTokenizer.load"
        )
    raise DataError(f"{path}: no {', '.join(READERS)} in this folder (it holds: {there})")


def first_file(folder: Path) -> Path | None:
    """The file that a folder's tokenizer is read from; None when there is none."""
    names = [n for n in READERS if n != "vocab.json" or (folder / "merges.txt").is_file()]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read(file: Path, folder: Path) -> Found:
    with file.open("rb") as opened:
        refuse_impostor(file, opened.read(512))
    reader = READERS.get(file.name) or BY_SUFFIX.get(file.suffix) or _json
    config = read_config(folder / "tokenizer_config.json") if file.suffix != ".bin" else {}
    declared = {**read_config(folder / "special_tokens_map.json"), **config} if file.suffix != ".bin" else {}
    with naming(file):
        backend, names = reader(file, config)
    built = reader is not _json
    if built and file.suffix != ".bin":
        _add_declared(backend, folder, config, declared, file)
    for role in ("bos", "eos", *ROLES):
        if f"{role}_token" in declared:
            value = declared[f"{role}_token"]
            names[role] = value["content"] if isinstance(value, dict) else value
    if file.suffix != ".bin":
        model = {**read_json(folder / "config.json"), **read_json(folder / "generation_config.json")}
        for role in ("bos", "eos"):
            if role not in names:
                names[role] = _known(backend, model.get(f"{role}_token_id"))
    for role in ("bos", "eos"):
        name = names.get(role)
        if name is not None and backend.token_to_id(name) is None:
            raise DataError(
                f"{file}: {role}_token is {name!r} in the configuration, but the tokenizer has no such token"
            )
    return Found(
        file, backend, names, config.get("add_bos_token"), config.get("add_eos_token"), read_template(folder, config),
        {**config, **_classless()} if built or not config else config,
    )  # fmt: skip


def _classless() -> dict[str, Any]:
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


def kind(folder: Path, config: dict[str, Any]) -> str:
    """The kind of tokenizer that a folder names, in lower case without signs: the class in `tokenizer_config.json`,
    else the model type in `config.json`; "" without either."""
    model = read_json(folder / "config.json")
    for name in (config.get("tokenizer_class"), model.get("tokenizer_class"), model.get("model_type")):
        if name and name not in ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend"):
            plain = str(name).removesuffix("Fast").removesuffix("Tokenizer")
            return "".join(c for c in plain.lower() if c.isalnum())
    return ""


Names = dict[str, str | None]


def _json(file: Path, config: dict[str, Any]) -> tuple[Backend, Names]:
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{file}: not a tokenizer.json of the tokenizers library: {error}") from None
    unknown = backend.model.unk_token if isinstance(backend.model, (WordPiece, WordLevel)) else None
    if unknown is not None and backend.model.token_to_id(unknown) is None:
        raise DataError(f"{file}: its unk_token {unknown[:80]!r} is not in its vocabulary: it is damaged")
    return backend, {}


def _sentencepiece(file: Path, config: dict[str, Any]) -> tuple[Backend, Names]:
    if sentencepiece.looks_like_tiktoken(file):
        specials = bytelevel.llama3_specials()
        backend = bytelevel.build_ranks(bytelevel.read_ranks(file), specials)
        return backend, {"bos": specials[0], "eos": specials[1]}
    which = kind(file.parent, config)
    if which in SENTENCEPIECE_OTHERS:
        raise DataError(
            f"{file}: a SentencePiece model of kind {which!r}, whose ids are not those of the file; the "
            "tokenizer.json of the same model is supported: put it into the folder"
        )
    spec = sentencepiece.read_model(file)
    backend = sentencepiece.build(spec, sentinels=config.get("extra_ids", 100) if which in T5 else 0)
    return backend, _piece_names(spec)


def _llama2c(file: Path, config: dict[str, Any]) -> tuple[Backend, Names]:
    spec = sentencepiece.read_llama2c(file)
    return sentencepiece.build(spec), _piece_names(spec)


def _piece_names(spec: sentencepiece.Pieces) -> Names:
    found: Names = {"unk": spec.pieces[spec.unk]}
    for role, i in (("bos", spec.bos), ("eos", spec.eos)):
        if i is not None:
            found[role] = spec.pieces[i]
    return found


def _wordpiece(file: Path, config: dict[str, Any]) -> tuple[Backend, Names]:
    which = kind(file.parent, config)
    if which in wordpiece.OTHERS:
        raise DataError(
            f"{file}: a vocab.txt of kind {which!r} is cut by rules other than BERT's; the tokenizer.json of the same "
            "model is supported: put it into the folder"
        )
    vocabulary = wordpiece.read_vocabulary(file)
    names = {role: content(config.get(f"{role}_token", name)) for role, name in wordpiece.NAMES.items()}
    backend = wordpiece.build(vocabulary, names, wordpiece.rules(vocabulary, config, file), file)
    return backend, {**names}


def _bytelevel(file: Path, config: dict[str, Any]) -> tuple[Backend, Names]:
    merges = file.with_name("merges.txt")
    if not merges.is_file():
        raise DataError(f"{file}: merges.txt, with the rules that make its pieces, is not in the folder")
    vocabulary = bytelevel.read_vocabulary(file)
    style = bytelevel.style_of(kind(file.parent, config), vocabulary, file)
    pairs = bytelevel.read_merges(merges, vocabulary)
    backend, names = bytelevel.build(vocabulary, pairs, style, config, file)
    return backend, {**names}


Reader = Callable[[Path, dict[str, Any]], tuple[Backend, Names]]
READERS: dict[str, Reader] = {
    "tokenizer.json": _json,
    "tokenizer.model": _sentencepiece,
    "spiece.model": _sentencepiece,
    "tokenizer.bin": _llama2c,
    "vocab.txt": _wordpiece,
    "vocab.json": _bytelevel,
}
BY_SUFFIX: dict[str, Reader] = {".model": _sentencepiece, ".bin": _llama2c, ".txt": _wordpiece}


def content(value: Any) -> str:
    """The text of a token that a config gives as a string or as an object."""
    return str(value["content"] if isinstance(value, dict) else value)


def _add_declared(
    backend: Backend, folder: Path, config: dict[str, Any], declared: dict[str, Any], file: Path
) -> None:
    """Adds the tokens that a folder declares: those with ids first, each at its id, then the named ones."""
    listed = {int(i): token for i, token in config.get("added_tokens_decoder", {}).items()}
    for name, i in read_added(folder / "added_tokens.json").items():
        listed.setdefault(i, {"content": name, "special": False})
    for i, token in sorted(listed.items()):
        name, special = content(token), bool(token.get("special", False))
        options = {
            key: bool(token.get(key, False)) for key in ("lstrip", "rstrip", "single_word", "normalized")
        }
        add = backend.add_special_tokens if special else backend.add_tokens
        add([AddedToken(name, special=special, **options)])
        if backend.token_to_id(name) != i:
            raise DataError(
                f"{file}: the folder puts the added token {name!r} at id {i}, but it falls on "
                f"{backend.token_to_id(name)}: the vocabulary is not the one that it was added to"
            )
    more = declared.get("additional_special_tokens") or declared.get("extra_special_tokens") or []
    for token in more if isinstance(more, list) else []:
        if backend.token_to_id(content(token)) is None:
            backend.add_special_tokens([AddedToken(content(token), special=True, normalized=False)])


def _known(backend: Backend, value: Any) -> str | None:
    first = value[0] if isinstance(value, list) and value else value
    return backend.id_to_token(first) if type(first) is int and 0 <= first < LARGEST_ID else None


def write(
    folder: Path, tokenizer: str, config: dict[str, Any], names: dict[str, Any], template: str | None
) -> None:
    """Writes the files that `find` reads. A template goes to its own file, as `transformers` writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in config.items() if k != "chat_template"}
    untyped = {
        role: {k: v for k, v in name.items() if k != "__type"} if isinstance(name, dict) else name
        for role, name in names.items()
    }
    texts = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        "special_tokens_map.json": json.dumps(untyped, indent=2, ensure_ascii=False) + "\n",
    }
    if template is not None:
        texts["chat_template.jinja"] = template
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file that is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
