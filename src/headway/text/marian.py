"""Marian's tokenizer of two sides: `source.spm`, `target.spm`, and their shared `vocab.json`."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from headway.errors import DataError, check_known
from headway.storage.files import atomic_write, json_text
from headway.storage.reading import refuse_impostor
from headway.text import bytelevel, sentencepiece
from headway.text.tokenizer_config import naming, need_tokens, read_config, token_names
from headway.text.vocabulary import SPACE, require_rows

SIDES = ("source", "target")


class MarianTokenizer:
    """Converts text of either language to ids of one model, and ids to text (Marian; OPUS-MT's folders).

    A side's SentencePiece model splits the text into pieces, which are looked up in `vocab.json`; pieces that are not
    in it are <unk>. EOS ends every text, nothing begins it: a decoder starts from the id that its config names, <pad>.
    A text may begin with a target language that the vocabulary has, such as ">>fra<<": that is one token. With
    `target_vocab.json` (`separate_vocabs`) the target side has its own vocabulary.
    """

    bos = None
    """None: no token begins a text."""

    def __init__(
        self,
        spm: dict[str, bytes],
        vocabularies: dict[str, dict[str, int]],
        *,
        config: dict[str, Any] | None = None,
        where: str | Path = "marian",
    ) -> None:
        """`spm`: the bytes of each side's SentencePiece file; `vocabularies`: piece -> id for each side. Raises
        DataError if one cannot be read, or lacks <unk>, </s> or <pad>."""
        self._spm, self._vocabularies = dict(spm), dict(vocabularies)
        self.config = dict(config or {})
        roles = {"unk": "<unk>", "eos": "</s>", "pad": "<pad>"}
        self._names = {role: str(name) for role, name in token_names(self.config, roles).items()}
        need_tokens(self._names, roles, vocabularies["source"], Path(where, "vocab.json"))
        file = "target_vocab.json" if self._separate else "vocab.json"
        self.unk, self.eos, self.pad = need_tokens(
            self._names, roles, vocabularies["target"], Path(where, file)
        )
        self._backends = {side: _backend(spm[side], f"{where}/{side}.spm") for side in SIDES}

    @property
    def _separate(self) -> bool:
        return self._vocabularies["source"] is not self._vocabularies["target"]

    @staticmethod
    def load(folder: str | Path) -> "MarianTokenizer":
        """Loads a tokenizer from a folder with `source.spm`, `target.spm` and `vocab.json`."""
        folder = Path(folder)
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; expected a Marian tokenizer")
        config = read_config(folder / "tokenizer_config.json")
        target_file = "target_vocab.json" if config.get("separate_vocabs") else "vocab.json"
        for name in ("source.spm", "target.spm", "vocab.json", target_file):
            if not (folder / name).is_file():
                raise DataError(f"{folder}: no {name}, which a Marian tokenizer needs")
        source = bytelevel.read_vocabulary(folder / "vocab.json")
        target = source if target_file == "vocab.json" else bytelevel.read_vocabulary(folder / target_file)
        spm = {side: (folder / f"{side}.spm").read_bytes() for side in SIDES}
        return MarianTokenizer(spm, {"source": source, "target": target}, config=config, where=folder)

    def save(self, folder: str | Path) -> None:
        """Writes the files that `load` and `transformers` read, each atomically."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = {f"{role}_token": name for role, name in self._names.items()}
        config = {
            **self.config,
            "tokenizer_class": "MarianTokenizer",
            "separate_vocabs": self._separate,
            **names,
        }
        written = {"vocab.json": self._vocabularies["source"], "tokenizer_config.json": config}
        written |= {"target_vocab.json": self._vocabularies["target"]} if self._separate else {}
        for name, value in written.items():
            atomic_write(folder / name, json_text(value))
        for side in SIDES:
            atomic_write(folder / f"{side}.spm", self._spm[side])

    @property
    def vocab_size(self) -> int:
        """One more than the largest id of either side."""
        return 1 + max(max(vocabulary.values()) for vocabulary in self._vocabularies.values())

    def require_fits(self, embedding_rows: int) -> None:
        """Raises CheckpointError if an id lies outside an embedding of `embedding_rows` rows."""
        require_rows(self.vocab_size, embedding_rows)

    def encode(self, text: str, *, side: str = "source", eos: bool = True) -> list[int]:
        """Returns the ids of a text of one side: "source", which is translated, or "target", the translation."""
        return self.encode_batch([text], side=side, eos=eos)[0]

    def encode_batch(
        self, texts: Sequence[str], *, side: str = "source", eos: bool = True
    ) -> list[list[int]]:
        """Returns `encode` of each text."""
        check_known(side, SIDES, "a Marian tokenizer has no side", error=DataError)
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise DataError(f"text {i} must be a str, got {type(text).__name__}")
        vocabulary = self._vocabularies[side]
        unk, end = vocabulary[self._names["unk"]], [vocabulary[self._names["eos"]]] if eos else []
        coded = [_language(text) for text in texts]
        cut = self._backends[side].encode_batch([text for _, text in coded], add_special_tokens=False)
        return [
            [vocabulary.get(piece, unk) for piece in (*code, *_pieces(encoding, text))] + end
            for (code, text), encoding in zip(coded, cut, strict=True)
        ]

    def decode(self, ids: Sequence[int], *, side: str = "target", special: bool = False) -> str:
        """Returns the text of ids; special tokens give text, followed by a space, only if `special`."""
        check_known(side, SIDES, "a Marian tokenizer has no side", error=DataError)
        # texts of other pieces and of special tokens, alternating
        runs, names = [""], set(self._names.values())
        for i in ids:
            piece = self._pieces[side].get(i)
            if piece is None:
                raise DataError(f"token id {i} is not in the {side} vocabulary of {self.vocab_size} tokens")
            if piece not in names:
                runs[-1] += piece
            elif special:
                runs += [f"{piece} ", ""]
        return "".join(run.removeprefix(SPACE) for run in runs).replace(SPACE, " ").strip()

    @cached_property
    def _pieces(self) -> dict[str, dict[int, str]]:
        return {side: {i: piece for piece, i in v.items()} for side, v in self._vocabularies.items()}

    def __repr__(self) -> str:
        return f"MarianTokenizer({self.vocab_size} tokens, eos={self.eos}, pad={self.pad})"


def _backend(data: bytes, name: str) -> Backend:
    refuse_impostor(Path(name), data[:512], "a SentencePiece model")
    with naming(Path(name)):
        backend = sentencepiece.build(sentencepiece.read_model(Path(name), data))
    backend.encode_special_tokens = True
    return backend


def _pieces(cut: Encoding, text: str) -> list[str]:
    """Returns the pieces of a split text; one that the SentencePiece model lacks keeps its text: `vocab.json` may have
    it."""
    places = zip(cut.tokens, cut.offsets, strict=True)
    return [text[start:end] if piece == "<unk>" else piece for piece, (start, end) in places]


def _language(text: str) -> tuple[list[str], str]:
    """Returns a language code before a text, and the text: ">>fra<< Hello" gives ">>fra<<" and " Hello"."""
    end = text.find("<<") if text.startswith(">>") else -1
    return ([text[: end + 2]], text[end + 2 :]) if end != -1 else ([], text)
