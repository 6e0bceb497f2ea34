"""A decoding step as one call of the native kernels: what `Decoder` computes for the next tokens of several sequences.

The model is lowered once (`headway.models.lowering`), and its operations are bound to a cache. A step takes token ids,
appends their keys and values to the cache, and returns logits; no thread waits for Python between its first product
and its last.

Legend: T new tokens, M width, V vocab.
"""

import ctypes
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache as cached

import torch
from torch import Tensor

from headway.cache import PagedCache, PagedLayer, PagedStates, PageTable
from headway.cache.paged_cache import LayerCache
from headway.choice import Choice
from headway.errors import BackendError
from headway.models.decoder import Decoder
from headway.models.encoder_decoder import EncoderDecoder
from headway.models.lowered_states import PagedTexts, Stated
from headway.models.lowering import Attends, Lowered
from headway.models.operations import NotLowered
from headway.models.paged_past import PagedPast
from headway.native import interface as c
from headway.native.linear import MOST_ROWS
from headway.native.loader import library, threads
from headway.nn import linears
from headway.nn.scale import capped
from headway.nn.weights import Plain
from headway.processor import cpu_flags
from headway.tokens import Tokens

BEFORE_TILES, MODULES_COST = 8, 100_000_000
"""Limits of a step on CPUs with tile registers (AMX), where torch multiplies unquantized bf16 weights faster than
these kernels from more than 8 rows on: 2.3 times as fast for 16 rows, 3.8 times for 64. MODULES_COST is the
overhead of modules per layer, besides products, in multiply-adds (docs/log.md, 2026-11-29)."""


