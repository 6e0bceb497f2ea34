"""Keys, values and states of all layers of a model in pages, for sequences that come and go.

    table = cache.open(ids)                               a sequence, as much of it as is stored already
    tokens = cache.begin([(table, ids), ...])             the next tokens of sequences, as documents of a packed row
    model(..., tokens=tokens, cache=cache)                every layer stores its keys, and returns what to attend to
    cache.end()

Legend: T tokens of the step, N keys, R sequences of the step, K kv heads, S slots, D per key, E per value.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headway.attention import KeyValues
from headway.cache.choose import choose_cache
from headway.cache.page_table import PAGE, Copy, PageClass, PageTable
from headway.cache.paged_step import Chunk, PagedStep, stored_keys
from headway.cache.pages import PagePool
from headway.cache.spec import CacheSpec, StateSpec
from headway.errors import CacheError
from headway.patterns import Pattern, Retention
from headway.tokens import Tokens


class LayerCache:
    """The cache of a layer: in `tensors` a page is `size` places of axis `axis`. `beside`: that of a parallel mixer."""

    axis, size = 0, 1
    beside: "LayerCache | None" = None

    def __init__(self, cache: "PagedCache", of: int, spec: CacheSpec) -> None:
        self.cache, self.of, self.spec = cache, of, spec
        self.tensors = self.empty(0)

    def empty(self, pages: int) -> tuple[Tensor, ...]:
        """Returns tensors for this many empty pages; none for a layer that stores nothing itself."""
        return ()

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return sum(t.nbytes for t in self.empty(1))

    def grow(self, pages: int) -> None:
        """Makes room for this many pages."""
        with torch.inference_mode(False):
            new = self.empty(pages)
            for old, enlarged in zip(self.tensors, new, strict=True):
                enlarged.narrow(self.axis, 0, old.shape[self.axis]).copy_(old)
        self.tensors = new

    def copy(self, old: Tensor, new: Tensor) -> None:
        """Copies pages `old` to pages `new`."""
        for pages in self._by_page():
            pages.index_copy_(self.axis, new, pages.index_select(self.axis, old))

    def take(self, pages: Tensor) -> None:
        """Keeps these pages alone, as pages 0, 1, ..."""
        with torch.inference_mode(False):
            self.tensors = tuple(
                t.index_select(self.axis, pages).flatten(self.axis, self.axis + 1) for t in self._by_page()
            )

    def _by_page(self) -> list[Tensor]:
        return [t.unflatten(self.axis, (t.shape[self.axis] // self.size, self.size)) for t in self.tensors]


class PagedLayer(LayerCache):
    """The keys and values of one layer: k [1, K, S, D] and v [1, K, S, E], page p in slots 64 p .. 64 p + 63; in int8
    also their scales, float32 [1, K, S] (`headway.quantization`). `dtype` is that of the stored tensors."""

    axis, size = 2, PAGE

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    def empty(self, pages: int) -> tuple[Tensor, ...]:
        """Returns uninitialized tensors: on a CPU, untouched memory takes no space."""
        spec, device = self.spec, self.spec.device
        shape = 1, spec.kv_heads, pages * PAGE
        k, v = (
            torch.empty(*shape, n, dtype=spec.dtype, device=device) for n in (spec.head_dim, spec.value_size)
        )
        scales = [torch.empty(shape, device=device) for _ in "kv"] if spec.dtype == torch.int8 else []
        return (k, v, *scales)

    def update(self, k: Tensor, v: Tensor, tokens: Tokens) -> KeyValues:
        """Stores keys [1, K, T, D] and values [1, K, T, E] of the step's tokens, and returns what their queries attend
        to. Raises CacheError for tokens that are not those of `PagedCache.begin`."""
        step = self.cache.step_of(tokens)
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise no_gradient("keys or values")
        fresh = KeyValues(k, v, tokens)
        stored = fresh.quantized() if self.dtype == torch.int8 else fresh
        for buffer, new in zip(self.tensors, stored.tensors, strict=True):
            buffer[:, :, step.runs[self.of]] = new.to(buffer.dtype)
        if step.is_fresh and stored is fresh:
            return fresh if len(step.tables) == 1 else replace(fresh, slots=step.in_place)
        return stored_keys(self.tensors, step.places(self.of))


class PagedStates(LayerCache):
    """The states that one layer stores in place of keys and values, one sequence's state in each page: `StateSpec`."""

    def __init__(self, cache: "PagedCache", of: int, spec: CacheSpec, state: StateSpec) -> None:
        self.state = state
        super().__init__(cache, of, spec)

    def empty(self, pages: int) -> tuple[Tensor, ...]:
        """Returns the initial states, zeros."""
        return tuple(
            torch.zeros(pages, *shape, dtype=dtype, device=self.spec.device)
            for shape, dtype in self.state.tensors
        )

    def read(self) -> list[Tensor]:
        """Returns the states of the step's sequences before it, each [R, ...], in their order (`PagedStep.rows`)."""
        step = self.cache.step
        assert step is not None
        states = [t[step.states[self.of]] for t in self.tensors]
        begun = torch.tensor([start > 0 for start in step.starts], device=self.cache.device)
        if begun.all():
            return states
        # a new sequence starts from zeros: its page may hold the state of an earlier one
        return [t.where(begun.view(-1, *[1] * (t.dim() - 1)), 0) for t in states]

    def write(self, states: Sequence[Tensor]) -> None:
        """Stores the states after the step."""
        step = self.cache.step
        assert step is not None
        if torch.is_grad_enabled() and any(state.requires_grad for state in states):
            raise no_gradient("states")
        for buffer, new in zip(self.tensors, states, strict=True):
            buffer[step.states[self.of]] = new.to(buffer.dtype)


