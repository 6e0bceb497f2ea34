"""What training begins with: tokenizer, token files, spec and first weights, made or found."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headway.attention.linear_attention import LinearAttentionSpec
from headway.checkpoints.folder import Folder, load_folder
from headway.checkpoints.restore import build_model
from headway.data import Permutation, Piece, TokenFile, encode_corpus, read_text
from headway.data.corpus import digest
from headway.data.hub import is_remote
from headway.errors import ConfigError, DataError, PatternError, did_you_mean
from headway.models import FAMILIES, Decoder, Encoder, Head, ModelSpec, build, catalog
from headway.patterns import Causal, Pattern, parse
from headway.positions import Learned
from headway.storage.files import atomic_write
from headway.text import Tokenizer, train_bpe, train_characters, train_words
from headway.train.microbatch_pool import DTYPES, choose_precision
from headway.train.rows_config import RowsConfig
from headway.train.text_config import TextConfig

TOKENS, SOURCE = ".tokens", ".source"
VOCAB, DEPTH = 4096, 6
FAMILY = dict.fromkeys(("masked-lm", "classify", "tag", "answer", "embed"), "roformer")
"""Of home-made models by task: of encoders one whose rows may be of any length; llama for other tasks."""
MASK, PAD = "[MASK]", "[PAD]"


class Inputs(NamedTuple):
    """The tokenizer; the text that is trained on, and the text that is held out, None without one; what is said of
    them."""

    tokenizer: Tokenizer
    train: TokenFile
    validation: TokenFile | None
    remarks: list[str]


def prepare(config: TextConfig, folder: Path, start: Path | None, *, in_template: bool) -> Inputs:
    """Load or train the tokenizer, and encode text into `folder`/data. Files that are there are reused: they have their
    names only when they are complete. A run that resumes from the checkpoint `start` has its tokenizer. With
    `in_template`, each document begins and ends as the tokenizer says.

    Raises DataError and ConfigError for text and settings that do not fit together, and for text that has changed since
    the run encoded it, unless `cached_tokens` says that this is meant.
    """
    remarks: list[str] = []

    def texts() -> Iterator[str]:
        return (piece.text for piece in _pieces(config))

    tokenizer = find_tokenizer(config, folder, start, texts, masked=not in_template)
    if Path(config.data).suffix == TOKENS and config.validation_share:
        raise ConfigError(
            f"validation_share cuts text, but {config.data} is a token file; give its held-out part as validation"
        )

    def file(name: str, source: str, pieces: Iterator[Piece]) -> TokenFile:
        path = folder / "data" / f"{name}{TOKENS}"
        if Path(source).suffix == TOKENS:
            found = TokenFile(source)
        elif path.exists():
            found = TokenFile(path)
            if start is not None:
                remarks.extend(_changed(source, path, config))
        else:
            found = encode_corpus(pieces, tokenizer, path, bos=in_template, eos=in_template)
            atomic_write(path.with_suffix(SOURCE), digest(source))
        found.require_tokenizer(tokenizer.fingerprint)
        return found

    train = file("train", config.data, _pieces(config))
    validation = None
    if config.validation is not None:
        validation = file("validation", config.validation, read_text(config.validation))
    elif config.validation_share:
        validation = file("validation", config.data, _pieces(config, held_out=True))
    return Inputs(tokenizer, train, validation, remarks)


def _changed(source: str, tokens: Path, config: TextConfig) -> list[str]:
    """What is said of a text that is not what it was when the run encoded it. Raises ConfigError unless the settings
    say that this is meant."""
    kept = tokens.with_suffix(SOURCE)
    gone = not (is_remote(source) or Path(source).exists())
    if not gone and (not kept.exists() or digest(source) == kept.read_text()):
        return []
    what = f"{source} {'is gone' if gone else 'has changed'} since this run encoded it"
    if config.cached_tokens:
        return [f"{what}: going on with the tokens in {tokens}"]
    raise ConfigError(
        f"{what}; put back what was there, begin a new run in another folder (--out), or go on with the tokens of "
        f"then, which are in {tokens}: --cached-tokens (cached_tokens=true)"
    )


@contextmanager
def made_inputs(folder: Path, start: Path | None) -> Iterator[None]:
    """While open, a run that has no checkpoint to `start` from makes tokenizer and token files in its folder: those of
    an earlier one that never came to its first checkpoint go first, and its own where it is refused."""

    def remove() -> None:
        for made in ("data", "tokenizer") if start is None else ():
            shutil.rmtree(folder / made, ignore_errors=True)

    remove()
    try:
        yield
    except BaseException:
        remove()
        raise


def model_folder(config: RowsConfig) -> Folder | None:
    """The folder that `model` names, opened once; None where weights are fresh. Raises as `load_folder` does."""
    if config.model is None or not Path(config.model).is_dir():
        return None
    if "model" not in config.opened:
        config.opened["model"] = load_folder(config.model)
    found: Folder = config.opened["model"]
    return found


def given_tokenizer(config: RowsConfig) -> Tokenizer | None:
    """The tokenizer of the settings, or of the model's folder; None where one is to be trained."""
    found = config.tokenizer or (None if model_folder(config) is None else config.model)
    return None if found is None else Tokenizer.load(found)