class DecodeStep:
    """Decoding steps of one model with one cache, which run up to 64 tokens per native call.

    Args:
        cache: the KV cache of the sequences.
        sources: for an encoder-decoder, the cache of cross-attention keys and values.
        exact: whether keys in a common prefix are read separately for each row, so that no row's result depends on the
            other rows.

    Attributes:
        most_rows: the largest number of tokens for which a step is faster than modules.

    Raises NotLowered with the reason if the kernels do not support the model or the cache.
    """

    def __init__(
        self,
        model: Decoder | EncoderDecoder,
        cache: PagedCache,
        sources: PagedCache | None = None,
        exact: bool = False,
    ) -> None:
        self.cache, self.lowered = cache, Lowered(model)
        self.stack, self.cap = model.stack, model.spec.logit_cap
        self.most_rows = _most_rows(model, self.lowered.dtype)
        self._pasts: dict[tuple[object, ...], PagedPast] = {}
        self._sources: dict[tuple[object, ...], PagedPast] = {}
        self._states: dict[int, PagedTexts] = {}
        for attends, layer in zip(self.lowered.attention, cache.layers, strict=True):
            if isinstance(attends, Stated):
                assert isinstance(layer, PagedStates)
                self._states.setdefault(layer.of, PagedTexts()).bind(attends, layer)
                continue
            self._bind(self._pasts, attends, layer, exact)
        for attends, layer in zip(
            self.lowered.across, () if sources is None else sources.layers, strict=True
        ):
            self._bind(self._sources, attends, layer, exact)

    def _bind(
        self, pasts: dict[tuple[object, ...], PagedPast], attends: Attends, layer: LayerCache, exact: bool
    ) -> None:
        """Binds a layer to its pages; layers with equal attention share one call."""
        assert isinstance(layer, PagedLayer)
        if layer.dtype not in (self.lowered.dtype, torch.int8):
            raise NotLowered("the kernels write keys and values in the dtype of the weights, or in int8")
        shared = layer.of, *attends.kind
        if shared not in pasts:
            pasts[shared] = PagedPast(attends, layer, exact)
        pasts[shared].bind(attends, layer, self.lowered.ops[attends.op])

    @torch.inference_mode()
    def read(
        self,
        ids: Tensor,
        tokens: Tokens,
        wanted: Sequence[int],
        sources: Sequence[PageTable] = (),
        adapters: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Returns logits [N, V] of the tokens that follow the tokens `wanted`, in their order.

        Args:
            ids: [1, T] of the tokens of a step of a `PagedCache`; they are read 64 at a time.
            wanted: indices, from 0, of the tokens whose next-token logits are computed.
            sources: for each token, the page table of its sequence's source.
            adapters: for each adapter, the mask of tokens that it applies to; all tokens if absent
                (`headway.nn.lora.only_rows`).
        """
        lowered, logits = self.lowered, []
        for rows, slice_tokens in self._slices(tokens):
            at = [i - rows.start for i in wanted if rows.start <= i < rows.stop]
            lowered.add_adapters({name: added[rows] for name, added in (adapters or {}).items()})
            self._place(tokens, rows, sources)
            logits.append(self._run(self.stack.embed(ids[:, rows], slice_tokens), slice_tokens, at))
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    @torch.inference_mode()
    def states(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Returns the output [1, T, M] of the last block, before the last norm, for embeddings x [1, T, M] of the
        tokens of a step of a `PagedCache`."""
        states = []
        for rows, slice_tokens in self._slices(tokens):
            self._place(tokens, rows)
            self._run(x[:, rows], slice_tokens, [])
            states.append(self.lowered.x[: slice_tokens.count].clone())
        return torch.cat(states).unsqueeze(0)

    @staticmethod
    def _slices(tokens: Tokens) -> Iterator[tuple[slice, Tokens]]:
        """Yields the tokens of a step in slices of up to 64."""
        if tokens.count <= MOST_ROWS:
            yield slice(0, tokens.count), tokens
            return
        for first in range(0, tokens.count, MOST_ROWS):
            rows = slice(first, min(first + MOST_ROWS, tokens.count))
            yield rows, tokens.slice(rows.start, rows.stop)

    def _place(self, tokens: Tokens, rows: slice, sources: Sequence[PageTable] = ()) -> None:
        """Sets where these tokens of a step store their keys and values, and which keys they attend to."""
        step, index = self.cache.step_of(tokens), tokens.index[0, rows]
        tables = [table for table, n in zip(step.tables, step.counts, strict=True) for _ in range(n)][rows]
        for past in self._pasts.values():
            past.slots[: len(tables)] = step.writes[past.of][rows]
            past.place(tables, index)
        for states in self._states.values():
            states.place(tables, index)
        if self._sources:
            last = torch.tensor([len(table) - 1 for table in sources[rows]])
            for source in self._sources.values():
                source.place(sources[rows], last)

    def _run(self, x: Tensor, tokens: Tokens, at: Sequence[int]) -> Tensor:
        """Runs the operations on embeddings [1, T, M]; returns the logits of rows `at`. The last operation, which
        computes logits, runs on these rows only: chunks of prompts need few logits."""
        lowered, count, last = self.lowered, tokens.count, len(self.lowered.ops) - 1
        lowered.resize(count)
        lowered.x[:count] = x[0]
        for rotated in lowered.rotations.values():
            rotated.turn(tokens)
        if at == [*range(count)]:
            self._call(0, last + 1)
        else:
            self._call(0, last)
            if at:  # rows [0, 5, 17] are moved to rows 0, 1, 2
                lowered.x[: len(at)] = lowered.x[at]
                lowered.resize(len(at))
                self._call(last, 1)
        return capped(lowered.logits[: len(at)].clone(), self.cap)

    def _call(self, first: int, count: int) -> None:
        """Runs `count` operations of the list, starting with operation `first`."""
        ops = ctypes.byref(self.lowered.ops, first * ctypes.sizeof(c.OpStruct))
        kernel = library()
        assert kernel is not None
        if code := kernel.dll.headway_step(ops, ctypes.c_int64(count), ctypes.c_int64(threads())):
            raise BackendError(f"a native step of decoding failed: {c.ERRORS.get(code, code)}")


def _most_rows(model: Decoder | EncoderDecoder, dtype: torch.dtype) -> int:
    """Returns the largest number of tokens for which steps are faster than modules: fewer than 64 only for plain
    bf16 weights on CPUs with AMX, if all layers have softmax attention and no experts."""
    spec, layers = model.spec, linears(model).values()
    usual = len(spec.softmax_layers) == spec.layers and not any(spec.experts)
    if not usual or dtype is not torch.bfloat16 or "amx_bf16" not in cpu_flags():
        return MOST_ROWS
    if not all(isinstance(layer.kept, Plain) for layer in layers):
        return MOST_ROWS
    of_layer = sum(layer.matrix.numel() for layer in layers) // spec.layers
    return min(max(BEFORE_TILES, MODULES_COST // of_layer), MOST_ROWS)


def choose_step(
    model: Decoder | EncoderDecoder,
    cache: PagedCache,
    sources: PagedCache | None = None,
    exact: bool = False,
) -> tuple[DecodeStep | None, Choice]:
    """Returns native decoding steps, or None if the kernels do not support the model; and the choice, "native" or
    "modules", with its reason."""
    try:
        step = DecodeStep(model, cache, sources, exact)
    except NotLowered as reason:
        return None, Choice("modules", str(reason))
    why = "a step is one call of the kernels"
    if not exact and step.most_rows < MOST_ROWS:
        why += f", of up to {step.most_rows} tokens; modules read more, whose products have tile registers"
    return step, Choice("native", why)


@cached
def say_once(reason: str) -> None:
    """Logs why decoding runs by modules; each reason once per process."""
    logging.getLogger(__name__).warning("decoding by modules, not by native steps: %s", reason)