class PagedCache:
    """The cache of sequences that come and go, in all layers of a decoder.

    Args:
        spec: one for all layers, or one per layer, on one device and in one dtype; None for a layer that attends to
            another layer's keys.
        patterns: those of the layers. Layers whose patterns retain the same tokens share page tables.
        states: for each layer its state, None if it keeps keys and values; unless given, all do.
        budget, keep: as in `PagePool`; without either nothing is kept.
        slack: number of tokens that can always be trimmed.

    Raises CacheError for a pattern that is not causal, and for torch.int8 if no layer keeps keys.
    """

    batch = 1

    def __init__(
        self,
        spec: CacheSpec | Sequence[CacheSpec | None],
        patterns: Sequence[Pattern],
        states: Sequence[StateSpec | None] | None = None,
        *,
        budget: int | None = None,
        keep: int | None = None,
        slack: int = 0,
    ) -> None:
        specs = [spec] * len(patterns) if isinstance(spec, CacheSpec) else list(spec)
        first = next(layer_spec for layer_spec in specs if layer_spec is not None)
        dtype = first.dtype
        self.device = torch.zeros(0, device=first.device).device
        for pattern in patterns:
            choose_cache(pattern)
        each: list[StateSpec | None] = [None] * len(patterns) if states is None else list(states)
        if all(each) and not dtype.is_floating_point:
            raise CacheError(
                f"PagedCache: dtype {dtype} is for keys and values, but all layers keep states, in float32 or float64; "
                'give a floating-point dtype (kv_cache_dtype="auto")'
            )
        retentions = [p.retention if state is None else None for p, state in zip(patterns, each, strict=True)]
        classes = list(dict.fromkeys(retentions))
        self.layers: list[LayerCache] = [
            PagedStates(self, of, layer_spec or first, state)
            if state is not None
            else (LayerCache if layer_spec is None else PagedLayer)(self, of, layer_spec or first)
            for of, layer_spec, state in zip(map(classes.index, retentions), specs, each, strict=True)
        ]
        self.pool = PagePool(
            [
                PageClass(
                    retention or Retention(None),
                    sum(layer.page_bytes for layer in self.layers if layer.of == of),
                    state=retention is None,
                    slack=slack,
                )
                for of, retention in enumerate(classes)
            ],
            budget,
            keep=0 if budget is None and keep is None else keep,
        )
        self._capacity = [0] * len(classes)
        self.step: PagedStep | None = None
        self.copied = 0
        """Pages that were copied so far."""

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    # -- sequences -------------------------------------------------------------------------------------

    def open(self, ids: Sequence[int] = (), root: Hashable = ()) -> PageTable:
        """Opens a sequence; see `PagePool.open`."""
        return self.pool.open(ids, root)

    def shrink(self) -> None:
        """Frees memory if no sequence is open and more than twice what is to be kept is allocated."""
        pool = self.pool
        allocated = sum(kind.nbytes * count for kind, count in zip(pool.classes, self._capacity, strict=True))
        bound = pool.budget if pool.keep is None else 2 * pool.keep
        if pool.held <= pool.idle and bound is not None and allocated > bound:
            self.compact()

    def compact(self) -> None:
        """Shrinks to the kept pages, in order of last use. Raises CacheError while a page is in use."""
        numbers = self.pool.compact()
        for layer in self.layers:
            layer.take(torch.tensor(numbers[layer.of], dtype=torch.int64, device=self.device))
        self._capacity = [len(pages) for pages in numbers]

    def put(self, tensors: Sequence[Sequence[Tensor]], counts: Sequence[int]) -> None:
        """Sets the tensors of all layers; `counts` are their pages of each class."""
        for layer, new in zip(self.layers, tensors, strict=True):
            layer.tensors = tuple(new)
        self._capacity = list(counts)

    # -- steps -----------------------------------------------------------------------------------------

    def begin(self, chunks: Sequence[Chunk]) -> Tokens:
        """Begins a step in which each of these sequences continues with one id or more, and returns its tokens [1, T]:
        documents 0, 1, ... of one packed row. Raises CacheError, and changes nothing, if there is no room."""
        available = self.pool.available
        if (
            available is not None
            and (missing := sum(self.pool.missing(t, len(ids)) for t, ids in chunks)) > available
        ):
            raise CacheError(
                f"PagedCache: a step of {len(chunks)} texts takes {missing} bytes of pages, but {available} of "
                f"{self.pool.budget} are left; close some of the texts, or give a larger budget"
            )
        self.copy([copy for table, ids in chunks for copy in self.pool.extend(table, ids)])
        with torch.inference_mode(False):  # results for such tokens are cached (`TokensMemo`)
            self.step = PagedStep(self.pool.classes, self.device, chunks)
        for of in range(len(self._capacity)):
            self._grow(of, self.pool.taken(of))
        return self.step.tokens

    def end(self) -> None:
        """Ends the computed step: later sequences with the same prefix can find what it stored."""
        assert self.step is not None, "begin() comes before end()"
        for table in self.step.tables:
            self.pool.settle(table)
        if self.pool.has_states:
            for table in self.step.tables:  # one by one: an evicted page may be taken by the next
                self.copy(self.pool.snapshot(table))
        self.step = None

    def step_of(self, tokens: Tokens) -> PagedStep:
        """Returns the step whose tokens these are. Raises CacheError if there is none."""
        if self.step is None or self.step.tokens is not tokens:
            raise CacheError("PagedCache: pass the model the tokens that the last begin() returned")
        return self.step

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies pages in every layer of their class, all at once, since a copied page may also be a target."""
        for of in {copy.of for copy in copies}:
            pairs = [(copy.old, copy.new) for copy in copies if copy.of == of]
            self._grow(of, 1 + max(new for _, new in pairs))
            old, new = torch.tensor(pairs, device=self.device).T
            for layer in self.layers:
                if layer.of == of:
                    layer.copy(old, new)
        self.copied += len(copies)

    def _grow(self, of: int, pages: int) -> None:
        """Makes room for this many pages of a class, at least doubling it if there is too little."""
        if pages > self._capacity[of]:
            self._capacity[of] = max(pages, 2 * self._capacity[of])
            for layer in self.layers:
                if layer.of == of:
                    layer.grow(self._capacity[of])


def no_gradient(what: str) -> CacheError:
    return CacheError(
        f"PagedCache: {what} require a gradient, and a cache holds none: decode under torch.no_grad() or "
        "torch.inference_mode(), or train without a cache"
    )
