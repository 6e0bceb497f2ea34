"""A model and the pages of the texts that it reads: the next tokens of some texts in, logits out.

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
    """While open, the model is in evaluation mode and nothing is recorded for gradients."""
    trained = [part for part in model.modules() if part.training] if model.training else []
    try:
        model.eval() if trained else None
        with torch.inference_mode():
            yield
    finally:
        for part in trained:  # parts that were in evaluation mode stay in it
            part.training = True


class Reader:
    """Reads texts with a decoder, or the targets of an encoder-decoder.

        logits = reader.read([(table, ids), ...], [slots of which logits are wanted, ...])
        reader.cache.end()

    A step of few tokens is one native call where the kernels can run the model: `steps` says whether, and why.

    Args:
        model: in evaluation mode during the calls only, so that a model in training can be sampled from.
        use_cache: False computes every step from the whole text.
        kv_dtype: what the cache stores; the weights' dtype unless given.
        budget, keep, slack: as in `PagedCache`.

    Raises ConfigError for a budget where positions depend on the length of a text: what such a text has stored depends
    on how it came to its length, so that it can neither be sent back to wait nor begin with what others stored.
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
        # what a text stores depends, too, on its source and, at some positions, on its length
        self.shares_prefixes = not of_length and isinstance(model, Decoder)
        if budget is not None and of_length:
            raise ConfigError(
                f"a budget of {budget} bytes: positions of this model depend on the length of the text, so that none "
                "can be sent back to wait for room; leave the budget out"
            )
        self.device = model.stack.like.device
        keep = keep if self.shares_prefixes else 0
        self.cache = make_paged_cache(model.stack, budget=budget, keep=keep, slack=slack, dtype=kv_dtype)
        self.sources = Sources(model, exact) if isinstance(model, EncoderDecoder) else None
        self.renew()

    def renew(self) -> None:
        """Reads with the adapters that are added now. What is stored stays. Raises ConfigError where it is to be exact,
        and cannot."""
        self.adapters = beside(self.model)
        for name in ("_step", "native", "steps"):
            self.__dict__.pop(name, None)
        if self.exact and self.native is None:
            raise ConfigError(
                "exact: what the kernels of decoding do not compute depends on how it is read, and here "
                f"{self.steps.why}; leave exact out"
            )

    @cached_property
    def _step(self) -> tuple[DecodeStep | None, Choice]:
        """The native step, and the choice of what computes steps of few tokens: a prompt alone needs none."""
        if not self.use_cache:
            return None, Choice("modules", "no cache is used")
        memory = None if self.sources is None else self.sources.cache
        native, steps = choose_step(self.model, self.cache, memory, self.exact)
        # elsewhere there are no native steps, and `exact` says it in its error
        if native is None and self.device.type == "cpu" and not self.exact:
            say_once(steps.why)
        return native, steps

    @cached_property
    def native(self) -> DecodeStep | None:
        """A step as one call of the kernels; None where they do not take the model."""
        return self._step[0]

    @cached_property
    def steps(self) -> Choice:
        """The choice of what computes steps of few tokens, "native" calls or "modules", and why."""
        return self._step[1]

    def read(
        self,
        chunks: Sequence[tuple[PageTable, Sequence[int]]],
        wanted: Sequence[Sequence[int]],
        sources: Sequence[PageTable] = (),
        adapters: Sequence[Names] = (),
    ) -> Tensor:
        """Logits [N, V] of the tokens that follow the wanted ones of each chunk, which are numbered from 0.

        Each text goes on with its ids; `sources` are those of the texts, of an encoder-decoder, `adapters` the names of
        those that are added for each text (None: all). What it stored is settled by `cache.end()`. Raises CacheError,
        and changes nothing, where pages have no room."""
        if self.use_cache:
            tokens, texts, begins = self.cache.begin(chunks), [ids for _, ids in chunks], [0] * len(chunks)
        else:  # all tokens of the texts
            begins = [len(table) for table, _ in chunks]
            for table, new in chunks:
                table.ids += new
            texts = [table.ids for table, _ in chunks]
            tokens = Tokens.packed([len(text) for text in texts], device=self.device)
        lengths = [len(text) for text in texts]
        ids = torch.tensor([[i for text in texts for i in text]], device=self.device)
        firsts = map(add, accumulate(lengths[:-1], initial=0), begins)
        # chunks of 3 and 2 ids, wanted [[2], [0, 1]]: at [2, 3, 4]
        at = [first + slot for first, slots in zip(firsts, wanted, strict=True) for slot in slots]
        with evaluating(self.model):
            rows = self._rows_of(adapters, lengths)
            native = self.native
            if native is not None and not self.exact and tokens.count > native.most_rows:
                native = None
            if native is not None and not (rows and native.lowered.has_magnitudes):
                of_tokens = [table for table, text in zip(sources, texts, strict=False) for _ in text]
                return native.read(ids, tokens, at, of_tokens, rows)
            cache = self.cache if self.use_cache else None
            slots = torch.tensor([at], dtype=torch.int64, device=self.device)
            if isinstance(self.model, Decoder) and not rows:
                logits: Tensor = self.model(ids, tokens=tokens, cache=cache, logits_for=slots)
                return logits[0]
            memory = None if self.sources is None else self.sources.memory(sources)
            needed = None if rows else slots
            with only_rows(rows):  # of all tokens, in every layer
                states = self.model.hidden(ids, tokens=tokens, cache=cache, memory=memory, slots=needed)[0]
            return self.model.logits(states[at] if rows else states)

    def _rows_of(self, adapters: Sequence[Names], counts: Sequence[int]) -> dict[str, Tensor]:
        """The tokens of texts, so many of each, to which each adapter is added, bool [T, 1]; {} where that is all."""
        if adapters.count(None) == len(adapters):
            return {}
        of_tokens = [names for names, n in zip(adapters, counts, strict=True) for _ in range(n)]
        return {
            name: torch.tensor([[names is None or name in names] for names in of_tokens], device=self.device)
            for name in self.adapters
        }

    def trim(self, table: PageTable, count: int) -> None:
        """Takes back the last tokens of a text. Raises CacheError as `PagePool.trim`."""
        if self.use_cache:
            self.cache.pool.trim(table, count)
        else:
            del table.ids[len(table) - count :]

    def open(
        self, ids: Sequence[int], adapters: Names = None, shares: bool = True, salt: str = ""
    ) -> PageTable:
        """Pages for a text that begins with these ids. Where it `shares`, as much of it as others with the same
        adapters (None: all) and the same salt have stored need not be read."""
        root = self._root(adapters, salt)
        table = self.cache.open(ids if shares and self.shares_prefixes and self.use_cache else (), root)
        table.marks |= {len(ids) // PAGE * PAGE, (len(ids) - 1) // PAGE * PAGE}
        return table

    def fates(self, ids: Sequence[int], adapters: Names = None, salt: str = "") -> list[list[str]]:
        """The fates of the pages of a text (`PagePool.fates`) with these adapters and this salt."""
        return self.cache.pool.fates(ids, self._root(adapters, salt))

    def stored(self, ids: Sequence[int], adapters: Names = None, salt: str = "") -> StoredText | None:
        """A copy of what pages hold of a text (`StoredText.of`) with these adapters and this salt; None where what they
        hold depends on more."""
        return StoredText.of(self.cache, ids, self._root(adapters, salt)) if self.shares_prefixes else None

    def _root(self, adapters: Names, salt: str) -> tuple[str, ...]:
        return salt, *(name for name in self.adapters if adapters is None or name in adapters)

    def check_adapters(self, adapters: Names) -> None:
        """Raises ConfigError for adapters that are not added to the model's layers; where there is a source, which is
        read for all texts alike; and where they are added to some rows by modules, which are not exact."""
        if adapters is None:
            return
        if self.sources is not None:
            raise ConfigError(
                f"adapters={[*adapters]}: of an encoder-decoder all texts have the same; use set_active(model, names)"
            )
        if self.exact and self.native is not None and self.native.lowered.has_magnitudes:
            raise ConfigError(
                f"exact, adapters={[*adapters]}: the kernels know magnitudes (DoRA) of all texts alone; give one"
            )
        for name in adapters:
            if name not in self.adapters:
                raise ConfigError(
                    f"adapters: {name!r} is not active{did_you_mean(name, self.adapters)}; there are "
                    f"{', '.join(self.adapters) or 'none'} (active, and not merged into the weights)"
                )

    def end(self) -> None:
        """Settles what the last `read` stored."""
        if self.use_cache:
            self.cache.end()


class Sources:
    """Keys and values of sources, to which the decoder of an encoder-decoder attends, computed once; each source alone
    where they are to be exact."""

    def __init__(self, model: EncoderDecoder, exact: bool = False) -> None:
        self.model, self.exact = model, exact
        self.cache = PagedCache(cache_specs(model.stack), [Causal()] * model.spec.layers)

    def read(self, sources: Sequence[Sequence[int]]) -> list[PageTable]:
        """The pages of new sources, encoded together, side by side."""
        if self.exact and len(sources) > 1:
            return [table for source in sources for table in self.read([source])]
        lengths = [len(ids) for ids in sources]
        ids = torch.tensor([[i for source in sources for i in source]], device=self.cache.device)
        with evaluating(self.model):
            memory = self.model.encode(ids, tokens=Tokens.packed(lengths, device=self.cache.device))
            tables = [self.cache.pool.open(root=object()) for _ in sources]
            tokens = self.cache.begin(list(zip(tables, sources, strict=True)))
            for layer, keys in zip(self.cache.layers, self.model.memory_keys(memory), strict=True):
                assert isinstance(layer, PagedLayer)
                layer.update(keys.k, keys.v, tokens)
            self.cache.end()
        return tables

    def memory(self, tables: Sequence[PageTable]) -> list[KeyValues]:
        """The sources of texts, as documents 0, 1, ..., for every layer."""
        at = places(tables, 0, self.cache.device)
        layers = (layer for layer in self.cache.layers if isinstance(layer, PagedLayer))
        return [stored_keys(layer.tensors, at) for layer in layers]

    def close(self, table: PageTable) -> None:
        """Releases the pages of a source."""
        self.cache.pool.close(table)
