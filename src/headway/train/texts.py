"""The training text and held-out text of a run, as token files in its folder."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.data import Permutation, Piece, TokenFile, encode_corpus, read_text
from headway.data.corpus import digest
from headway.data.hub import is_remote
from headway.errors import ConfigError, DataError
from headway.storage.files import atomic_write
from headway.text import Tokenizer
from headway.train.inputs import TOKENS, Inputs
from headway.train.rows_config import TextConfig

SOURCE = ".source"


def prepare(
    inputs: Inputs, start: Path | None, *, in_template: bool
) -> tuple[Tokenizer, TokenFile, TokenFile | None, list[str]]:
    """Loads or trains the tokenizer, and encodes text into data/ of the run's folder; returns the tokenizer, the token
    files of training text and of held-out text (None if nothing is held out), and remarks.

    Existing token files are reused: they have their names only when they are complete. A run that resumes from the
    checkpoint `start` uses its tokenizer. With `in_template`, each document begins and ends as the tokenizer's template
    has it (BOS, EOS).

    Raises DataError and ConfigError for text and settings that do not fit together, and for text that has changed since
    the run encoded it, unless the setting `cached_tokens` allows this.
    """
    config, remarks = inputs.config, list[str]()

    tokenizer = inputs.find_tokenizer(
        start, lambda: (piece.text for piece in _pieces(config)), masked=not in_template
    )
    if Path(config.data).suffix == TOKENS and config.validation_share:
        raise ConfigError(
            f"validation_share splits text, but {config.data} is a token file; give held-out tokens as validation"
        )

    def file(name: str, source: str, pieces: Iterator[Piece]) -> TokenFile:
        path = Path(config.out) / "data" / f"{name}{TOKENS}"
        if Path(source).suffix == TOKENS:
            tokens = TokenFile(source)
        elif path.exists():
            tokens = TokenFile(path)
            if start is not None:
                remarks.extend(_changed(source, path, config))
        else:
            tokens = encode_corpus(pieces, tokenizer, path, bos=in_template, eos=in_template)
            atomic_write(path.with_suffix(SOURCE), digest(source))
        tokens.require_tokenizer(tokenizer.fingerprint)
        return tokens

    training = file("train", config.data, _pieces(config))
    validation = None
    if config.validation is not None:
        validation = file("validation", config.validation, read_text(config.validation))
    elif config.validation_share:
        validation = file("validation", config.data, _pieces(config, held_out=True))
    return tokenizer, training, validation, remarks


def _changed(source: str, tokens: Path, config: TextConfig) -> list[str]:
    """Returns remarks on a text that has changed since the run encoded it. Raises ConfigError unless the setting
    `cached_tokens` allows it."""
    digest_file = tokens.with_suffix(SOURCE)
    gone = not (is_remote(source) or Path(source).exists())
    if not gone and digest(source) == digest_file.read_text():
        return []
    what = f"{source} {'is gone' if gone else 'has changed'} since this run encoded it"
    if config.cached_tokens:
        return [f"{what}: going on with the tokens in {tokens}"]
    raise ConfigError(
        f"{what}; restore it, start a new run in another folder (--out), or continue with the tokens encoded then, "
        f"in {tokens}: --cached-tokens (cached_tokens=true)"
    )


@contextmanager
def made_inputs(folder: Path, start: Path | None) -> Iterator[None]:
    """Keeps the folder of a new run (no checkpoint to `start` from) clean while it prepares its inputs: the tokenizer
    and token files of an earlier run that never wrote a checkpoint are removed first, and the new ones on an error."""

    def remove() -> None:
        for name in ("data", "tokenizer") if start is None else ():
            shutil.rmtree(folder / name, ignore_errors=True)

    remove()
    try:
        yield
    except BaseException:
        remove()
        raise


def _pieces(config: TextConfig, *, held_out: bool = False) -> Iterator[Piece]:
    """Returns the documents of `data` that are trained on, or those that are held out."""
    if not config.validation_share:
        return read_text(config.data)
    share, seed = config.validation_share, config.seed
    return hold_out(lambda: read_text(config.data), share, seed, held_out=held_out)


def hold_out(
    read: Callable[[], Iterable[Piece]], share: float, seed: int, *, held_out: bool
) -> Iterator[Piece]:
    """Yields the training part or the held-out part of documents. `share` of the documents, at least one, drawn by
    `seed`, are held out; of a single document, its end, cut at a line end.

    `read()` returns the pieces; it is called twice, so that nothing is kept in memory. Raises DataError if the held-out
    share of a single document is empty.
    """
    documents = size = 0
    for piece in read():
        documents += piece.ends
        size += len(piece.text)
    if documents > 1:
        count = min(documents - 1, max(1, round(share * documents)))
        chosen = {*map(Permutation(seed, 0, documents), range(count))}
        number = 0
        for piece in read():
            if (number in chosen) == held_out:
                yield piece
            number += piece.ends
        return
    left, done = int(size * (1 - share)), False  # characters that are left before the cut; whether it is done
    for piece in read():
        if done or len(piece.text) <= left:
            left -= len(piece.text)
            if held_out == done:
                yield piece
            continue
        line = piece.text.rfind("\n", 0, left) + 1 or left
        done = True
        part = piece.text[line:] if held_out else piece.text[:line]
        if part:
            yield Piece(part, piece.ends or not held_out, piece.where)
    if not done:
        raise DataError(
            f"validation_share {share:.1%} of one document of {size} characters leaves no held-out text; raise it"
        )
