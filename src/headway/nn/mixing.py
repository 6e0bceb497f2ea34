"""Layers that mix tokens by a state of the past.

Legend: B rows, T tokens, N selected slots, R sequences of a step, M width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headway.attention.token_order import Order, order_of
from headway.cache import PagedStates
from headway.cache.paged_cache import LayerCache
from headway.errors import ConfigError
from headway.nn.linear import Linear
from headway.nn.mixers import MixingLayer
from headway.nn.record import Record
from headway.parallel import ContextParallel
from headway.positions import Rotation
from headway.scores import Score
from headway.tokens import SlotSelection, Tokens


def drawn(shape: Sequence[int], low: float, high: float, generator: torch.Generator | None = None) -> Tensor:
    """Returns numbers drawn uniformly from [low, high], in float32 on the CPU, so that a seed gives the same on
    every device."""
    fresh = torch.empty(tuple(shape), dtype=torch.float32, device="cpu")
    return nn.init.uniform_(fresh, low, high, generator=generator)


class InOrder(NamedTuple):
    """Slots sorted by document and index, empty ones last.

    order: how they were sorted.   tokens: in this order.   valid: bool [B|1, T], in this order; None if all slots are
    tokens.
    """

    order: Order
    tokens: Tokens
    valid: Tensor | None

    @property
    def begins(self) -> Tensor | None:
        """Where a later document of a row begins, as in `short_convolution`."""
        return self.order.begins

    def known(self, x: Tensor) -> Tensor:
        """Returns x [B, T, C] with 0 in empty slots."""
        return x if self.valid is None else x.masked_fill(~self.valid.unsqueeze(-1), 0.0)

    def tail(self, x: Tensor, past: Tensor | None, count: int) -> Tensor:
        """Returns the last `count` tokens of each row of past and x [B, T, C], [B, count, C]; zeros if there are
        fewer."""
        rows, slots, channels = x.shape
        past = x.new_zeros(rows, count, channels) if past is None else past
        if self.valid is None:  # 2 of x [1, 2, 3]: [2, 3]; 2 of past [8, 9] and x [1]: [9, 1]
            last = x[:, max(slots - count, 0) :]
            return torch.cat((past[:, last.shape[1] :], last), 1)
        past_and_x = torch.cat((past, x), 1)
        at = self.valid.sum(1, keepdim=True) + torch.arange(count, device=x.device)
        return past_and_x.gather(1, at.expand(rows, -1).unsqueeze(-1).expand(-1, -1, channels))


class StateLayer(MixingLayer):
    """A layer whose past is a state of fixed size: projections of its input, a mix of them in the order of tokens, and
    an output projection, `o_proj`. There are no positions, because the state depends on the order of tokens.

    Args:
        width: M.
        of: the value that describes the layer.
        output_dropout: probability for the output, in training mode.
    """

    o_proj: Linear

    def __init__(self, width: int, of: object, output_dropout: float = 0.0) -> None:
        super().__init__()
        self.width, self.of, self.rotary = width, of, None
        self.drop_output = nn.Dropout(output_dropout)

    def inputs(self, x: Tensor) -> Sequence[Tensor]:
        """Returns the projections of each token, each [B, T, *]."""
        raise NotImplementedError

    def mix(
        self, inputs: Sequence[Tensor], order: InOrder, past: Sequence[Tensor] | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Mixes the projections, in order, with the state before them (None if there is none). Returns the input of
        `o_proj` [B, T, *], and the state after the last token of each row."""
        raise NotImplementedError

    def forward(
        self,
        x_BTM: Tensor,
        *,
        tokens: Tokens | None = None,
        cache: LayerCache | None = None,
        rotation: Rotation | None = None,
        score: Sequence[Score] = (),
        context: ContextParallel | None = None,
        selected: SlotSelection | None = None,
        record: Record | None = None,
    ) -> Tensor:
        """Computes the layer: [B, T, M] -> [B, T, M], or [B, N, M] for N selected slots. Documents do not affect one
        another, and empty slots get 0, or the bias of `o_proj` if it has one. Arguments as in
        `AttentionLayer.forward`. Raises ConfigError for what is not supported (rotations, scores, tokens of other
        ranks, weights to record), and for a cache of another kind."""
        name = type(self).__name__
        wrong = {
            "rotation is given, but nothing is rotated; drop rotation=": rotation is not None,
            "score is given, but there are no scores of pairs": bool(score),
            "context parallel is not supported; train this model without it": context is not None,
            "record is given, but there are no attention weights": record is not None
            and (self in record.layers or self in record.patterns),
        }
        for what, is_so in wrong.items():
            if is_so:
                raise ConfigError(f"{name}: {what}")
        if cache is None:
            out, _ = self._mixed(x_BTM, None, tokens)
        else:
            out = self._by_rows(x_BTM, cache, tokens)
        y_BTM: Tensor = self.o_proj(out if selected is None else selected.take(out))
        return self.drop_output(y_BTM) if self.training else y_BTM

    def after(
        self, x_BTM: Tensor, past: Any | None, *, tokens: Tokens | None = None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Computes `forward` for rows that continue `past` (one document per row); returns the outputs and the past for
        the next tokens.

        However a row is split, the results are those of the whole row. Raises ConfigError for another width, and for
        packed documents after a past."""
        out, state = self._mixed(x_BTM, past, tokens)
        return self.o_proj(out), state

    def _mixed(
        self, x: Tensor, past: Sequence[Tensor] | None, tokens: Tokens | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        self._check(x)
        ordered = _in_order(type(self).__name__, tokens, x)
        if ordered.begins is not None and past is not None:
            raise ConfigError(
                f"{type(self).__name__}: past needs one document per row, but these tokens are packed; give each "
                "document its own row"
            )
        out, state = self.mix(self.inputs(ordered.order.arrange(x, 1)), ordered, past)
        return ordered.order.restore(out, 1), state

    def _by_rows(self, x: Tensor, cache: LayerCache, tokens: Tokens | None) -> Tensor:
        """Computes a step of a `PagedCache` with a row for each sequence, because each row has one state."""
        self._check(x)
        name = type(self).__name__
        states = states_of(name, cache, self.of, "states")
        if tokens is None:
            raise ConfigError(f"{name}: cache= needs tokens=, which its begin() returns")
        rows = states.cache.step_of(tokens).rows
        inputs = [rows.unpack(t) for t in self.inputs(x)]
        out, state = self.mix(inputs, _in_order(name, rows.tokens, inputs[0]), states.read())
        states.write(state)
        return rows.pack(out)

    def _check(self, x: Tensor) -> None:
        if x.dim() != 3 or x.shape[2] != self.width:
            raise ConfigError(
                f"{type(self).__name__}: x must be [batch, tokens, {self.width}], got {[*x.shape]}"
            )


def states_of(name: str, cache: LayerCache, of: object, kept: str) -> PagedStates:
    """Returns the cache of a layer that is called `name`. Raises ConfigError unless it keeps the states (`kept` in the
    message) of `of`."""
    if isinstance(cache, PagedStates) and cache.state.of == of:
        return cache
    other = f"of {cache.state.of}" if isinstance(cache, PagedStates) else "of keys"
    raise ConfigError(
        f"{name}: cache must keep the {kept} of {of}, got a {type(cache).__name__} {other}; give a layer of "
        "PagedCache(spec, patterns, states)"
    )


def _in_order(name: str, tokens: Tokens | None, x: Tensor) -> InOrder:
    if tokens is None:
        tokens = Tokens.range(x.shape[1], device=x.device)
    if tokens.count != x.shape[1] or tokens.rows not in (1, len(x)):
        raise ConfigError(
            f"{name}: tokens describe {tokens.rows} rows of {tokens.count} slots, x holds {len(x)} rows of {x.shape[1]}"
        )
    order = order_of(tokens, empty_last=True)
    tokens = tokens if order.slots is None else tokens.gather(order.slots)
    return InOrder(order, tokens, None if order.valid is None else tokens.valid)
