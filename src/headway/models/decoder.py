"""The one decoder class: every family of causal language models is a spec of it.

Legend: B rows, T slots of the call, N slots whose logits are computed, M width of the model, V vocab.
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
    """Base class of decoders and encoder-decoders: states that predict the next token, and an output layer."""

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
        """Returns the logits of the token that follows each slot; with `targets`, the summed loss instead.

        Args:
            ids, tokens: as in `hidden`.
            cache: past keys and values (`make_cache`); this chunk is appended.
            memory: cross-attention keys and values of the rows' sources for every layer of an encoder-decoder
                (`EncoderDecoder.memory_keys`); packed like ids for a PagedCache.
            logits_for: slots whose logits are computed, all if None: the `slots` of `hidden`.
            targets: [B, T], the token that follows each slot; `IGNORE_INDEX` (-100) if it is not trained on.
            label_smoothing: probability mass of each target that is spread evenly over all tokens; if given, even as
                0, `Losses.each` is differentiable (`chunked_cross_entropy`).
            context: context parallelism: rows whose tokens are sharded over ranks; ids and targets are `context.take`
                of the whole. Every rank must make the call, and the losses and gradients of all ranks must be summed.
        Returns:
            [B, N, V], or [number of True, V] for a mask; with targets `Losses`, without materializing all logits at
            once.
        Raises:
            DataError: ids or targets that are not in the vocab, or have a wrong shape. ConfigError: tokens that do not
                fit ids, rows beyond `max_context`, an invalid logits_for, or one together with targets. CacheError:
                chunks that do not continue a cache.
        """
        check_targets(ids, targets, logits_for, label_smoothing)
        hidden = self.hidden(
            ids, tokens=tokens, cache=cache, memory=memory, context=context, slots=logits_for
        )
        if targets is None:
            return self.logits(hidden)
        return self.cross_entropy(hidden, targets, label_smoothing=label_smoothing)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [..., V] of states [..., M]: applies the head's layers and then the output layer,
        which is the embedding if they are tied."""
        return capped(self.lm_head(self._before_output(hidden)), self.spec.logit_cap)

    def cross_entropy(self, hidden: Tensor, targets: Tensor, **how: Any) -> Losses:
        """Returns -ln softmax(logits(hidden))[target], without materializing all logits at once; takes the keywords
        of `output_cross_entropy`."""
        x, spec = self._before_output(hidden), self.spec
        return output_cross_entropy(self.lm_head, x, targets, spec.vocab, cap=spec.logit_cap, **how)

    def _before_output(self, hidden: Tensor) -> Tensor:
        x = hidden if self.head is None else self.head.before_output(hidden)
        return scaled(x, self.spec.logit_scale)

    def make_cache(self, batch: int = 1, *, slack: int = 0, dtype: torch.dtype | None = None) -> BatchCache:
        """Returns an empty KV cache for `batch` rows, whose last `slack` tokens can always be trimmed.

        `dtype` is the dtype of the weights if None (autocast produces keys of another dtype; torch.int8 quantizes
        them). Raises CacheError if a layer's queries see later tokens, ConfigError for slack with linear attention,
        whose running sums cannot be trimmed.
        """
        pages = make_paged_cache(self.stack, slack=slack, dtype=dtype)
        return BatchCache(pages, batch)


class Decoder(Autoregressive):
    """A causal language model. Parameter names are those of Hugging Face's LLaMA; if embedding and output layer are
    tied there is no `lm_head.weight`; head.dense and head.norm exist if the spec's head has them.

    Args:
        spec: the architecture.
        backend: attention backend of every layer ("auto" chooses by layer and call).

    Attributes: see `Transformer`.
    """

    def __init__(self, spec: ModelSpec, backend: str = "auto") -> None:
        super().__init__(spec)
        self.model = TransformerStack(spec, backend)
        self.head = HeadLayer(spec, self.model) if spec.head.dense is not None else None
        self.lm_head = make_output(spec, spec.head.inputs(spec.width, spec.columns), self.model)
