"""The tokenizer for training, command line and server: text to ids, messages to ids, ids to text."""

import re
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from headway.errors import DataError
from headway.storage.files import atomic_write, json_text
from headway.text import files
from headway.text.chat import ChatTemplate, Message, check_messages
from headway.text.control import ControlTokens
from headway.text.gguf_writing import write
from headway.text.languages import KEYS, check_pair, in_language, language_ids
from headway.text.template import Encoded, Template, fill, roles
from headway.text.tokenizer_config import FLAGS, naming
from headway.text.vocabulary import ROLES, Vocabulary

_SURROGATE = re.compile("[\ud800-\udfff]")
Text = str | tuple[str, str]  # one text, or a pair


class Tokenizer(Vocabulary):
    """A `tokenizers.Tokenizer` with three additional guarantees.

    - BOS is at the beginning exactly once, if the tokenizer begins texts with it.
    - The text of a special token inside a user's text (`"</s>"`) is plain text: it becomes a control token only
      with `special=True`, or if a chat template (not a message) wrote it.
    - Decoding is a homomorphism: decoding token by token gives the same text as decoding all at once.

    `bos`, `eos`, `cls`, `sep`, `mask`, `pad`, `unk` are ids, or None if the tokenizer has no such token. `template`
    holds the tokens that it puts around a text and between two.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos: int | None = None,
        eos: int | None = None,
        special: Mapping[str, int] | None = None,
        begins_with_bos: bool | None = None,
        ends_with_eos: bool | None = None,
        chat_template: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`special`: ids by role (cls, sep, mask, pad, unk); an absent role takes the special token with its usual
        name, if there is one. `begins_with_bos`, `ends_with_eos`: override the post-processor."""
        backend.no_truncation()
        backend.no_padding()
        super().__init__(backend, bos=bos, eos=eos, special={**roles(backend), **(special or {})})
        template = Template.of(backend)
        first = template.prefix[0] if len(template.prefix) == 1 else None
        self.bos = bos if bos is not None or first == self.cls else first
        if begins_with_bos is not None and self.bos is not None:
            template = template.beginning(self.bos, begins_with_bos)
        if ends_with_eos is not None and self.eos is not None:
            template = template.ending(self.eos, ends_with_eos)
        if template != Template.of(backend):
            backend.post_processor = template.processor(backend)  # `save` writes the backend
        self.template = template
        self.begins_with_bos = self.bos is not None and template.prefix[:1] == (self.bos,)
        self.config = dict(config or {})
        self.chat_template = ChatTemplate(chat_template) if chat_template is not None else None

    @staticmethod
    def load(path: str | Path) -> "Tokenizer":
        """Loads a tokenizer from a Hugging Face folder or one file of it: `tokenizer.json`, SentencePiece's
        `tokenizer.model` or `spiece.model`, Llama 3's `tokenizer.model` (tiktoken), llama2.c's `tokenizer.bin`, BERT's
        `vocab.txt`, `vocab.json` with `merges.txt`; or from a GGUF file. Raises DataError, naming the file, for any
        other content.
        """
        file, backend, arguments = files.find(Path(path))
        with naming(file):
            return Tokenizer(backend, **arguments)

    def save(self, folder: str | Path) -> None:
        """Writes `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json` and the chat template, each
        atomically, in the form that `transformers` reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        ids = {f"{role}_token": getattr(self, role) for role in ("bos", "eos", *ROLES)}
        names = {key: self._described(i) for key, i in ids.items() if i is not None}
        typed = {k: {"__type": "AddedToken", **v} if isinstance(v, dict) else v for k, v in names.items()}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config, **typed}
        config.pop("chat_template", None)
        if self.template != Template.of(self.backend):  # `between` changed it
            self.backend.post_processor = self.template.processor(self.backend)
        texts = {
            "tokenizer.json": self.backend.to_str(pretty=True),
            "tokenizer_config.json": json_text(config),
            "special_tokens_map.json": json_text(names),
        }
        if self.chat_template is not None:
            texts["chat_template.jinja"] = self.chat_template.source
        for name, text in texts.items():
            atomic_write(folder / name, text)

    def gguf_metadata(self, rows: int) -> dict[str, Any]:
        """Returns the keys of a GGUF file for a model whose embedding has `rows` rows. Raises DataError for what GGUF
        cannot express."""
        source = None if self.chat_template is None else self.chat_template.source
        return write(self, self.template, source, rows)

    def _described(self, token: int) -> str | dict[str, Any]:
        """Returns a special token's name, or an object if it absorbs a space next to it (RoBERTa's mask)."""
        added = self.backend.get_added_tokens_decoder()[token]
        if not (added.lstrip or added.rstrip):
            return self.token(token)
        return {"content": added.content, **{name: getattr(added, name) for name in FLAGS}}

    def encode(
        self,
        text: str,
        pair: str | None = None,
        *,
        bos: bool = True,
        eos: bool | None = None,
        special: bool = False,
    ) -> list[int]:
        """Returns the ids of `text`, or of `text` and `pair`, within this tokenizer's template.

        `bos`: begin with the template's tokens (BOS, [CLS]), once; False adds nothing before.
        `eos`: end with the template's tokens (EOS, [SEP]); None is as `bos`; False leaves the end open, for a text that
        a model is to continue.
        `special`: whether the text of a special token becomes that token; by default it stays plain text.
        """
        entry = text if pair is None else (text, pair)
        return self.encode_batch([entry], bos=bos, eos=eos, special=special)[0]

    def encode_batch(
        self, texts: Sequence[Text], *, bos: bool = True, eos: bool | None = None, special: bool = False
    ) -> list[list[int]]:
        """Returns `encode` of each text or pair, computed on all cores."""
        rows = []
        for encodings in self._groups(texts, special, offsets=False):
            ids = [list(encoding.ids) for encoding in encodings]
            row: list[int] = []
            for part in self.template.parts(ids, bos=bos, eos=bos if eos is None else eos):
                row += [part.token] if part.token is not None else ids[part.text or 0]
            self._warn_two_bos(ids[0])
            rows.append(row)
        return rows

    def inputs(self, texts: Sequence[Text], *, special: bool = False) -> list[Encoded]:
        """Returns the encoding of each text or pair for a model, with token types and with each token's offsets in its
        text (for answers and tags)."""
        rows = []
        for encodings in self._groups(texts, special, offsets=True):
            rows.append(fill(self.template.parts([e.ids for e in encodings], bos=True, eos=True), encodings))
            self._warn_two_bos(encodings[0].ids)
        return rows

    def _groups(self, texts: Sequence[Text], special: bool, *, offsets: bool) -> Iterator[list[Encoding]]:
        """Returns an iterator over the encodings of each text or pair, without a template."""
        pairs = [text if isinstance(text, tuple) else (text,) for text in texts]
        for i, group in enumerate(pairs):
            for text in group:
                if not isinstance(text, str):
                    raise DataError(f"text {i} must be a str, got {type(text).__name__}")
            if len(group) not in (1, 2):
                raise DataError(f"text {i} must be a str, or a pair of them, got a tuple of {len(group)}")
        backend = self.backend if special else self._plain
        batch = backend.encode_batch if offsets else backend.encode_batch_fast
        flat = [text for group in pairs for text in group]
        try:
            encodings = iter(batch(flat, add_special_tokens=False))
        except (UnicodeEncodeError, TypeError) as error:
            for i, text in ((i, text) for i, group in enumerate(pairs) for text in group):
                if bad := _SURROGATE.search(text):
                    at = f"U+{ord(bad[0]):04X} at character {bad.start()}"
                    raise DataError(
                        f"text {i} has a lone surrogate ({at}), which no UTF-8 text can hold"
                    ) from error
            raise
        return (list(islice(encodings, len(group))) for group in pairs)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Returns the ids of a conversation, through the tokenizer's chat template. Either an answer follows
        (`add_generation_prompt`, the default), or the last message is to be continued (`continue_final_message`): what
        the template writes behind its text is then left out.

        Control tokens come from the template alone: `"</s>"` inside a message stays four characters. BOS is what the
        template writes, and no token straddles the beginning or the end of an answer, so training and generation see
        the same ids. Raises DataError if both options are given, and as `chat_pieces`.
        """
        if continue_final_message and add_generation_prompt:
            raise DataError(
                "chat: add_generation_prompt (an answer follows) and continue_final_message (the last message goes on) "
                "exclude each other; leave one out"
            )
        answers = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        end = secrets.token_hex(8) if continue_final_message else ""
        check_messages(messages)
        last = (
            {**messages[-1], "content": f"{messages[-1].get('content') or ''}{end}"} if end else messages[-1]
        )
        pieces = self.chat_pieces(
            [*messages[:-1], last], add_generation_prompt=answers, strict=False, **variables
        )
        if end:
            before = [*takewhile(lambda piece: end not in piece, pieces)]
            if len(before) == len(pieces):
                raise DataError("chat template: the last message is not in its text, and cannot be continued")
            pieces = [*before, pieces[len(before)].partition(end)[0]]
        return [i for ids in self.encode_pieces(pieces, goes_on=answers or bool(end)) for i in ids]

    def chat_pieces(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        strict: bool = True,
        **variables: Any,
    ) -> list[str]:
        """Returns the text that the chat template writes, split where answers begin and end (`ChatTemplate.pieces`),
        for `encode_pieces`: control tokens inside messages are escaped. Raises DataError without a chat template."""
        if self.chat_template is None:
            raise DataError(
                "this tokenizer has no chat template (neither chat_template.jinja nor chat_template in "
                "tokenizer_config.json): pass a prompt instead of messages, or add a template"
            )
        check_messages(messages)
        names = {"bos_token": self.bos, "eos_token": self.eos}
        tokens = {name: "" if token is None else self.token(token) for name, token in names.items()}
        return self.chat_template.pieces(
            self._shield.cover(list(messages)),
            add_generation_prompt=add_generation_prompt,
            strict=strict,
            **{**tokens, **self._shield.cover(variables)},
        )

    def encode_pieces(self, pieces: Sequence[str], *, goes_on: bool = False) -> list[list[int]]:
        """Returns the ids of each piece of a conversation; `goes_on`: text will follow the last piece."""
        rows = self._shield.encode(pieces, goes_on=goes_on)
        self._warn_two_bos([i for ids in rows[:2] for i in ids])
        return rows

    def escape(self, text: str) -> str:
        """Returns the text as a piece in which everything that looks like a control token is escaped to plain text."""
        return str(self._shield.cover(text))

    def with_chat_template(self, source: str | Path) -> "Tokenizer":
        """Returns the same tokenizer with another chat template: the name of a built-in one
        (`headway.text.chat.BUILT_IN`), Jinja text, or a file of it."""
        tokenizer = copy(self)
        tokenizer.chat_template = ChatTemplate.find(source)
        return tokenizer

    @cached_property
    def languages(self) -> Mapping[str, int]:
        """Ids of the control tokens that name languages (mBART, M2M100, NLLB), by name: "en_XX", "en" for __en__,
        "eng_Latn"."""
        return language_ids({self.token(i): i for i in self.special_ids})

    def between(self, source: str | None = None, target: str | None = None) -> "Tokenizer":
        """Returns the same tokenizer for translation from one language into another; the token of `source` is put
        around texts.

        Languages that are not given are those of the configuration (src_lang, tgt_lang). Raises DataError if one is
        missing there too, or not among `languages`."""
        tokenizer, pairs = copy(self), zip(KEYS, (source, target), strict=True)
        tokenizer.config = {**self.config, **{key: name for key, name in pairs if name is not None}}
        first, _ = check_pair(self.languages, tokenizer.config)
        tokenizer.template = in_language(self.template, self.languages, first)
        return tokenizer

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

    @cached_property
    def _shield(self) -> ControlTokens:
        return ControlTokens(self.backend, {self.token(i): i for i in self.special_ids})

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} tokens, bos={self.bos}, eos={self.eos})"
