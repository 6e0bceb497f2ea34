"""The base class of decoders, encoders and encoder-decoders: a stack whose last states a head reads.

Legend: B rows, T slots of the call, N selected slots, M width of the model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headway.attention import KeyValues
from headway.cache import BatchCache, PagedCache
from headway.errors import ConfigError, DataError
from headway.models.inputs import checked_tokens
from headway.models.spec import ModelSpec
from headway.models.stack import TransformerStack
from headway.nn.block import Checkpointing
from headway.nn.record import Record
from headway.parallel import ContextParallel, Shards
from headway.tokens import Tokens


class Transformer(nn.Module):
    """A stack of layers, and what is computed from its last states.

    Attributes:
        gradient_checkpointing: what the backward pass recomputes in training instead of storing it: "none", "block",
            or in each block "attention" or "feed_forward". Saves memory, and costs up to one forward more.
        shards: how ranks share its layers (`headway.models.tensor_parallel`); None if they do not.
    """

    model: TransformerStack
    shards: Shards | None = None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.gradient_checkpointing: Checkpointing = "none"

    @property
    def stack(self) -> TransformerStack:
        """The stack whose last states the head reads."""
        return self.model

    def hidden(
        self,
        ids: Tensor,
        *,
        tokens: Tokens | None = None,
        types: Tensor | None = None,
        cache: BatchCache | PagedCache | None = None,
        memory: Sequence[KeyValues] | None = None,
        context: ContextParallel | None = None,
        slots: Tensor | slice | None = None,
        record: Record | None = None,
    ) -> Tensor:
        """Returns the last states [B, T, M], or with `slots` only theirs: [B, N, M], or [number of True, M] for a mask.

        Args:
            ids: token ids [B, T]; ids in empty slots are ignored.
            tokens: [B|1, T]; if None every slot is a token, numbered from 0 or from where `cache` ended. See
                Tokens.packed for packed documents, Tokens.from_lengths for padding.
            slots: a slice of slots; slot numbers [N] for all rows, or [B, N] for each row; a bool mask [B, T].
            types, cache, memory, context, record: as in `TransformerStack.forward`; the cache may also be a
                BatchCache.

        Raises DataError for a slot out of range, or slots of a wrong type or shape, and as `Decoder.forward` does.
        """
        tokens = checked_tokens(self.spec, ids, tokens, cache, context)
        mask = slots if isinstance(slots, Tensor) and slots.dtype == torch.bool else None
        if mask is not None and mask.shape != ids.shape:
            raise DataError(f"logits_for: a mask must be {[*ids.shape]} like the ids, got {[*mask.shape]}")
        selected = (
            None if slots is None or mask is not None else slot_numbers(slots, *ids.shape).to(ids.device)
        )
        hidden: Tensor = self.stack(
            ids,
            tokens,
            types=types,
            cache=cache,
            memory=memory,
            gradient_checkpointing=self.gradient_checkpointing,
            context=context,
            slots=selected,
            record=record,
        )
        return hidden if mask is None else hidden[mask]


def check_targets(
    ids: Tensor,
    targets: Tensor | None,
    logits_for: Tensor | slice | None,
    label_smoothing: float | None = None,
) -> None:
    """Raises DataError unless there is one target for each id; ConfigError for targets together with `logits_for`,
    and for label smoothing without targets."""
    if targets is None:
        if label_smoothing is not None:
            raise ConfigError("label_smoothing needs targets; give targets=, or drop label_smoothing=")
        return
    if logits_for is not None:
        raise ConfigError(
            "targets and logits_for exclude each other: the loss covers all targets that are not -100; drop one of them"
        )
    if targets.shape != ids.shape:
        raise DataError(f"targets {[*targets.shape]} must have the shape of ids {[*ids.shape]}")


def slot_numbers(slots: Tensor | slice, batch: int, count: int) -> Tensor:
    """Returns the slots, of `count`, that a slice or numbers (negative from the end) select in each row: [B, N].

    Raises DataError for a slot out of range, a slice that goes backwards, or a tensor of a wrong type or shape.
    """
    if isinstance(slots, slice):
        if slots.step is not None and slots.step < 1:
            raise DataError(
                f"logits_for: a slice must go forward, got a step of {slots.step}; give slot numbers instead"
            )
        return torch.arange(count)[slots].expand(batch, -1)
    rows_fit = slots.dim() == 1 or (slots.dim() == 2 and slots.shape[0] == batch)
    if slots.is_floating_point() or not rows_fit:
        raise DataError(
            f"logits_for must be slot numbers [N] or [{batch}, N], a bool mask or a slice, "
            f"got {slots.dtype} {list(slots.shape)}"
        )
    if slots.numel() and not -count <= int(slots.min()) <= int(slots.max()) < count:
        raise DataError(f"logits_for: slots must lie in {-count}..{count - 1}, got {slots.tolist()}")
    return (slots % count if count else slots).expand(batch, -1)