def find_tokenizer(
    config: RowsConfig, folder: Path, start: Path | None, texts: Callable[[], Iterator[str]], *, masked: bool
) -> Tokenizer:
    """The tokenizer of the settings, of the model's folder, of the checkpoint `start`, or one that is trained on
    `texts()` and kept in `folder`; a BPE has a mask and a pad token, and ends its texts, if `masked`.

    Raises ConfigError where none is given and none can be trained."""
    given = given_tokenizer(config)
    if given is not None:
        return given
    if config.model is not None:
        raise ConfigError(
            f"model {config.model!r} comes without a tokenizer; give one (tokenizer=FOLDER), or leave model out"
        )
    own = start or folder / "tokenizer"
    if not (own / "tokenizer.json").exists():
        if Path(config.data).suffix == TOKENS:
            raise ConfigError(
                f"{config.data} holds token ids; give the tokenizer that made them (tokenizer=FOLDER)"
            )
        _trained_tokenizer(config, texts(), masked).save(own)
    return Tokenizer.load(own)  # also where it is new: the one that a resumed run will have


def _trained_tokenizer(config: RowsConfig, texts: Iterator[str], masked: bool) -> Tokenizer:
    vocab = config.vocab or VOCAB
    if config.units in ("characters", "words"):
        return {"characters": train_characters, "words": train_words}[config.units](texts, vocab)
    if not masked:
        return train_bpe(texts, vocab)
    made = train_bpe(texts, vocab, special_tokens=[MASK, PAD])
    return Tokenizer(made.backend, bos=made.bos, eos=made.eos, ends_with_eos=True, config=made.config)


def _pieces(config: TextConfig, *, held_out: bool = False) -> Iterator[Piece]:
    """The documents of `data` that are trained on, or those that are held out."""
    if not config.validation_share:
        return read_text(config.data)
    share, seed = config.validation_share, config.seed
    return hold_out(lambda: read_text(config.data), share, seed, held_out=held_out)


