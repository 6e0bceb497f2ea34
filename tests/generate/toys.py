"""Toy models for beam search, and oracles that enumerate all of their texts."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.cache import CacheSpec, PagedCache
from headway.generate import Beams, Engine, GenerationConfig, Hypothesis, Reader, Sampling
from headway.generate.beams import BeamSearch
from headway.generate.requests import Request
from headway.patterns import Causal


class Toy(Reader):
    """Logits that are a pure function of the text: a table drawn for (seed, the last three ids, the length).

    longest: number of tokens read of the longest text.   counts: number of texts in each step."""

    use_cache, sources, shares_prefixes, adapters = False, None, False, []

    def __init__(self, vocab: int, seed: int, prompts: Sequence[Sequence[int]], levels: int = 0) -> None:
        self.vocab, self.seed, self.levels = vocab, seed, levels
        self.prompts = [list(p) for p in prompts]
        self.cache = PagedCache(CacheSpec(kv_heads=1, head_dim=1), [Causal()])
        self.longest, self.counts = 0, []

    def read(self, chunks: Any, wanted: Any, sources: Any = (), adapters: Any = ()) -> Tensor:
        for table, ids in chunks:
            table.ids += ids
        self.longest = max(self.longest, *(len(table) for table, _ in chunks))
        self.counts.append(len(chunks))
        return torch.stack(
            [self.logits(table.ids) for (table, _), slots in zip(chunks, wanted, strict=True) if slots]
        )

    def logits(self, text: Sequence[int]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, len(text), *text[-3:])) % 2**31)
        drawn = torch.randn(self.vocab, generator=generator, dtype=torch.float64) * 2
        return drawn.sign() * (drawn.abs() > 1) if self.levels else drawn


def run(
    toy: Toy,
    beams: Beams,
    room: int | Sequence[int],
    eos: Sequence[int] = (0,),
    *,
    numbers: Sequence[int] | None = None,
    penalty: float = 1.0,
    **constraints: Any,
) -> list[list[Hypothesis]]:
    """Returns the hypotheses of each of the toy's prompts, which get `room` new tokens."""
    prompts = toy.prompts
    rooms = [room] * len(prompts) if isinstance(room, int) else room
    config = GenerationConfig(
        beams=beams, eos=eos, sampling=Sampling(repetition_penalty=penalty), **constraints
    )
    requests = zip(numbers or range(len(prompts)), prompts, rooms, strict=True)
    searches = [BeamSearch(Request(n, prompt, config, limit), beams) for n, prompt, limit in requests]
    engine = Engine(toy)
    for _ in engine.run(searches):
        pass
    return [list(search.best()) for search in searches]


def total(toy: Toy, prompt: Sequence[int], ids: Sequence[int]) -> float:
    """Returns sum_i log p(ids_i | prompt, ids_<i), computed token by token."""
    text, log_prob = list(prompt), 0.0
    for token in ids:
        log_prob += float(toy.logits(text).log_softmax(-1)[token])
        text.append(token)
    return log_prob


def all_texts(vocab: int, room: int, eos: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns every text that ends by an EOS, or by its length."""
    return [
        ids
        for n in range(1, room + 1)
        for ids in itertools.product(range(vocab), repeat=n)
        if not set(ids[:-1]) & set(eos) and (n == room or ids[-1] in eos)
    ]


def greedy(toy: Toy, prompt: Sequence[int], room: int, eos: Sequence[int] = (0,)) -> tuple[int, ...]:
    ids: list[int] = []
    while len(ids) < room and not (ids and ids[-1] in eos):
        ids.append(int(toy.logits([*prompt, *ids]).argmax()))
    return tuple(ids)
