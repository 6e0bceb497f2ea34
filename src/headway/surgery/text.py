"""Held-out text, on which models are measured before and after."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headway.checkpoints import Folder
from headway.data import Rows, TokenFile, encode_corpus
from headway.models import Decoder
from headway.text import Tokenizer
from headway.train.evaluation import Evaluation, evaluate
from headway.train.microbatch_pool import MicrobatchPool


@dataclass(frozen=True)
class Text:
    """Held-out text in a model's own tokens; of these, about the first `limit` are predicted."""

    file: TokenFile
    tokenizer: Tokenizer
    limit: int | None = None

    @staticmethod
    @contextmanager
    def read(
        path: str | Path, folder: Folder, limit: int | None = None, *, framed: bool = True
    ) -> "Iterator[Text]":
        """Text files are encoded by the tokenizer of `folder`, with BOS and EOS around each document if `framed`; a
        .tokens file is opened.

        Raises DataError or CheckpointError for a text or a tokenizer that is not there, or does not fit."""
        tokenizer = Tokenizer.load(folder.path)
        tokenizer.require_fits(folder.spec.vocab)
        with tempfile.TemporaryDirectory() as scratch:
            encoded = Path(path).suffix == ".tokens"
            own = Path(scratch) / "text.tokens"
            file = TokenFile(path) if encoded else encode_corpus(path, tokenizer, own, bos=framed, eos=framed)
            file.require_tokenizer(tokenizer.fingerprint)
            yield Text(file, tokenizer, limit)

    def evaluate(self, model: Decoder, context: int) -> Evaluation:
        """The model's loss in rows of `context` tokens, as `headway eval` measures it."""
        with MicrobatchPool(torch.get_num_threads()) as pool:
            return evaluate(model, Rows(self.file, context), limit=self.limit, pool=pool)

    @property
    def longest_document(self) -> int:
        """In tokens."""
        ends = np.asarray(self.file.ends, dtype=np.int64)
        return int(np.diff(ends, prepend=0).max())
