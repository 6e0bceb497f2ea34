"""Attention maps: which tokens of a sequence each layer attends to, and statistics that classify heads.

Legend: H requested query heads, T queries, N selected queries, S keys, E width of a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from headway.errors import ConfigError, DataError
from headway.models.stack import TransformerStack
from headway.nn.attention_layer import AttentionLayer
from headway.nn.record import Attended, Record
from headway.patterns import Pattern
from headway.patterns.picture import figure, svg

# Maximum tokens per side of a picture: with token labels, of a single layer, of one layer among several.
LABELLED, ALONE, AMONG = 32, 64, 24
MOST = 0.5
"""The smallest share of the weight for which a head is named after that share."""
EVEN = 0.8
"""The smallest ratio of a head's entropy to that of uniform weights for which the head is called "even"."""
SHADES = [f"#{210 - 17 * i:02x}{226 - 14 * i:02x}{242 - 8 * i:02x}" for i in range(11)]


class Shares(NamedTuple):
    """Where a head's attention weight goes, averaged over some queries: the mean weight on

    first: the first token.
    itself: the query's own token.
    previous: the token before the query.
    induction: tokens that follow an earlier occurrence of the query's token (same token text).
    same: earlier occurrences of the query's token.

    entropy: the mean entropy of the weights, in nats.
    evenness: the mean entropy relative to uniform weights over the same keys (1 if there is only one key).

    The entropy of negative weights, which linear attention can have, is NaN.
    """

    first: float
    itself: float
    previous: float
    induction: float
    same: float
    entropy: float
    evenness: float

    @property
    def kind(self) -> str:
        """The name of the largest of the first five shares if it is at least half of the weight, else "even" or
        "mixed"."""
        name = max(self._fields[:5], key=lambda field: float(getattr(self, field)))
        if getattr(self, name) >= MOST:
            return name
        return "even" if self.evenness >= EVEN else "mixed"