def hold_out(
    read: Callable[[], Iterable[Piece]], share: float, seed: int, *, held_out: bool
) -> Iterator[Piece]:
    """Split documents: `share` of them, at least one, drawn by `seed`, are held out; of a single document, its
    end, cut at a line end.

    `read()` gives the pieces and is called twice, so that nothing is kept in memory.
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
    left, done = int(size * (1 - share)), False  # characters before the cut; whether it was made
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
        raise DataError(f"{share:.1%} of one document of {size} characters is nothing; hold out more")


def model_spec(config: RowsConfig, vocab: int | None = None) -> ModelSpec:
    """The spec of the model that a run begins with; `vocab` is for fresh weights, as the settings say unless given."""
    if (folder := model_folder(config)) is not None:
        return folder.spec
    if vocab is None:  # the catalog has vocabularies of its own
        vocab = config.vocab or VOCAB if config.model is None else 1
    return make_spec(config, vocab)


def make_spec(config: RowsConfig, vocab: int) -> ModelSpec:
    """The spec of a run with fresh weights: from the catalog, or made by depth."""
    if config.model is not None:
        if config.model.lower() not in catalog.names():
            raise ConfigError(
                f"model {config.model!r} is neither a folder nor a name of the catalog"
                f"{did_you_mean(config.model.lower(), catalog.names())}; the catalog has {', '.join(catalog.names())}"
            )
        spec = catalog.spec(config.model)
        if spec.vocab < vocab:
            raise ConfigError(
                f"the tokenizer has {vocab} tokens, but {config.model} has an embedding of {spec.vocab}"
            )
        return spec
    names = ("width", "heads", "kv_heads", "hidden", "tied")
    given: dict[str, Any] = {name: v for name in names if (v := getattr(config, name)) is not None}
    depth = config.depth or DEPTH
    width = given.setdefault("width", 64 * depth)
    heads = given.setdefault("heads", max(1, width // 64))
    if width % heads:
        raise ConfigError(f"width {width} cannot be split into {heads} heads; give heads that divide it")
    given["head_dim"] = width // heads
    config = config.model_copy(update={"family": config.family or FAMILY.get(str(config.task))})
    kind = FAMILIES.get(config.family or "")
    if kind is not None and kind.defaults.get("causal") is False:
        spec = _encoder_spec(config, vocab, depth, given)
    else:
        patterns = _layer_patterns(config.patterns or "Causal()")
        # transformers says "a window in some layers" in ministral's config only (plain llama has none).
        usual = config.family or ("llama" if set(patterns) == {Causal()} else "ministral")
        kind = FAMILIES.get(usual, FAMILIES["llama"])  # an unknown one is refused by `of_depth`
        given.setdefault("hidden", kind.hidden(width))
        given.setdefault("kv_heads", kind.kv_heads(heads, next(g for g in (4, 2, 1) if heads % g == 0)))
        spec = ModelSpec.of_depth(
            depth, vocab, context=config.context, patterns=patterns, family=usual, **given
        )
    if config.dropout is not None:
        spec = replace(spec, dropout=config.dropout, attention_dropout=config.dropout)
    return spec if config.linear is None else spec.with_linear(LinearAttentionSpec(config.linear))


def _encoder_spec(config: RowsConfig, vocab: int, depth: int, sizes: dict[str, Any]) -> ModelSpec:
    """An encoder with the usual values of its family for what `sizes` and the settings leave open: a feed-forward of
    4 widths, as many kv heads as query heads, and, where positions are a table, one of `context` rows."""
    assert config.family is not None
    usual: dict[str, Any] = {"kv_heads": sizes["heads"], "hidden": 4 * sizes["width"]}
    positions = FAMILIES[config.family].defaults.get("positions")
    if isinstance(positions, Learned):
        usual["positions"] = replace(positions, size=config.context)
    patterns = None if config.patterns is None else _layer_patterns(config.patterns)
    return ModelSpec.of(
        config.family,
        vocab=vocab,
        layers=depth,
        trained_context=config.context,
        patterns=patterns,
        **(usual | sizes),
    )


def _layer_patterns(text: str) -> list[Pattern]:
    """`Window.last(128); Causal()` as patterns, one per layer, to be repeated."""
    try:
        return [parse(part) for part in text.split(";")]
    except PatternError as error:
        raise ConfigError(f"patterns: {error}") from None


def first_model(
    config: RowsConfig, vocab: int, head: Head | None = None
) -> tuple[Decoder | Encoder, list[str]]:
    """The fp32 model that a run begins with, and what is to be said of it: a folder's weights, or fresh ones from
    `seed`. One that an adapter is trained beside is in the number format of the products.

    With `head` it has that one, for rows of `context` tokens at least, which is what its users may then give it. Of a
    folder with another head, what stands below is taken; what is new is drawn from `seed`."""
    found, said = model_folder(config), list[str]()

    def headed(spec: ModelSpec) -> ModelSpec:
        longer = replace(spec, trained_context=max(config.context, spec.trained_context))
        return spec if head is None else longer.with_head(head)

    if found is not None and (head is None or found.spec.head == head):
        dtype = torch.float32 if config.adapter is None else DTYPES[choose_precision(config.dtype).what]
        found = replace(found, spec=headed(found.spec))
        model = build_model(found, dtype=dtype, backend=config.backend).train()
    else:
        spec = headed(make_spec(config, vocab) if found is None else found.spec)
        model = build(spec, dtype=torch.float32, seed=config.seed, backend=config.backend)
        if found is not None and head is not None:
            below = build_model(load_folder(found.path, head=Head("states")), dtype=torch.float32)
            model.load_state_dict(below.state_dict(), strict=False)  # all but the head's
            said = [
                f"{config.model} has the head {found.spec.head.task!r}; {head.task!r} is a new one, with fresh weights"
            ]
    assert isinstance(model, (Decoder, Encoder)), "the task has checked the spec"
    return model, said
