"""What training on text begins with: tokenizer, token files, spec and first weights, made or found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.checkpoints.folder import load_folder
from headway.checkpoints.restore import build_model
from headway.data import Permutation, Piece, TokenFile, encode_corpus, read_text
from headway.errors import ConfigError, DataError, did_you_mean
from headway.models import FAMILIES, Decoder, Encoder, ModelSpec, blank, build, catalog
from headway.patterns import Causal
from headway.text import Tokenizer
from headway.train.scratch_model import changed, encoder_spec, layer_patterns, trained_tokenizer
from headway.train.text_config import TextConfig

TOKENS = ".tokens"
VOCAB, DEPTH = 4096, 6


def prepare(
    config: TextConfig, folder: Path, start: Path | None, *, in_template: bool
) -> tuple[Tokenizer, TokenFile, TokenFile | None]:
    """The tokenizer, loaded or trained, and the text that is trained on and the text that is held out (None without
    one), encoded into `folder`/data. Files that are there are reused: they have their names only when they are
    complete. A run that goes on from the checkpoint `start` has its tokenizer. With `in_template`, each document begins
    and ends as the tokenizer says.

    Raises DataError and ConfigError for text and settings that do not fit together.
    """
    tokenizer = _tokenizer(config, folder, start, masked=not in_template)
    if Path(config.data).suffix == TOKENS and config.validation_share:
        raise ConfigError(
            f"validation_share cuts text, but {config.data} is a token file; give its held-out part as validation"
        )
    make = _Encoding(config, tokenizer, in_template)
    train = make.file(config.data, folder / "data" / f"train{TOKENS}", held_out=False)
    if config.validation is None and not config.validation_share:
        return tokenizer, train, None
    name = folder / "data" / f"validation{TOKENS}"
    source = config.validation or config.data
    return tokenizer, train, make.file(source, name, held_out=config.validation is None)


def check_model(config: TextConfig, spec: ModelSpec) -> None:
    """Say what is wrong with the model before a tokenizer is trained for it."""
    limit = spec.context_limit
    if limit is not None and config.context > limit:
        raise ConfigError(
            f"context {config.context} is more than the {limit} tokens that {config.model or spec.family} can take; "
            "lower context, or choose positions without a table (roformer, llama)"
        )
    with torch.device("meta"):
        blank(spec, backend=config.backend)


def _tokenizer(config: TextConfig, folder: Path, start: Path | None, masked: bool) -> Tokenizer:
    if config.tokenizer is not None:
        return Tokenizer.load(config.tokenizer)
    if config.model is not None and Path(config.model).is_dir():
        return Tokenizer.load(config.model)
    if config.model is not None:
        raise ConfigError(
            f"model {config.model!r} comes without a tokenizer; give one (tokenizer=FOLDER), or leave model out"
        )
    own = start or folder / "tokenizer"
    if (own / "tokenizer.json").exists():
        return Tokenizer.load(own)
    if Path(config.data).suffix == TOKENS:
        raise ConfigError(
            f"{config.data} holds token ids; give the tokenizer that made them (tokenizer=FOLDER)"
        )
    texts = (piece.text for piece in _pieces(config.data, config, held_out=False))
    tokenizer = trained_tokenizer(texts, config.units or "bpe", config.vocab or VOCAB, masked=masked)
    tokenizer.save(own)
    return Tokenizer.load(own)  # the one that a resumed run will have


@dataclass(frozen=True)
class _Encoding:
    """Text into token files."""

    config: TextConfig
    tokenizer: Tokenizer
    in_template: bool

    def file(self, source: str, path: Path, *, held_out: bool) -> TokenFile:
        if Path(source).suffix == TOKENS:
            file = TokenFile(source)
        else:
            if not path.exists():
                whole = source == self.config.validation
                pieces = read_text(source) if whole else _pieces(source, self.config, held_out=held_out)
                encode_corpus(pieces, self.tokenizer, path, bos=self.in_template, eos=self.in_template)
            file = TokenFile(path)
        file.require_tokenizer(self.tokenizer.fingerprint)
        return file


def _pieces(source: str, config: TextConfig, *, held_out: bool) -> Iterator[Piece]:
    """The documents of `source` that are trained on, or those that are held out."""
    if not config.validation_share:
        return read_text(source)
    return hold_out(lambda: read_text(source), config.validation_share, config.seed, held_out=held_out)


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
        pick = Permutation(seed, 0, documents)
        chosen = {pick(i) for i in range(count)}
        number = 0
        for piece in read():
            if (number in chosen) == held_out:
                yield piece
            number += piece.ends
        return
    cut, at = int(size * (1 - share)), 0
    done = False
    for piece in read():
        inside = max(0, cut - at)
        at += len(piece.text)
        if done or at <= cut:
            if held_out == done:
                yield piece
            continue
        line = piece.text.rfind("\n", 0, inside) + 1 or inside
        done = True
        part = piece.text[line:] if held_out else piece.text[:line]
        if part:
            yield Piece(part, piece.ends or not held_out, piece.where)
    if not done:
        raise DataError(f"{share:.1%} of one document of {size} characters is nothing; hold out more")


def model_spec(config: TextConfig, vocab: int | None = None) -> ModelSpec:
    """The spec of the model that a run begins with; `vocab` is for fresh weights, as the settings say unless given."""
    if config.model is not None and Path(config.model).is_dir():
        return load_folder(config.model).spec
    if vocab is None:  # the catalog has vocabularies of its own
        vocab = config.vocab or VOCAB if config.model is None else 1
    return make_spec(config, vocab)


def make_spec(config: TextConfig, vocab: int) -> ModelSpec:
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
    family = FAMILIES.get(config.family or "")
    is_encoder = family is not None and family.defaults.get("causal") is False
    given = {
        name: value
        for name in ("width", "heads", "kv_heads", "hidden", "tied")
        if (value := getattr(config, name)) is not None
    }
    depth = config.depth or DEPTH
    width = given.get("width", 64 * depth)
    heads = given.get("heads", max(1, width // 64) if "width" in given else depth)
    if width % heads:
        raise ConfigError(f"width {width} cannot be split into {heads} heads; give heads that divide it")
    given |= {"width": width, "heads": heads, "head_dim": width // heads}
    if is_encoder:
        return changed(encoder_spec(config, vocab, depth, given), config)
    patterns = layer_patterns(config.patterns)
    # transformers says "a window in some layers" in ministral's config only (plain llama has none).
    usual = config.family or ("llama" if set(patterns) == {Causal()} else "ministral")
    kind = FAMILIES.get(usual, FAMILIES["llama"])  # an unknown one is refused by `of_depth`
    given.setdefault("hidden", kind.hidden(width))
    given.setdefault("kv_heads", kind.kv_heads(heads, next(g for g in (4, 2, 1) if heads % g == 0)))
    spec = ModelSpec.of_depth(depth, vocab, context=config.context, patterns=patterns, family=usual, **given)
    return changed(spec, config)


def first_model(config: TextConfig, vocab: int) -> Decoder | Encoder:
    """The fp32 model that a run begins with: a folder's weights, or fresh ones from `seed`."""
    if config.model is not None and Path(config.model).is_dir():
        model = build_model(load_folder(config.model), dtype=torch.float32, backend=config.backend).train()
    else:
        model = build(make_spec(config, vocab), dtype=torch.float32, seed=config.seed, backend=config.backend)
    assert isinstance(model, (Decoder, Encoder)), "a task that trains on text has checked the spec"
    return model