def shares_of(weights: Tensor, queries: Sequence[int], keys: Sequence[str]) -> Shares:
    """Returns the `Shares` of weights [N, S], for queries at these slots and keys with these token texts."""
    text_numbers: dict[str, int] = {}
    texts = torch.tensor([text_numbers.setdefault(text, len(text_numbers)) for text in keys])
    at, slots = torch.tensor(queries).unsqueeze(1), torch.arange(len(keys))
    wide = weights.double().cpu()
    # for the keys "a b a c" and the query "a" in slot 2: earlier marks slot 0, after marks slot 1
    earlier = texts == texts[at]
    earlier &= slots < at
    after = earlier.roll(1, 1)
    after[:, 0] = False
    masks = slots == 0, slots == at, slots == at - 1, after, earlier
    entropy = -torch.xlogy(wide, wide).sum(1)
    uniform_entropy = (wide != 0).sum(1).clamp_min(2).double().log()
    single = (wide != 0).sum(1) < 2
    evenness = torch.where(single, 1.0, entropy / uniform_entropy)
    shares = [float((wide * mask).sum(1).mean()) for mask in masks]
    return Shares._make([*shares, float(entropy.mean()), float(evenness.mean())])


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMap:
    """The attention weights of one layer over the tokens of a sequence.

    The weights are those of the layer's own forward pass: after the pattern, the scores and the softmax (for linear
    attention, similarities divided by their sum, which may be negative). The weighted sum of the values is the input
    of the layer's output projection. Weights are computed on demand, so reading one row of 100 000 keys computes only
    that row. In a notebook the map is shown as a picture, shaded by the square root of the weight.

    Attributes:
        layer: index of the layer, from 0.   heads: the H query heads that are covered.
        queries, keys: token texts of the T queries and S keys.   pattern: which keys each query may attend to.
    """

    layer: int
    heads: tuple[int, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    pattern: Pattern
    attended: Sequence[Attended] = field(repr=False)

    def row(self, query: int) -> Tensor:
        """Returns the weights of one query over all keys, [H, S]; -1 is the last query. Raises DataError if the query
        is out of range."""
        return self.weights([query])[:, 0]

    def weights(self, queries: Sequence[int] | None = None) -> Tensor:
        """Returns the weights [H, N, S] of some queries (all by default), in float32, or float64 for a float64
        model."""
        slots = self._slots(queries)
        return torch.stack([self._rows(slots, head) for head in self.heads])

    def values(self, query: int = 0) -> Tensor:
        """Returns the values [H, S, E] that a query's weights multiply. They are the same for all queries, except for
        global queries that have their own projections (Longformer)."""
        part, _ = self._of(self._slot(query))
        return torch.stack([part.values(head) for head in self.heads])

    def result(self, query: int) -> Tensor:
        """Returns the layer's own result for a query, [H, E], computed by kernels that do not store weights: the sum
        of `row` times `values`, up to rounding."""
        part, at = self._of(self._slot(query))
        with torch.inference_mode():
            return torch.stack([part.result(at, head)[0] for head in self.heads])

    def shares(self, queries: Sequence[int] | None = None) -> list[Shares]:
        """Returns the `Shares` of each head, averaged over some queries (all by default)."""
        slots = self._slots(queries)
        slots_in_row = self.attended[0].tokens.index[0, slots].tolist()
        return [shares_of(rows, slots_in_row, self.keys) for rows in self.weights(slots)]

    def _rows(self, slots: Sequence[int], head: int) -> Tensor:
        """Returns the weights [N, S] of one head; queries that have their own projections are computed one at a
        time."""
        first = self.attended[0]
        query_slots = torch.tensor(slots, dtype=torch.int64, device=first.tokens.device)
        with torch.inference_mode():
            rows = first.weights(query_slots, head)
            for i, slot in enumerate(slots if len(self.attended) > 1 else ()):
                part, at = self._of(slot)
                rows[i] = part.weights(at, head)[0]
        return rows

    def _of(self, slot: int) -> tuple[Attended, Tensor]:
        """Returns the last recorded call that contains a query, and the query's slot in that call, [1]."""
        index = self.attended[0].tokens.index[0, slot]
        for part in reversed(self.attended):
            at = (part.tokens.index[0] == index).nonzero()[:1, 0]
            if len(at):
                return part, at
        raise AssertionError(f"no call has slot {slot}")

    def _slots(self, queries: Sequence[int] | None) -> list[int]:
        return [*range(len(self.queries))] if queries is None else [self._slot(i) for i in queries]

    def _slot(self, query: int) -> int:
        count = len(self.queries)
        if not -count <= query < count:
            raise DataError(
                f"attention: there is no query {query}; the text has {count} tokens, 0..{count - 1}"
            )
        return query % count

    def panels(self, most: int) -> list[tuple[str, str]]:
        """Returns a title and a picture for each head, with at most `most` tokens per side: if there are more queries,
        every n-th one is drawn, and of n neighbouring keys the largest weight."""
        count, keys = len(self.queries), len(self.keys)
        slots, group = [*range(0, count, -(-count // most))], -(-keys // most)
        labelled = max(count, keys) <= min(LABELLED, most)
        texts = {"queries": self.queries, "keys": self.keys} if labelled else {}
        side, panels = 14.0 if labelled else 4.0, []
        for head in self.heads:
            rows = torch.nn.functional.pad(self._rows(slots, head).abs(), (0, -keys % group))
            pooled = rows.unflatten(1, (-1, group)).amax(-1).clamp(0, 1).sqrt()
            cells = (pooled * len(SHADES)).ceil().long()
            panels.append((f"layer {self.layer}, head {head}", svg(cells, SHADES, side=side, **texts)))
        return panels

    def remark(self, most: int) -> str:
        """Returns the caption of a picture with at most `most` tokens per side."""
        count, keys = len(self.queries), len(self.keys)
        step, group = -(-count // most), -(-keys // most)
        parts = ["queries down, keys to the right; darker is more"]
        parts += [f"one query in {step}, of {count}"] if step > 1 else []
        parts += [f"the largest of {group} keys side by side, of {keys}"] if group > 1 else []
        return ", ".join(parts)

    def _repr_html_(self) -> str:
        return figure(self.panels(ALONE), self.remark(ALONE))

    def __repr__(self) -> str:
        heads = f"heads {', '.join(map(str, self.heads))}"
        sides = f"{len(self.queries)} queries x {len(self.keys)} keys"
        return f"AttentionMap(layer {self.layer}, {heads}, {sides}, {self.pattern})"


class AttentionMaps(dict[int, AttentionMap]):
    """The `AttentionMap` of each requested layer, by layer number; -1 is the last layer of the model.

    Attributes:
        last: the final hidden states [T, M] of the queries, after the last norm, from which the logits are computed.
    """

    def __init__(self, maps: Sequence[AttentionMap], layers: int, last: Tensor) -> None:
        super().__init__((m.layer, m) for m in maps)
        self._layers, self.last = layers, last

    def __missing__(self, layer: int) -> AttentionMap:
        if -self._layers <= layer < 0 and layer % self._layers in self:
            return self[layer % self._layers]
        raise KeyError(f"layer {layer}; there are maps of {', '.join(map(str, self))}")

    def _repr_html_(self) -> str:
        if len(self) == 1:
            return next(iter(self.values()))._repr_html_()
        panels = [panel for m in self.values() for panel in m.panels(AMONG)]
        return figure(panels, next(iter(self.values())).remark(AMONG))

    def __repr__(self) -> str:
        return f"AttentionMaps({', '.join(map(repr, self.values()))})"


def numbers_of(what: str, selection: int | Sequence[int] | None, count: int) -> list[int]:
    """Resolves a selection among 0..count - 1 to a list of numbers; None selects all, negative numbers count from the
    end.

    Raises ConfigError for an empty selection, and for a number that is out of range or given twice.
    """
    chosen = (
        [*range(count)] if selection is None else [selection] if isinstance(selection, int) else [*selection]
    )
    for number in chosen:
        if not isinstance(number, int) or not -count <= number < count:
            raise ConfigError(
                f"{what}: {number!r} is not in 0..{count - 1} (or -{count}..-1, counted from the end)"
            )
    numbers = [number % count for number in chosen]
    if not numbers or len(set(numbers)) < len(numbers):
        raise ConfigError(f"{what}: give one or more numbers without duplicates, got {selection!r}")
    return numbers


def attention_record(stack: TransformerStack, layers: int | Sequence[int] | None) -> Record:
    """Returns a record of the attention of some layers of a stack, by default of all that have attention weights.
    Raises ConfigError for a layer without them."""
    attending = [i for i, block in enumerate(stack.blocks) if isinstance(block.self_attn, AttentionLayer)]
    numbers = numbers_of("layers", layers, stack.spec.layers)
    if layers is None and attending:
        numbers = attending
    for i in numbers:
        if i not in attending:
            raise ConfigError(
                f"layers: layer {i} is a {type(stack.blocks[i].self_attn).__name__}, which has no attention weights; "
                f"layers that have them: {', '.join(map(str, attending)) or 'none'}"
            )
    blocks = [stack.blocks[i] for i in numbers]
    return Record([layer for block in blocks for layer in (block.self_attn, block.cross_attn)])


def attention_maps(
    record: Record,
    stack: TransformerStack,
    heads: int | Sequence[int] | None,
    queries: Sequence[str],
    keys: Sequence[str],
    across: bool = False,
) -> AttentionMaps:
    """Returns the recorded attention of one sequence as maps; `across` selects cross-attention to the encoder's
    states."""
    head_numbers, texts = tuple(numbers_of("heads", heads, stack.spec.heads)), (tuple(queries), tuple(keys))
    layers = [block.cross_attn if across else block.self_attn for block in stack.blocks]
    maps = [
        AttentionMap(i, head_numbers, *texts, layer.pattern, record.attended[layer])
        for i, layer in enumerate(layers)
        if isinstance(layer, AttentionLayer) and layer in record.attended
    ]
    return AttentionMaps(maps, stack.spec.layers, record.states[-1][0])
