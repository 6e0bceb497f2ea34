"""The one decoder: every family of causal language models is a spec of it.

Legend: B rows, T slots of the call, N slots whose logits are wanted, M width of the model, V vocab.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.attention import KeyValues
from headway.cache import BatchCache, PagedCache
from headway.models.encoder import HeadLayer
from headway.models.pasts import make_paged_cache
from headway.models.spec import ModelSpec
from headway.models.stack import TransformerStack, make_output
from headway.models.transformer import Transformer, check_targets
from headway.nn import Losses, output_cross_entropy
from headway.nn.linear import Linear
from headway.nn.scale import capped, scaled
from headway.parallel import ContextParallel
from headway.tokens import Tokens


class Autoregressive(Transformer):
    """The base of decoders and encoder-decoders: states that predict the next token, and an output layer."""

    lm_head: Linear
    head: HeadLayer | None

    def forward(
        self,
        ids: Tensor,
        *,
        tokens: Tokens | None = None,
        cache: BatchCache | PagedCache | None = None,
        memory: Sequence[KeyValues] | None = None,
        logits_for: Tensor | slice | None = None,
        targets: Tensor | None = None,
        label_smoothing: float | None = None,
        context: ContextParallel | None = None,
    ) -> Tensor | Losses:
        """Logits of the token that follows each slot; given the tokens that do follow, their summed loss.

        Args:
            ids, tokens: as in `hidden`.
            cache: past keys and values (`make_cache`); this chunk is added.
            memory: keys and values of the rows' sources for every layer, of an encoder-decoder
                (`EncoderDecoder.memory_keys`); for a PagedCache packed as ids are.
            logits_for: slots whose logits are computed, all unless given: the `slots` of `hidden`.
            targets: [B, T] the token that follows each slot, `IGNORE_INDEX` (-100) where none is trained.
            label_smoothing: share of each target that all tokens have evenly; with one given, 0 included,
                `Losses.each` is differentiable (`chunked_cross_entropy`).
            context: rows whose tokens are sharded over ranks; ids and targets are `context.take` of theirs. Every rank
                calls it, and the losses and gradients of all are to be summed.
        Returns:
            [B, N, V], or [number of True, V] for a mask; with targets `Losses`, without ever holding all logits.
        Raises:
            DataError: ids or targets that are not in the vocab, or of a wrong shape. ConfigError: tokens that do not
            fit ids, rows beyond `max_context`, a wrong logits_for, or one beside targets. CacheError: chunks that do
            not continue a cache.
        """
        check_targets(ids, targets, logits_for, label_smoothing)
        hidden = self.hidden(
            ids, tokens=tokens, cache=cache, memory=memory, context=context, slots=logits_for
        )
        if targets is None:
            return self.logits(hidden)
        return self.cross_entropy(hidden, targets, label_smoothing=label_smoothing)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., M] -> [..., V]: the layers of the head in front of the output layer, and that layer, which is the
        embedding when they are tied."""
        return capped(self.lm_head(self._before_output(hidden)), self.spec.logit_cap)

    def cross_entropy(self, hidden: Tensor, targets: Tensor, **how: Any) -> Losses:
        """-ln softmax(logits(hidden))[target], without ever holding all logits; keywords of `output_cross_entropy`."""
        x, spec = self._before_output(hidden), self.spec
        return output_cross_entropy(self.lm_head, x, targets, spec.vocab, cap=spec.logit_cap, **how)

    def _before_output(self, hidden: Tensor) -> Tensor:
        x = hidden if self.head is None else self.head.before_output(hidden)
        return scaled(x, self.spec.logit_scale)

    def make_cache(self, batch: int = 1, *, slack: int = 0, dtype: torch.dtype | None = None) -> BatchCache:
        """An empty past of `batch` rows, of which the last `slack` tokens can always be trimmed. `dtype` is that of the
        weights unless given (autocast makes keys of another; torch.int8 rounds them). Raises CacheError for a layer
        whose queries see later tokens, ConfigError for slack with linear attention, whose sums cannot be trimmed."""
        pages = make_paged_cache(self.stack, slack=slack, dtype=dtype)
        return BatchCache(pages, batch)


class Decoder(Autoregressive):
    """A causal language model. Parameter names are those of Hugging Face's LLaMA; when embedding and output
    layer are tied there is no `lm_head.weight`; head.dense and head.norm are there where the spec's head has them.

    Args:
        spec: what it is.
        backend: of attention, in every layer ("auto" chooses by layer and call).

    Attributes: see `Transformer`.
    """

    def __init__(self, spec: ModelSpec, backend: str = "auto") -> None:
        super().__init__(spec)
        self.model = TransformerStack(spec, backend)
        self.head = HeadLayer(spec, self.model) if spec.head.dense is not None else None
        self.lm_head = make_output(spec, spec.head.inputs(spec.width, spec.columns), self.model)
