"""Finds and reads the files of a tokenizer in Hugging Face folders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel, WordPiece

from headway.errors import DataError
from headway.storage.gguf import is_gguf, read_gguf
from headway.storage.reading import refuse_impostor
from headway.text import bytelevel, fairseq, gguf, sentencepiece, wordpiece
from headway.text.languages import BEHIND, language_ids, source_template
from headway.text.tokenizer_config import (
    CLASSLESS,
    FLAGS,
    content,
    is_id,
    naming,
    read_added,
    read_config,
    read_json,
    read_template,
)
from headway.text.vocabulary import ROLES, add_controls

T5 = {"t5", "mt5", "umt5", "longt5"}
# SentencePiece models whose ids or templates differ from the file's own.
SENTENCEPIECE_OTHERS = {
    "albert",
    "xlnet",
    "fnet",
    "bigbird",
    "rembert",
    "debertav2",
    "nllb",
    "reformer",
    "speecht5",
}
FAIRSEQ_FILE = "sentencepiece.bpe.model"
Names = dict[str, str | None]
Found = tuple[Path, Backend, dict[str, Any]]


def find(path: Path) -> Found:
    """Returns the file with the vocabulary of a folder (or `path` itself if it is a file), its `tokenizers` form, and
    further arguments of `Tokenizer`, taken also from the other files of the folder."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; expected a tokenizer")
    if path.is_file():
        return _read(path, path.parent)
    file = first_file(path)
    if file is not None:
        return _read(file, path)
    names = ", ".join(sorted(p.name for p in path.iterdir())[:12]) or "nothing"
    if (path / "source.spm").is_file():
        raise DataError(
            f"{path}: this is a Marian tokenizer (source.spm, target.spm, vocab.json); load it with "
            "headway.text.MarianTokenizer.load"
        )
    raise DataError(
        f"{path}: no tokenizer in this folder: expected one of {', '.join(READERS)} (vocab.json with merges.txt, "
        f"encoder.json with vocab.bpe), found {names}"
    )


def first_file(folder: Path) -> Path | None:
    """Returns the file that a folder's tokenizer is read from, or a GGUF file itself if it holds one; None without
    one."""
    if folder.is_file():
        return folder if is_gguf(folder) and gguf.has_tokenizer(read_gguf(folder).metadata) else None
    pieces = [name for name, reader in READERS.items() if reader is bytelevel.read]
    names = [n for n in READERS if n not in pieces or bytelevel.merges_of(folder / n).is_file()]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read(file: Path, folder: Path) -> Found:
    if is_gguf(file):
        metadata = read_gguf(file).metadata
        with naming(file):
            return file, *gguf.read(metadata, file)
    with file.open("rb") as opened:
        refuse_impostor(file, opened.read(512), "a tokenizer")
    reader = READERS.get(file.name) or BY_SUFFIX.get(file.suffix) or _json
    alone = reader is _llama2c  # such a file does not belong to the folder's model
    config = {} if alone else read_config(folder / "tokenizer_config.json")
    declared = {} if alone else {**read_config(folder / "special_tokens_map.json"), **config}
    model = {} if alone else read_json(folder / "config.json")
    kind = _kind(config, model)
    with naming(file):
        backend, names = reader(file, config, kind)
    if reader is not _json and not alone:
        _add_declared(backend, folder, config, declared, file)
    if kind in BEHIND:
        _mark_language(backend, kind, config)
    names |= {
        role: None if declared[f"{role}_token"] is None else content(declared[f"{role}_token"])
        for role in ("bos", "eos", *ROLES)
        if f"{role}_token" in declared
    }
    model |= {} if alone else read_json(folder / "generation_config.json")
    for role in ("bos", "eos"):
        name = names.setdefault(role, _known(backend, model.get(f"{role}_token_id")))
        if name is not None and backend.token_to_id(name) is None:
            raise DataError(
                f"{file}: {role}_token is {name!r} in the configuration, but the tokenizer has no such token"
            )
    ids = {role: backend.token_to_id(name) for role, name in names.items() if name is not None}
    return (
        file,
        backend,
        {
            "bos": ids.pop("bos", None),
            "eos": ids.pop("eos", None),
            "special": {role: i for role, i in ids.items() if i is not None},
            "begins_with_bos": config.get("add_bos_token"),
            "ends_with_eos": config.get("add_eos_token"),
            "chat_template": read_template(folder, config),
            "config": config if config and reader is _json else {**config, **CLASSLESS},
        },
    )


