"""A step of decoding as one call of the native kernels: what `Decoder` computes for the next tokens of some texts.

The model is lowered once (`headway.models.lowering`), and its operations are bound to a cache. A step is given ids,
adds their keys and values to the cache, and returns logits; between its first product and its last no thread waits for
Python.

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
"""Where torch has tile registers (AMX) it multiplies plain weights in bf16 faster than these steps from more than 8
rows on: 2.3 times as fast for 16, 3.8 times for 64. What modules take beside products is worth so many multiply-adds in
each layer (docs/log.md, 2026-11-29)."""


class DecodeStep:
    """Steps of one model with one cache, of up to 64 tokens at a time.

    Args:
        cache: the past of the texts.
        sources: for an encoder-decoder, keys and values of the sources of the texts.
        exact: keys that rows have in common are read for each row, so that no row depends on others.

    Attributes:
        most_rows: the most tokens of a step; with more, modules are faster.

    Raises NotLowered with the reason where the kernels cannot take them."""

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
        """Binds a layer to its pages; layers that attend alike share one call."""
        assert isinstance(layer, PagedLayer)
        if layer.dtype not in (self.lowered.dtype, torch.int8):
            raise NotLowered("the kernels write keys and values in the type of the weights, or in 8 bits")
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
        """Ids [1, T] of the tokens of a step of a `PagedCache`, read 64 at a time -> logits [N, V] of the tokens that
        follow the `wanted` ones (numbered from 0), in their order. `sources`: for each token the source of its text.
        `adapters`: the tokens that each is added to, all unless given (`headway.nn.lora.only_rows`)."""
        lowered, logits = self.lowered, []
        for rows, some in self._slices(tokens):
            at = [i - rows.start for i in wanted if rows.start <= i < rows.stop]
            lowered.add_adapters({name: added[rows] for name, added in (adapters or {}).items()})
            self._place(tokens, rows, sources)
            logits.append(self._run(self.stack.embed(ids[:, rows], some), some, at))
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    @torch.inference_mode()
    def states(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Embeddings [1, T, M] of the tokens of a step of a `PagedCache` -> the output of the last block, before the
        last norm."""
        states = []
        for rows, some in self._slices(tokens):
            self._place(tokens, rows)
            self._run(x[:, rows], some, [])
            states.append(self.lowered.x[: some.count].clone())
        return torch.cat(states).unsqueeze(0)

    @staticmethod
    def _slices(tokens: Tokens) -> Iterator[tuple[slice, Tokens]]:
        """Yields the tokens of a step, up to 64 at a time."""
        if tokens.count <= MOST_ROWS:
            yield slice(0, tokens.count), tokens
            return
        for first in range(0, tokens.count, MOST_ROWS):
            rows = slice(first, min(first + MOST_ROWS, tokens.count))
            yield rows, tokens.slice(rows.start, rows.stop)

    def _place(self, tokens: Tokens, rows: slice, sources: Sequence[PageTable] = ()) -> None:
        """Sets where some of the tokens of a step are stored, and which keys they see."""
        step, index = self.cache.step_of(tokens), tokens.index[0, rows]
        texts = [table for table, n in zip(step.tables, step.counts, strict=True) for _ in range(n)][rows]
        for past in self._pasts.values():
            past.slots[: len(texts)] = step.writes[past.of][rows]
            past.place(texts, index)
        for states in self._states.values():
            states.place(texts, index)
        if self._sources:
            last = torch.tensor([len(table) - 1 for table in sources[rows]])
            for source in self._sources.values():
                source.place(sources[rows], last)

    def _run(self, x: Tensor, tokens: Tokens, at: Sequence[int]) -> Tensor:
        """Runs the operations on embeddings [1, T, M]; returns logits of the rows `at`. The last operation makes
        logits, and is run for these rows alone: pieces of prompts need few."""
        lowered, count, last = self.lowered, tokens.count, len(self.lowered.ops) - 1
        lowered.resize(count)
        lowered.x[:count] = x[0]
        for rotated in lowered.rotations.values():
            rotated.turn(tokens)
        if at == [*range(count)]:
            self._call(0, last + 1)
        else:
            self._call(0, last)
            if at:  # [0, 1, 17]: they are moved to the front
                lowered.x[: len(at)] = lowered.x[at]
                lowered.resize(len(at))
                self._call(last, 1)
        return capped(lowered.logits[: len(at)].clone(), self.cap)

    def _call(self, first: int, count: int) -> None:
        """Runs `count` operations of the list, from the `first` on."""
        ops = ctypes.byref(self.lowered.ops, first * ctypes.sizeof(c.OpStruct))
        kernel = library()
        assert kernel is not None
        if code := kernel.dll.headway_step(ops, ctypes.c_int64(count), ctypes.c_int64(threads())):
            raise BackendError(f"a native step of decoding failed: {c.ERRORS.get(code, code)}")


def _most_rows(model: Decoder | EncoderDecoder, dtype: torch.dtype) -> int:
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
    """Returns steps as native calls where the kernels take them, else None; and the choice, "native" or "modules"."""
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
    """Logs a reason for decoding by modules, once per process."""
    logging.getLogger(__name__).warning("decoding by modules, not by native steps: %s", reason)
