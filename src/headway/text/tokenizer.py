"""One tokenizer for training, command line and server: text to ids, messages to ids, ids to text."""

from __future__ import annotations

import hashlib
import re
import secrets
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headway.errors import CheckpointError, DataError
from headway.text import files
from headway.text.chat import ChatTemplate, Message, check_messages
from headway.text.pieces import ByteTable, byte_table
from headway.text.stream import StreamDecoder


class Tokenizer:
    """A `tokenizers.Tokenizer` with three promises of its own.

    - BOS stands at the beginning exactly once, when the tokenizer is one that begins texts with it.
    - The text of a special token inside a user's text (`"</s>"`) is text: it becomes a control token only
      when `special=True` is asked for, or when a chat template (not a message) wrote it.
    - Decoding is a homomorphism: decoding token by token gives what decoding all at once gives.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos: int | None = None,
        eos: int | None = None,
        begins_with_bos: bool | None = None,
        chat_template: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        named = [i for i in (bos, eos) if i is not None]
        for i in named:
            if backend.id_to_token(i) is None:
                raise DataError(
                    f"special token id {i} is not in the vocabulary of {backend.get_vocab_size()}"
                )
        controls = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        backend.add_special_tokens(
            [AddedToken(str(backend.id_to_token(i)), special=True, normalized=False)
             for i in named if i not in controls]
        )  # fmt: skip
        self.backend = backend
        prefix = _prefix(backend)
        self.bos = bos if bos is not None else (prefix[0] if len(prefix) == 1 else None)
        self.eos = eos
        begins = self.bos is not None and prefix[:1] == [self.bos]
        self.begins_with_bos = begins if begins_with_bos is None else begins_with_bos and self.bos is not None
        self.config = dict(config or {})
        self.chat_template = ChatTemplate(chat_template) if chat_template is not None else None

    # -- what it is --------------------------------------------------------------------------------------

    @staticmethod
    def load(path: str | Path) -> Tokenizer:
        """From a Hugging Face folder, a `tokenizer.json`, a SentencePiece `.model` or a llama2.c `.bin`
        file."""
        found = files.find(Path(path))
        return Tokenizer(
            found.backend, bos=found.bos, eos=found.eos, begins_with_bos=found.begins_with_bos,
            chat_template=found.chat_template, config=found.config,
        )  # fmt: skip

    def save(self, folder: str | Path) -> None:
        """Writes `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json` and the chat
        template, each
        atomically, in the form that `transformers` reads."""
        names = {"bos_token": self._name(self.bos), "eos_token": self._name(self.eos)}
        files.write(
            Path(folder),
            self.backend.to_str(pretty=True),
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **self.config,
                **{k: v for k, v in names.items() if v},
            },
            {k: v for k, v in names.items() if v},
            self.chat_template.source if self.chat_template else None,
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self._names)

    @cached_property
    def _names(self) -> list[str | None]:
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        names: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
        for name, i in vocabulary.items():
            names[i] = name
        return names

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens: BOS, EOS, chat markers."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that tell tokenizers apart: sha256 of what decides ids."""
        return hashlib.sha256(self.backend.to_str().encode()).digest()

    def require_fits(self, embedding_rows: int) -> None:
        """Raises CheckpointError when an id would fall outside an embedding of that many rows."""
        if self.vocab_size > embedding_rows:
            raise CheckpointError(
                f"the tokenizer has ids up to {self.vocab_size - 1} ({self.vocab_size} tokens) but the "
                f"model's embedding has {embedding_rows} rows: this is not its tokenizer, or tokens were "
                "added without resizing the embedding"
            )

    def unused_ids(self, embedding_rows: int) -> list[int]:
        """Rows of the embedding that stand for no token (padding of the vocabulary): never to be sampled."""
        return [*self._gaps, *range(self.vocab_size, embedding_rows)]

    @cached_property
    def _gaps(self) -> list[int]:
        return [i for i, name in enumerate(self._names) if name is None]

    # -- text to ids -------------------------------------------------------------------------------------

    def encode(self, text: str, *, bos: bool = True, special: bool = False) -> list[int]:
        """Ids of `text`.

        `bos`: begin with BOS, once, if this tokenizer does so (`begins_with_bos`); False never adds it.
        `special`: the text of a special token becomes that token. The default keeps a user's text text.
        """
        return self.encode_batch([text], bos=bos, special=special)[0]

    def encode_batch(
        self, texts: Sequence[str], *, bos: bool = True, special: bool = False
    ) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise DataError(f"text {i} must be a str, got {type(text).__name__}")
        try:
            found = (self.backend if special else self._plain).encode_batch_fast(
                list(texts), add_special_tokens=False
            )
        except (UnicodeEncodeError, TypeError) as error:
            bad = next((i for i, t in enumerate(texts) if _lone_surrogate(t)), None)
            if bad is None:
                raise
            at = _lone_surrogate(texts[bad])
            raise DataError(
                f"text {bad} has a lone surrogate ({at}), which no UTF-8 text can hold"
            ) from error
        return [self._begin(list(one.ids), bos) for one in found]

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of a conversation, through the tokenizer's chat template; no string lies between.

        Control tokens come from the template alone: `"</s>"` inside a message stays five characters. BOS is
        what the template writes, so training and generation see the same ids.
        """
        if self.chat_template is None:
            raise DataError(
                "this tokenizer has no chat template (neither chat_template.jinja nor chat_template in "
                "tokenizer_config.json): give a prompt instead of messages, or add a template"
            )
        for name, token in (("bos_token", self.bos), ("eos_token", self.eos)):
            variables.setdefault(name, self._name(token) or "")
        check_messages(messages)
        text = self.chat_template.render(
            self._shield(list(messages)), add_generation_prompt=add_generation_prompt, **variables
        )
        ids = self._rendered(text)
        self._warn_two_bos(ids)
        return ids

    def _begin(self, ids: list[int], bos: bool) -> list[int]:
        if bos and self.begins_with_bos and ids[:1] != [self.bos]:
            assert self.bos is not None
            ids.insert(0, self.bos)
        self._warn_two_bos(ids)
        return ids

    def _warn_two_bos(self, ids: list[int]) -> None:
        if self.bos is not None and ids[:2] == [self.bos, self.bos]:
            warnings.warn(
                f"the ids begin with BOS ({self.bos}) twice; the text or template adds it again", stacklevel=4
            )

    @cached_property
    def _plain(self) -> Backend:
        copy = Backend.from_str(self.backend.to_str())
        copy.encode_special_tokens = True
        return copy

    # A message's text may contain what looks like a control token, and the template decides the order of
    # everything. So the first character of each such place in a message is replaced by an unguessable
    # escape; after rendering, what still matches a control token was written by the template and becomes a
    # stand-in token of a private copy of the tokenizer, in which real control tokens are plain text.

    @cached_property
    def _key(self) -> str:
        return f"hw{secrets.token_hex(8)}"

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        names = sorted((str(self._name(i)) for i in self.special_ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) if names else r"(?!)")

    def _shield(self, value: Any) -> Any:
        if isinstance(value, str):
            places = re.finditer(f"(?={self._controls.pattern})" if self.special_ids else r"(?!)", value)
            for at in sorted((m.start() for m in places), reverse=True):
                value = f"{value[:at]}{self._key}{ord(value[at]):x};{value[at + 1 :]}"
            return value
        if isinstance(value, dict):
            return {k: self._shield(v) for k, v in value.items()}
        return [self._shield(v) for v in value] if isinstance(value, (list, tuple)) else value

    def _rendered(self, text: str) -> list[int]:
        ids = {self._name(i): i for i in self.special_ids}
        text = self._controls.sub(lambda m: f"{self._key}#{ids[m[0]]};", text)
        text = re.sub(rf"{self._key}([0-9a-f]+);", lambda m: chr(int(m[1], 16)), text)
        backend, real = self._templated
        return [real.get(i, i) for i in backend.encode(text, add_special_tokens=False).ids]

    @cached_property
    def _templated(self) -> tuple[Backend, dict[int, int]]:
        backend = Backend.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        added = self.backend.get_added_tokens_decoder()
        stand_ins = {i: f"{self._key}#{i};" for i in self.special_ids}
        backend.add_tokens(
            [AddedToken(name, special=False, normalized=False, lstrip=added[i].lstrip, rstrip=added[i].rstrip)
             for i, name in stand_ins.items()]
        )  # fmt: skip
        return backend, {int(backend.token_to_id(name) or 0): i for i, name in stand_ins.items()}

    # -- ids to text -------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, after: Sequence[int] = (), special: bool = False) -> str:
        """Text of `ids`, which follow the ids `after` (a prompt). Special tokens give text only if
        `special`."""
        if self.table is None:
            for i in (*after, *ids):
                self.token(i)
            before = self.backend.decode(list(after), skip_special_tokens=not special) if after else ""
            whole = self.backend.decode([*after, *ids], skip_special_tokens=not special)
            return str(whole[len(before) :])
        stream = self.stream(after=after, special=special)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, *, after: Sequence[int] = (), special: bool = False) -> StreamDecoder:
        """Decodes one token at a time; see StreamDecoder."""
        return StreamDecoder(self, after=after, special=special)

    def token(self, token: int) -> str:
        """The name of an id; DataError when the tokenizer has no such id."""
        name = self._name(token) if token >= 0 else None
        if name is None:
            raise DataError(f"token id {token} is not in the vocabulary of {self.vocab_size} tokens")
        return name

    @cached_property
    def table(self) -> ByteTable | None:
        """What bytes each token stands for, for byte-level and SentencePiece tokenizers."""
        return byte_table(self.backend)

    def text_bytes(self, token: int, *, special: bool) -> bytes | None:
        assert self.table is not None
        found = self.table.bytes_of[token] if 0 <= token < len(self.table.bytes_of) else None
        if found is None:
            self.token(token)
        return None if token in self.special_ids and not special else found

    def _name(self, token: int | None) -> str | None:
        return None if token is None or not 0 <= token < len(self._names) else self._names[token]

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} tokens, bos={self.bos}, eos={self.eos})"


def _prefix(backend: Backend) -> list[int]:
    """What the post-processor puts before a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    extra = len(full) - len(plain)
    return next((list(full[:n]) for n in range(extra, 0, -1) if full[n : n + len(plain)] == plain), [])


def _lone_surrogate(text: str) -> str | None:
    bad = next(((i, c) for i, c in enumerate(text) if 0xD800 <= ord(c) <= 0xDFFF), None)
    return None if bad is None else f"U+{ord(bad[1]):04X} at character {bad[0]}"