def _kind(config: dict[str, Any], model: dict[str, Any]) -> str:
    """Returns the kind of tokenizer that a folder names, in lower case without punctuation: the class in
    `tokenizer_config.json`, else the model type in `config.json`; "" without either."""
    for name in (config.get("tokenizer_class"), model.get("tokenizer_class"), model.get("model_type")):
        if name and name not in ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend"):
            short_name = str(name).removesuffix("Fast").removesuffix("Tokenizer")
            return "".join(c for c in short_name.lower() if c.isalnum())
    return ""


def _json(file: Path, config: dict[str, Any], kind: str) -> tuple[Backend, Names]:
    try:
        backend = Backend.from_file(str(file))
    except (
        BaseException
    ) as error:  # the library raises bare Exception, and a panic in its Rust code is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise DataError(f"{file}: not a tokenizer.json of the tokenizers library: {error}") from None
    unknown = backend.model.unk_token if isinstance(backend.model, (WordPiece, WordLevel)) else None
    if unknown is not None and backend.model.token_to_id(unknown) is None:
        raise DataError(
            f"{file}: its unk_token {unknown[:80]!r} is not in its vocabulary: the file is damaged"
        )
    return backend, {}


def _sentencepiece(file: Path, config: dict[str, Any], kind: str) -> tuple[Backend, Names]:
    if sentencepiece.looks_like_tiktoken(file):
        specials = bytelevel.llama3_specials()
        backend = bytelevel.build_ranks(bytelevel.read_ranks(file), specials)
        return backend, {"bos": specials[0], "eos": specials[1]}
    if kind in (*fairseq.NUMBERINGS, "m2m100"):
        return fairseq.read(file, kind, config)
    if kind in SENTENCEPIECE_OTHERS or file.name == FAIRSEQ_FILE:
        raise DataError(
            f"{file}: a SentencePiece model of kind {kind!r} is not supported, because its ids differ from those of "
            "the file; put the tokenizer.json of the same model into the folder"
        )
    spec = sentencepiece.read_model(file)
    sentinels = config.get("extra_ids", 100) if kind in T5 else 0
    return sentencepiece.build(spec, sentinels=sentinels), spec.names


def _llama2c(file: Path, config: dict[str, Any], kind: str) -> tuple[Backend, Names]:
    spec = sentencepiece.read_llama2c(file)
    return sentencepiece.build(spec), spec.names


READERS: dict[str, Callable[[Path, dict[str, Any], str], tuple[Backend, Names]]] = {
    "tokenizer.json": _json,
    "tokenizer.model": _sentencepiece,
    "spiece.model": _sentencepiece,
    FAIRSEQ_FILE: _sentencepiece,
    "tokenizer.bin": _llama2c,
    "vocab.txt": wordpiece.read,
    "vocab.json": bytelevel.read,
    "encoder.json": bytelevel.read,
}
BY_SUFFIX = {".model": _sentencepiece, ".bin": _llama2c, ".txt": wordpiece.read}
"""Readers by file name, or else by suffix: (file, tokenizer_config.json, kind) -> `tokenizers` form, special tokens by
role."""


def _add_declared(
    backend: Backend, folder: Path, config: dict[str, Any], declared: dict[str, Any], file: Path
) -> None:
    """Adds the tokens that a folder declares: those with ids first, each at its id, then the named ones."""
    listed = {int(i): token for i, token in config.get("added_tokens_decoder", {}).items()}
    for name, i in read_added(folder / "added_tokens.json").items():
        listed.setdefault(i, {"content": name, "special": False})
    for i, token in sorted(listed.items()):
        name, flags = content(token), {key: bool(token.get(key, False)) for key in FLAGS}
        add = backend.add_special_tokens if flags["special"] else backend.add_tokens
        add([AddedToken(name, **flags)])
        if backend.token_to_id(name) != i:
            raise DataError(
                f"{file}: the added token {name!r} must have id {i}, but gets {backend.token_to_id(name)} with this "
                "vocabulary: it was added to another one"
            )
    named = declared.get("additional_special_tokens") or declared.get("extra_special_tokens") or []
    for token in named if isinstance(named, list) else []:
        if backend.token_to_id(content(token)) is None:
            add_controls(backend, [content(token)])


def _mark_language(backend: Backend, kind: str, config: dict[str, Any]) -> None:
    """Gives a translation model's texts the template of their language, whatever the file has, as transformers does."""
    added = backend.get_added_tokens_decoder()
    languages = language_ids({token.content: i for i, token in added.items() if token.special})
    eos = backend.token_to_id(content(config.get("eos_token") or "</s>"))
    if languages and eos is not None:
        backend.post_processor = source_template(kind, languages, eos, config).processor(backend)


def _known(backend: Backend, value: Any) -> str | None:
    token = value[0] if isinstance(value, list) and value else value
    return backend.id_to_token(token) if is_id(token) else None
