"""The one decoder: every family of causal language models is a spec of it.

Legend: B rows, T slots of the call, N slots whose logits are wanted, M width of the model, V vocab.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headway.cache import BatchCache, PagedCache
from headway.errors import ConfigError, DataError
from headway.models.inputs import checked_tokens
from headway.models.pasts import make_paged_cache
from headway.models.spec import ModelSpec
from headway.models.stack import TransformerStack, make_output, scaled
from headway.nn import Losses, output_cross_entropy
from headway.nn.block import Checkpointing
from headway.nn.linear import Linear
from headway.parallel import ContextParallel, Shards
from headway.tokens import Tokens


class Autoregressive(nn.Module):
    """What a decoder and an encoder-decoder are alike: a stack whose states say the next token, and its output layer.

    Attributes:
        gradient_checkpointing: what the backward of training computes again, from its input, instead of keeping it:
            "none", "block", or in each block "attention" or "feed_forward". Less memory, up to one forward more.
        shards: how its layers are shared by ranks (`headway.models.tensor_parallel`); None where they are not.
    """

    shards: Shards | None = None
    lm_head: Linear

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.gradient_checkpointing: Checkpointing = "none"

    @property
    def stack(self) -> TransformerStack:
        """The layers that logits are computed from."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., M] -> [..., V]: the output layer, which is the embedding when they are tied."""
        logits: Tensor = self.lm_head(scaled(hidden, self.spec.logit_scale))
        return logits

    def losses(self, hidden: Tensor, targets: Tensor, label_smoothing: float | None) -> Losses:
        """Of targets [B, T] under the states [B, T, M], without ever holding all logits."""
        x = scaled(hidden, self.spec.logit_scale)
        return output_cross_entropy(
            self.lm_head, x, targets, self.spec.vocab, label_smoothing=label_smoothing
        )

    def make_cache(self, batch: int = 1, *, slack: int = 0, dtype: torch.dtype | None = None) -> BatchCache:
        """An empty past of `batch` rows, of which the last `slack` tokens can always be trimmed. `dtype` is that of the
        weights unless given (autocast makes keys of another; torch.int8 rounds them). Raises CacheError for a layer
        whose queries see later tokens, ConfigError for slack with linear attention, whose sums cannot be trimmed."""
        pages = make_paged_cache(self.stack, slack=slack, dtype=dtype)
        return BatchCache(pages, batch)


class Decoder(Autoregressive):
    """A causal language model. Parameter names are those of Hugging Face's LLaMA; when embedding and output
    layer are tied there is no `lm_head.weight`.

    Args:
        spec: what it is.
        backend: of attention, in every layer ("auto" chooses by layer and call).

    Attributes: see `Autoregressive`.
    """

    def __init__(self, spec: ModelSpec, backend: str = "auto") -> None:
        super().__init__(spec)
        self.model = TransformerStack(spec, backend)
        self.lm_head = make_output(spec, spec.width, self.model)

    @property
    def stack(self) -> TransformerStack:
        """`model`."""
        return self.model

    def forward(
        self,
        ids: Tensor,
        *,
        tokens: Tokens | None = None,
        cache: BatchCache | PagedCache | None = None,
        logits_for: Tensor | slice | None = None,
        targets: Tensor | None = None,
        label_smoothing: float | None = None,
        context: ContextParallel | None = None,
    ) -> Tensor | Losses:
        """Logits of the token that follows each slot; given the tokens that do follow, their summed loss.

        Args:
            ids: token ids [B, T]; those of empty slots are not looked at.
            tokens: [B|1, T]; unless given, every slot is a token, numbered from 0 or from where `cache`
                ended. Packed documents are Tokens.packed, padding is Tokens.from_lengths.
            cache: past keys and values (`make_cache`); this chunk is added.
            logits_for: slots whose logits are computed, all unless given: a slice of slots; slot numbers [N]
                for all rows, or [B, N] row by row; a bool mask [B, T].
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
        mask = logits_for if isinstance(logits_for, Tensor) and logits_for.dtype == torch.bool else None
        slots = logits_for if mask is None else None
        hidden = self.hidden(ids, tokens=tokens, cache=cache, context=context, slots=slots)
        if targets is not None:
            return self.losses(hidden, targets, label_smoothing)
        return self.logits(hidden if mask is None else select_slots(hidden, mask))

    def hidden(
        self,
        ids: Tensor,
        *,
        tokens: Tokens | None = None,
        cache: BatchCache | PagedCache | None = None,
        context: ContextParallel | None = None,
        slots: Tensor | slice | None = None,
    ) -> Tensor:
        """The states [B, T, M] that logits are computed from, or [B, N, M] of `slots`: a slice, or slot numbers [N] or
        [B, N]. Other arguments as in `forward`."""
        tokens = checked_tokens(self.spec, ids, tokens, cache, context)
        hidden: Tensor = self.model(
            ids,
            tokens,
            cache=cache,
            gradient_checkpointing=self.gradient_checkpointing,
            context=context,
            slots=None if slots is None else slot_numbers(slots, *ids.shape).to(ids.device),
        )
        return hidden


def check_targets(
    ids: Tensor,
    targets: Tensor | None,
    logits_for: Tensor | slice | None,
    label_smoothing: float | None = None,
) -> None:
    """DataError unless there is one target for each of the ids; ConfigError beside `logits_for`, and for label
    smoothing without targets."""
    if targets is None:
        if label_smoothing is not None:
            raise ConfigError(
                "label_smoothing smooths targets, and none are given; give targets=, or drop it"
            )
        return
    if logits_for is not None:
        raise ConfigError(
            "targets and logits_for are given: losses are those of all targets that are not -100, and there are no "
            "logits to choose from; drop one of them"
        )
    if targets.shape != ids.shape:
        raise DataError(f"targets {[*targets.shape]} do not fit ids {[*ids.shape]}; give one for each slot")


def select_slots(x_BTM: Tensor, which: Tensor | slice) -> Tensor:
    """The slots that `logits_for` of `Decoder.forward` names: [B, N, M], or [n, M] for a bool mask.

    Raises DataError for a slot that is not there, or a tensor of a wrong kind."""
    batch, count, width = x_BTM.shape
    if isinstance(which, Tensor) and which.dtype == torch.bool:
        if which.shape != (batch, count):
            raise DataError(
                f"logits_for: a mask must be [{batch}, {count}] like the ids, got {list(which.shape)}"
            )
        return x_BTM[which]
    at = slot_numbers(which, batch, count).to(x_BTM.device)
    return x_BTM.gather(1, at.unsqueeze(-1).expand(-1, -1, width))


def slot_numbers(which: Tensor | slice, batch: int, count: int) -> Tensor:
    """The slots, of `count`, that a slice or numbers from either end name, row by row: [B, N].

    Raises DataError as `select_slots`."""
    if isinstance(which, slice):
        return torch.arange(count)[which].expand(batch, -1)
    rows_fit = which.dim() == 1 or (which.dim() == 2 and which.shape[0] == batch)
    if which.is_floating_point() or not rows_fit:
        raise DataError(
            f"logits_for: slot numbers [N] or [{batch}, N], a bool mask or a slice are needed, "
            f"got {which.dtype} {list(which.shape)}"
        )
    if which.numel() and not -count <= int(which.min()) <= int(which.max()) < count:
        raise DataError(f"logits_for: slots must lie in {-count}..{count - 1}, got {which.tolist()}")
    return (which % count if count else which).expand(batch, -1)
