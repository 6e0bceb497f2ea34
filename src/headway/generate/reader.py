"""A model and the page tables of the sequences that it reads: the next tokens of some sequences in, logits out.

Legend: T tokens of a step, N slots whose logits are wanted, V vocab.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from operator import add

import torch
from torch import Tensor, nn

from headway.attention import KeyValues
from headway.cache import PAGE, PagedCache, PagedLayer, PageTable, StoredText
from headway.cache.paged_step import places, stored_keys
from headway.choice import Choice
from headway.errors import ConfigError, did_you_mean
from headway.models import Decoder, EncoderDecoder
from headway.models.decode_step import DecodeStep, choose_step, say_once
from headway.models.pasts import cache_specs, make_paged_cache
from headway.nn.adapters import beside
from headway.nn.lora import only_rows
from headway.patterns import Causal
from headway.tokens import Tokens

Names = Sequence[str] | None
"""Names of adapters; None is all of them."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model in evaluation mode and disables gradients while open."""
    trained = [part for part in model.modules() if part.training] if model.training else []
    try:
        model.eval() if trained else None
        with torch.inference_mode():
            yield
    finally:
        for part in trained:  # parts that were in evaluation mode stay in it
            part.training = True


class Reader:
    """Reads sequences with a decoder, or the targets of an encoder-decoder.

        logits = reader.read([(table, ids), ...], [slots whose logits are wanted, ...])
        reader.end()

    A step of few tokens is one native call if the kernels support the model: `steps` says whether they do, and why.

    Args:
        model: switched to evaluation mode only during the calls, so that a model can be sampled from during training.
        use_cache: False recomputes every step from the whole sequence.
        kv_dtype: dtype of what the cache stores; the weights' dtype unless given.
        budget, keep, slack: as in `PagedCache`.
        exact: as in `GenerationConfig`.

    Raises ConfigError for a budget if positions depend on the length of a sequence: what it has stored then depends on
    how it reached its length, so that it can be neither preempted nor started from a stored prefix.
    """

    def __init__(
        self,
        model: Decoder | EncoderDecoder,
        *,
        use_cache: bool = True,
        kv_dtype: torch.dtype | None = None,
        budget: int | None = None,
        keep: int | None = None,
        slack: int = 0,
        exact: bool = False,
    ) -> None:
        self.model, self.use_cache, self.exact = model, use_cache, exact
        of_length = any(scheme.length_dependent for scheme in model.spec.layer_positions)
        # stored keys also depend on the source and, with some position schemes, on the length
        self.shares_prefixes = not of_length and isinstance(model, Decoder)
        if budget is not None and of_length:
            raise ConfigError(
                f"budget={budget}: this model's positions depend on the length of the text, so that no text can be "
                "preempted; leave the budget out"
            )
        self.device = model.stack.like.device
        keep = keep if self.shares_prefixes else 0
        self.cache = make_paged_cache(model.stack, budget=budget, keep=keep, slack=slack, dtype=kv_dtype)
        self.sources = Sources(model, exact) if isinstance(model, EncoderDecoder) else None
        self.renew()

    def renew(self) -> None:
        """Rebuilds the step for the adapters that are active now. What is stored stays. Raises ConfigError if the step
        must be exact and cannot be."""
        self.adapters = beside(self.model)
        for name in ("_step", "native", "steps"):
            self.__dict__.pop(name, None)
        if self.exact and self.native is None:
            raise ConfigError(
                "exact: only the decoding kernels are exact, and they cannot compute this: "
                f"{self.steps.why}; leave exact out"
            )

    @cached_property
    def _step(self) -> tuple[DecodeStep | None, Choice]:
        """The native step, and the choice of what computes steps of few tokens; made lazily, since reading prompts
        alone needs neither."""
        if not self.use_cache:
            return None, Choice("modules", "no cache is used")
        memory = None if self.sources is None else self.sources.cache
        native, steps = choose_step(self.model, self.cache, memory, self.exact)
        # other devices have no native steps, and for `exact` the error of `renew` gives the reason
        if native is None and self.device.type == "cpu" and not self.exact:
            say_once(steps.why)
        return native, steps

    @cached_property
    def native(self) -> DecodeStep | None:
        """A step as one call of the kernels; None if they do not support the model."""
        return self._step[0]

    @cached_property
    def steps(self) -> Choice:
        """The choice of what computes steps of few tokens, "native" calls or "modules", with its reason."""
        return self._step[1]

    def read(
        self,
        chunks: Sequence[tuple[PageTable, Sequence[int]]],
        wanted: Sequence[Sequence[int]],
        sources: Sequence[PageTable] = (),
        adapters: Sequence[Names] = (),
    ) -> Tensor:
        """Returns logits [N, V] of the tokens that follow the wanted tokens of each chunk, which are numbered from 0
        within it.

        Each chunk continues its sequence. `sources` are those of the sequences, for an encoder-decoder; `adapters` are
        the names of the adapters to add for each sequence (None: all). `end` settles what was stored. Raises
        CacheError, and changes nothing, if the pages have no room."""
        if self.use_cache:
            tokens, sequences, begins = (
                self.cache.begin(chunks),
                [ids for _, ids in chunks],
                [0] * len(chunks),
            )
        else:  # all tokens of the sequences
            begins = [len(table) for table, _ in chunks]
            for table, new in chunks:
                table.ids += new
            sequences = [table.ids for table, _ in chunks]
            tokens = Tokens.packed([len(sequence) for sequence in sequences], device=self.device)
        lengths = [len(sequence) for sequence in sequences]
        ids = torch.tensor([[i for sequence in sequences for i in sequence]], device=self.device)
        firsts = map(add, accumulate(lengths[:-1], initial=0), begins)
        # chunks of 3 and 2 ids, wanted [[2], [0, 1]]: at [2, 3, 4]
        at = [first + slot for first, slots in zip(firsts, wanted, strict=True) for slot in slots]
        with evaluating(self.model):
            rows = self._rows_of(adapters, lengths)
            native = self.native
            if native is not None and not self.exact and tokens.count > native.most_rows:
                native = None
            if native is not None and not (rows and native.lowered.has_magnitudes):
                of_tokens = [
                    table for table, sequence in zip(sources, sequences, strict=False) for _ in sequence
                ]
                return native.read(ids, tokens, at, of_tokens, rows)
            cache = self.cache if self.use_cache else None
            slots = torch.tensor([at], dtype=torch.int64, device=self.device)
            if isinstance(self.model, Decoder) and not rows:
                logits: Tensor = self.model(ids, tokens=tokens, cache=cache, logits_for=slots)
                return logits[0]
            memory = None if self.sources is None else self.sources.memory(sources)
            needed = None if rows else slots
            with only_rows(rows):  # masks of all tokens, so that every layer computes all of them
                states = self.model.hidden(ids, tokens=tokens, cache=cache, memory=memory, slots=needed)[0]
            return self.model.logits(states[at] if rows else states)

    def _rows_of(self, adapters: Sequence[Names], counts: Sequence[int]) -> dict[str, Tensor]:
        """Returns which of the tokens each adapter is added to, bool [T, 1]; {} if all adapters are added to all
        tokens.

        `counts`: tokens of each sequence."""
        if adapters.count(None) == len(adapters):
            return {}
        of_tokens = [names for names, n in zip(adapters, counts, strict=True) for _ in range(n)]
        return {
            name: torch.tensor([[names is None or name in names] for names in of_tokens], device=self.device)
            for name in self.adapters
        }

    def trim(self, table: PageTable, count: int) -> None:
        """Discards the last `count` tokens of a sequence. Raises CacheError as `PagePool.trim` does."""
        if self.use_cache:
            self.cache.pool.trim(table, count)
        else:
            del table.ids[len(table) - count :]

    def open(
        self, ids: Sequence[int], adapters: Names = None, shares: bool = True, salt: str = ""
    ) -> PageTable:
        """Returns a page table for a sequence that begins with these ids.

        If `shares`, it starts with the longest prefix stored by sequences with the same adapters (None: all) and the
        same salt."""
        root = self._root(adapters, salt)
        table = self.cache.open(ids if shares and self.shares_prefixes and self.use_cache else (), root)
        table.marks |= {len(ids) // PAGE * PAGE, (len(ids) - 1) // PAGE * PAGE}
        return table

    def fates(self, ids: Sequence[int], adapters: Names = None, salt: str = "") -> list[list[str]]:
        """Returns the state of a sequence's pages (`PagePool.fates`) under these adapters and this salt."""
        return self.cache.pool.fates(ids, self._root(adapters, salt))

    def stored(self, ids: Sequence[int], adapters: Names = None, salt: str = "") -> StoredText | None:
        """Returns a copy of the stored keys and values of a sequence (`StoredText.of`) under these adapters and this
        salt; None if they also depend on its length or its source."""
        return StoredText.of(self.cache, ids, self._root(adapters, salt)) if self.shares_prefixes else None

    def _root(self, adapters: Names, salt: str) -> tuple[str, ...]:
        return salt, *(name for name in self.adapters if adapters is None or name in adapters)

    def check_adapters(self, adapters: Names) -> None:
        """Raises ConfigError for adapters that are not active in the model's layers; for an encoder-decoder, whose
        source is read with the same adapters for all; and if adding them to some rows only would not be exact."""
        if adapters is None:
            return
        if self.sources is not None:
            raise ConfigError(
                f"adapters={[*adapters]}: an encoder-decoder has the same adapters for all texts; use "
                "set_active(model, names)"
            )
        if self.exact and self.native is not None and self.native.lowered.has_magnitudes:
            raise ConfigError(
                f"adapters={[*adapters]}, exact: the kernels apply DoRA magnitudes to all texts or none; leave one out"
            )
        for name in adapters:
            if name not in self.adapters:
                raise ConfigError(
                    f"adapters: {name!r} is not active{did_you_mean(name, self.adapters)}; active and not merged: "
                    f"{', '.join(self.adapters) or 'none'}"
                )

    def end(self) -> None:
        """Settles what the last `read` stored."""
        if self.use_cache:
            self.cache.end()


class Sources:
    """Cross-attention keys and values of an encoder-decoder's sources, computed once; if `exact`, each source is
    encoded alone."""

    def __init__(self, model: EncoderDecoder, exact: bool = False) -> None:
        self.model, self.exact = model, exact
        self.cache = PagedCache(cache_specs(model.stack), [Causal()] * model.spec.layers)

    def read(self, sources: Sequence[Sequence[int]]) -> list[PageTable]:
        """Returns the page tables of new sources, which are encoded together in one packed row."""
        if self.exact and len(sources) > 1:
            return [table for source in sources for table in self.read([source])]
        lengths = [len(ids) for ids in sources]
        ids = torch.tensor([[i for source in sources for i in source]], device=self.cache.device)
        with evaluating(self.model):
            memory = self.model.encode(ids, tokens=Tokens.packed(lengths, device=self.cache.device))
            tables = [self.cache.pool.open(root=object()) for _ in sources]
            tokens = self.cache.begin(list(zip(tables, sources, strict=True)))
            for layer, memory_keys in zip(self.cache.layers, self.model.memory_keys(memory), strict=True):
                assert isinstance(layer, PagedLayer)
                layer.update(memory_keys.k, memory_keys.v, tokens)
            self.cache.end()
        return tables

    def memory(self, tables: Sequence[PageTable]) -> list[KeyValues]:
        """Returns the keys and values of the sources, as documents 0, 1, ..., for every layer."""
        at = places(tables, 0, self.cache.device)
        layers = (layer for layer in self.cache.layers if isinstance(layer, PagedLayer))
        return [stored_keys(layer.tensors, at) for layer in layers]

    def close(self, table: PageTable) -> None:
        """Releases the pages of a source."""
        self.cache.pool.close(table)
