"""Context parallelism: an argument of models for rows whose tokens are sharded across ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from headway.attention import KeyValues
from headway.attention.attend import by_pattern
from headway.attention.call import check_sink_logit, validate
from headway.errors import ConfigError
from headway.parallel import ring
from headway.parallel.exchange import Exchange
from headway.parallel.layout import ShardLayout
from headway.parallel.plan import ContextPlan
from headway.partial import Partial
from headway.patterns import Pattern
from headway.scores import Score, steps_of
from headway.tokens import Tokens


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """Rows whose tokens are sharded across the ranks of an exchange.

    Attention over the keys of all ranks is the merge of the partials over each rank's keys (docs/algebra.md), so every
    rank computes its own queries, as if it had whole rows. Positions and patterns are those of the whole rows, because
    they are given by the tokens. The loss and the gradient of every parameter are sums over ranks.

        context = ContextParallel(tokens, layout, DistributedExchange())
        losses = model(context.take(ids), context=context, targets=context.take(targets))

    Args:
        whole: the tokens of the whole rows; every rank has them.
        layout: which slots each rank has.
        exchange: how keys are sent to other ranks.

    Raises ConfigError for a layout of rows of another length, or of another number of ranks.
    """

    whole: Tokens
    layout: ShardLayout
    exchange: Exchange
    _plans: dict[Pattern, ContextPlan] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.layout.ranks != self.exchange.ranks:
            raise ConfigError(
                f"ContextParallel: the layout is for {self.layout.ranks} ranks, the exchange has {self.exchange.ranks}"
            )
        _ = self.shards  # raises here, not in the first layer

    @cached_property
    def shards(self) -> tuple[Tokens, ...]:
        """The tokens of each rank."""
        return self.layout.shards(self.whole)

    @property
    def tokens(self) -> Tokens:
        """The tokens of this rank."""
        return self.shards[self.exchange.rank]

    def own(self, tokens: Tokens | None, *beside: object) -> Tokens:
        """Returns the tokens of this rank, which a caller may also pass as `tokens`.

        Raises ConfigError for any other tokens, and if a cache or encoder states are passed as well (`beside`)."""
        if any(value is not None for value in beside):
            raise ConfigError(
                "context= shards one forward over ranks and cannot be combined with cache= or memory=; drop one of them"
            )
        if tokens is not None and tokens is not self.tokens:
            raise ConfigError(
                "tokens= cannot be combined with context=, which has its own tokens; drop tokens="
            )
        return self.tokens

    def take(self, t: Tensor, dim: int = 1) -> Tensor:
        """Returns this rank's slots of a tensor that has those of whole rows along `dim`."""
        return self.layout.take(t, self.exchange.rank, dim)

    def plan(self, pattern: Pattern) -> ContextPlan:
        """Returns the plan (hops, bytes and work) of a pattern that all heads share."""
        if pattern not in self._plans:
            self._plans[pattern] = ContextPlan.of(pattern, self.shards)
        return self._plans[pattern]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: Pattern,
        *,
        score: Score | Sequence[Score] = (),
        sink_logit: Tensor | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        backend: str = "auto",
    ) -> Partial:
        """Computes `attend_keys` of this rank's q [B, H, T, D] over the keys of all ranks.

        k [B, K, T, D] and v [B, K, T, E] are this rank's keys and values. Arguments as in `attend_keys`; all ranks must
        pass equal ones. out [B, H, T, E] and lse [B, H, T] are float32 for every dtype of q except float64, and
        differentiable.

        Raises:
            ConfigError: for attention dropout, and for scores tied to slots, since both depend on the numbering of
            slots in one process.
            PatternError, BackendError: as `attend_keys`.
        """
        steps = steps_of(score)
        tied = [type(step).__name__ for step in steps if step.by_slot]
        if dropout or tied:
            setting = f"dropout={dropout} of attention weights" if dropout else f"the score {tied[0]}"
            raise ConfigError(
                f"context parallel does not support {setting}, which depends on the slots of one process; "
                + ("set attention_dropout=0" if dropout else "use a score that is computed from positions")
            )
        local = KeyValues(k, v, self.tokens)
        call = validate(q, self.tokens, [local], pattern, None, steps, scale, 0.0, None)
        if sink_logit is not None:
            check_sink_logit("context parallel", sink_logit, q)
        part = by_pattern(call, lambda some: ring.run(some, self.plan(some.pattern), self.exchange, backend))
        return part if sink_logit is None else part.with_sink(sink_logit.unsqueeze(1))
