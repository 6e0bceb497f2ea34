"""A step of decoding as one call of the native kernels: what `Decoder` computes of the next tokens of each sequence.

The model is lowered once (`headway.models.lowering`), and its operations are bound to a cache. A step is given ids,
adds their keys and values to the cache, and returns logits; between its first product and its last no thread waits for
Python.

Legend: B sequences, T new tokens of each, M width, V vocab, R rows, of which the first B T are in use.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from functools import cache as cached

import torch
from torch import Tensor

from headway.attention import KeyValues
from headway.attention.backends.native import kernels
from headway.attention.call import validate
from headway.cache import DecoderCache, KVCache, PagedCache, PagedLayer, PagedStates, PageTable
from headway.cache.table import Placement
from headway.choice import Choice
from headway.errors import BackendError
from headway.models.decoder import Decoder
from headway.models.encoder_decoder import EncoderDecoder
from headway.models.lowering import Attends, Lowered
from headway.models.operations import NotLowered
from headway.models.paged_past import PagedPast, PagedSource
from headway.models.summed import PagedSums, Summed
from headway.native import interface as c
from headway.native.linear import MOST_ROWS
from headway.native.loader import library, threads
from headway.tokens import Tokens


class DecodeStep:
    """Steps of one model with one cache, of up to 64 rows.

    Args:
        cache: what is kept of the texts.
        sources: keys and values of their sources, of an encoder-decoder.
        exact: what rows have in common is read for each of them, so that none depends on others.

    Raises NotLowered with the reason where the kernels cannot take them."""

    def __init__(
        self,
        model: Decoder | EncoderDecoder,
        cache: DecoderCache | PagedCache,
        sources: PagedCache | None = None,
        exact: bool = False,
    ) -> None:
        self.cache, self.lowered = cache, Lowered(model)
        self.stack = model.decoder if isinstance(model, EncoderDecoder) else model.model
        self._pasts: dict[tuple[object, ...], Past | PagedPast] = {}
        self._sums: dict[int, PagedSums] = {}
        self._sources: dict[tuple[object, ...], PagedSource] = {}
        for attends, layer in zip(self.lowered.attention, cache.layers, strict=True):
            if isinstance(attends, Summed):
                if not isinstance(layer, PagedStates):
                    raise NotLowered("the kernels add to sums in pages alone")
                self._sums.setdefault(layer.of, PagedSums()).bind(attends, layer)
                continue
            is_paged = isinstance(layer, PagedLayer)
            kept = {self.lowered.dtype, torch.int8} if is_paged else {self.lowered.dtype}
            if not isinstance(layer, KVCache | PagedLayer) or layer.dtype not in kept:
                raise NotLowered(
                    "the kernels write keys and values in the type of the weights, or pages in 8 bits"
                )
            store = layer.of if isinstance(layer, PagedLayer) else id(layer.table)
            shared = store, *_sharing(attends)
            if shared not in self._pasts:
                self._pasts[shared] = PagedPast(attends, layer.dtype, exact) if is_paged else Past(attends)
            self._pasts[shared].bind(attends, layer, self.lowered.ops[attends.op])  # type: ignore[arg-type]
        for attends, layer in zip(
            self.lowered.across, () if sources is None else sources.layers, strict=True
        ):
            assert isinstance(layer, PagedLayer)
            source = self._sources.setdefault(_sharing(attends), PagedSource(attends, layer.dtype, exact))
            source.bind(attends, layer, self.lowered.ops[attends.op])

    def unfit_reason(self, batch: int, count: int) -> str | None:
        """Why a step cannot read `count` tokens of each sequence: they are more than 64 rows, or the cache forgets
        something that the first of them sees when it takes the last. None if it can."""
        if batch * count > MOST_ROWS:
            return f"the kernels take steps of up to {MOST_ROWS} rows"
        for past in self._pasts.values():
            if not isinstance(past, Past):
                continue
            policy = past.cache.table.policy
            if count > 1 and policy.retention.reach is not None and count - 1 > policy.slack:
                return "tokens that are read together push out keys that the first of them sees"
        return None

    @torch.inference_mode()
    def __call__(self, ids: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Ids [B, T] of the next tokens; logits [B, T, V] of those after each, valid until the next step.

        lengths: how many of the T are tokens, for each sequence; all unless given. What the logits of the others are is
            not said."""
        batch, count = ids.shape
        assert isinstance(self.cache, DecoderCache)
        tokens = self.cache.next_tokens(count, lengths)
        self._place(tokens, batch)
        self._run(self.stack.embed(ids, tokens), tokens, len(self.lowered.ops))
        return self.lowered.logits[: batch * count].view(batch, count, -1)

    @torch.inference_mode()
    def read(
        self,
        ids: Tensor,
        tokens: Tokens,
        wanted: Sequence[int],
        sources: Sequence[PageTable] = (),
        adapters: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Ids [1, T] of the tokens of a step of a `PagedCache`, 64 of which are read at a time; logits [N, V] of what
        follows the wanted ones, which are numbered from 0, in their order. `sources`: of each token, that of its text.
        `adapters`: which tokens they are added to, all unless given (`headway.nn.lora.only_rows`)."""
        lowered, made = self.lowered, []
        for first in range(0, tokens.count, MOST_ROWS):
            rows = slice(first, min(first + MOST_ROWS, tokens.count))
            at = [i - first for i in wanted if rows.start <= i < rows.stop]
            lowered.add_adapters({name: added[rows] for name, added in (adapters or {}).items()})
            for past in (*self._pasts.values(), *self._sums.values()):
                assert not isinstance(past, Past)
                past.place(tokens, rows)
            for source in self._sources.values():
                source.place(sources[rows])
            some = tokens if tokens.count <= MOST_ROWS else tokens.slice(rows.start, rows.stop)
            self._run(self.stack.embed(ids[:, rows], some), some, len(lowered.ops) - (not at))
            made.append(lowered.logits[at])
        return made[0] if len(made) == 1 else torch.cat(made)

    @torch.inference_mode()
    def states(self, x: Tensor) -> Tensor:
        """Embeddings [B, T, M] of the next tokens; what the last block makes of them, before the last norm."""
        assert isinstance(self.cache, DecoderCache)
        tokens = self.cache.next_tokens(x.shape[1])
        self._place(tokens, len(x))
        self._run(x, tokens, len(self.lowered.ops) - 1)
        return self.lowered.x[: x.shape[0] * x.shape[1]].view(x.shape).clone()

    def _place(self, tokens: Tokens, batch: int) -> None:
        self.lowered.resize(batch, tokens.count)
        for past in self._pasts.values():
            assert isinstance(past, Past)
            past.place(tokens, batch)

    def _run(self, x: Tensor, tokens: Tokens, ops: int) -> None:
        batch, count, _ = x.shape
        lowered = self.lowered
        lowered.resize(batch, count)
        lowered.x[: batch * count].view(x.shape).copy_(x)
        for rotated in lowered.rotations.values():
            rotated.turn(tokens, batch)
        kernel = library()
        assert kernel is not None
        if code := kernel.dll.headway_step(lowered.ops, ctypes.c_int64(ops), ctypes.c_int64(threads())):
            raise BackendError(f"a native step of decoding failed: {c.ERRORS.get(code, code)}")


def _sharing(attends: Attends) -> tuple[object, ...]:
    """What layers that share a call have alike."""
    return attends.mixer, attends.q.data_ptr(), *map(id, attends.scores)


def choose_step(
    model: Decoder | EncoderDecoder,
    cache: DecoderCache | PagedCache,
    sources: PagedCache | None = None,
    exact: bool = False,
) -> tuple[DecodeStep | None, Choice]:
    """Steps as native calls where the kernels take them; and what computes steps, "native" calls or "modules"."""
    try:
        return DecodeStep(model, cache, sources, exact), Choice("native", "a step is one call of the kernels")
    except NotLowered as reason:
        return None, Choice("modules", str(reason))


@cached
def say_once(reason: str) -> None:
    """Tell a process once why it decodes by modules."""
    logging.getLogger(__name__).warning("decoding by modules, not by native steps: %s", reason)


class Past:
    """What layers of one pattern and one table of slots share: the slots of the new tokens, int64 [R], -1 for those
    that are not stored, and the call."""

    def __init__(self, attends: Attends) -> None:
        self.attends = attends
        self.slots = torch.zeros(MOST_ROWS, dtype=torch.int64)
        self.call = c.CallStruct()
        self._layers: list[tuple[KVCache, c.HeadsStruct, c.OpStruct]] = []
        self._arguments: kernels.Arguments | None = None  # what the call points to

    @property
    def cache(self) -> KVCache:
        """That of its first layer."""
        return self._layers[0][0]

    def bind(self, attends: Attends, cache: KVCache, op: c.OpStruct) -> None:
        """A layer's heads go to its cache, and its operation attends to that."""
        attends.heads.slots, op.of = self.slots.data_ptr(), ctypes.addressof(self.call)
        self._layers.append((cache, attends.heads, op))

    def place(self, tokens: Tokens, batch: int) -> None:
        """Numbers the slots of the new tokens, and describes what their queries see."""
        placement, *_ = [cache.place(tokens) for cache, _, _ in self._layers]
        assert placement.past is None  # by `unfit_reason`, nothing that they see is forgotten
        slots = self.slots[: batch * tokens.count].view(batch, tokens.count)
        _write_slots(slots, placement)
        for cache, heads, op in self._layers:
            k, v = cache.tensors
            places = k.data_ptr(), v.data_ptr(), k.stride(1), v.stride(1)
            if (op.k, op.v, heads.k_cache.head, heads.v_cache.head) != places:
                heads.k_cache, heads.v_cache = c.TensorStruct.of(k), c.TensorStruct.of(v)
                op.k, op.v = k.data_ptr(), v.data_ptr()
        self._arguments = self._see(placement, batch, k, v)
        ctypes.memmove(
            ctypes.addressof(self.call), ctypes.addressof(self._arguments.struct), ctypes.sizeof(self.call)
        )

    def _see(self, placement: Placement, batch: int, k: Tensor, v: Tensor) -> kernels.Arguments:
        layer, mixer, scores, q, out, *_ = self.attends
        tokens, heads, count = placement.chunk.tokens, layer.heads.query_heads, placement.tokens.count
        q, out = (
            t[: batch * tokens.count].view(batch, tokens.count, heads, -1).transpose(1, 2) for t in (q, out)
        )
        keys = KeyValues(k.narrow(2, 0, count), v.narrow(2, 0, count), placement.tokens)
        steps = tuple(step for some in scores for step in some())
        call = validate(q, tokens, [keys], mixer.pattern, None, steps, mixer.scale, 0.0, None)
        arguments = kernels.Arguments(call, 0)
        arguments.struct.out = c.TensorStruct.of(out)
        arguments.struct.lse = self.attends.lse.data_ptr()
        return arguments


def _write_slots(slots: Tensor, placement: Placement) -> None:
    """Slots [B, T] of the tokens of a chunk."""
    slots.fill_(-1)
    for (_, to), taken in placement.writes:
        slots[... if taken is None else taken] = (
            torch.arange(to.start, to.stop) if isinstance(to, slice) else to
        )
