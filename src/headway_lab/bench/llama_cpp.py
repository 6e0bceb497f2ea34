"""llama.cpp as a peer, through llama-cpp-python: decoding steps and prefill of a GGUF file.

Legend: B batch, V vocab.
"""

import ctypes
import importlib
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from headway_lab.bench.inputs import UnsupportedCase

NAME = "llama.cpp"
FURTHER = 2048
"""Tokens per row reserved for the steps of a model with recurrent states, which cannot be rolled back."""
_called_by_c: list[Any] = []


@cache
def llama_cpp() -> Any:
    """Returns the bindings, with their log silenced. Raises UnsupportedCase if they are not installed."""
    try:
        package = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise UnsupportedCase(
            "llama-cpp-python is not installed; to build it for this processor: "
            'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python "headway[peers]"'
        ) from error
    _called_by_c.append(package.llama_log_callback(lambda level, text, data: None))
    package.llama_log_set(_called_by_c[0], ctypes.c_void_p(0))
    package.llama_backend_init()
    return package


def system_info() -> str:
    """Returns the instruction sets that llama.cpp reports it was built with."""
    text: str = llama_cpp().llama_print_system_info().decode()
    return text.strip()


class LlamaCpp:
    """One model in llama.cpp, with room for `rows` sequences of `context` tokens, and as many threads as torch has.

    Everything else is llama.cpp's default: weights memory-mapped and, if it has faster packed forms, packed; keys and
    values in fp16; flash attention if it so chooses; prompts in chunks of 512 tokens.

    Raises UnsupportedCase if the bindings are not installed or it refuses the file."""

    def __init__(self, path: Path, rows: int, context: int) -> None:
        c = self._c = llama_cpp()
        self.rows, self.vocab = rows, 0
        settings = c.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = c.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise UnsupportedCase(f"it cannot load {path.name}")
        self.vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        self._forgets = not (c.llama_model_is_recurrent(self._model) or c.llama_model_is_hybrid(self._model))
        context += 0 if self._forgets else FURTHER
        shape = c.llama_context_default_params()
        shape.n_ctx, shape.n_seq_max, shape.n_batch = rows * context, rows, max(context, rows)
        shape.n_threads = shape.n_threads_batch = torch.get_num_threads()
        self._context = c.llama_init_from_model(self._model, shape)
        if not self._context:
            raise UnsupportedCase(f"it cannot create a context of {rows} rows of {context} tokens")
        self._memory = c.llama_get_memory(self._context)
        self._batch = c.llama_batch_init(max(context, rows), 0, 1)
        self._past = 0
        weakref.finalize(self, _free, c, self._batch, self._context, self._model)

    def read(self, ids: Sequence[int], *, every: bool = False) -> Tensor:
        """Reads a prompt into the first row, after clearing all rows; returns the logits [1, V] after the last token,
        or [T, V] after every token if `every`."""
        self._c.llama_memory_clear(self._memory, True)
        last = len(ids) - 1
        self._fill([(token, position, 0, every or position == last) for position, token in enumerate(ids)])
        self._past = len(ids)
        return self._logits(len(ids) if every else 1)

    def spread(self) -> None:
        """Copies the cache of the first row to every row."""
        for row in range(1, self.rows):
            self._c.llama_memory_seq_cp(self._memory, 0, row, -1, -1)

    def step(self, token: int) -> Tensor:
        """Returns the logits [B, V] after appending this token to every row; it is removed again, except from recurrent
        states, which cannot be rolled back: there the next step is one token further."""
        self._fill([(token, self._past, row, True) for row in range(self.rows)])
        logits = self._logits(self.rows)
        self._past += not self._forgets
        for row in range(self.rows if self._forgets else 0):
            self._c.llama_memory_seq_rm(self._memory, row, self._past, -1)
        return logits

    def _fill(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """Computes the tokens, each as (id, position, row, whether its logits are needed)."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, row, needed) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, row, needed
        if code := self._c.llama_decode(self._context, batch):
            raise UnsupportedCase(f"llama_decode failed with code {code}")

    def _logits(self, count: int) -> Tensor:
        pointer = self._c.llama_get_logits(self._context)
        return torch.from_numpy(numpy.ctypeslib.as_array(pointer, (count, self.vocab)).copy())


def _free(c: Any, batch: Any, context: Any, model: Any) -> None:
    """Frees the memory of a model after its last reference is gone."""
    c.llama_batch_free(batch)
    c.llama_free(context)
    c.llama_model_free(model)
