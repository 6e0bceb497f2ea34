"""The base of decoders, encoders and encoder-decoders: a stack, and what is computed from its last states.

Legend: B rows, T slots of the call, N slots that are wanted, M width of the model.
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
    """A stack whose last states something is computed from.

    Attributes:
        gradient_checkpointing: what the backward of training recomputes from its input instead of keeping it:
            "none", "block", or in each block "attention" or "feed_forward". Less memory, up to one forward more.
        shards: how its layers are shared by ranks (`headway.models.tensor_parallel`); None where they are not.
    """

    model: TransformerStack
    shards: Shards | None = None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.gradient_checkpointing: Checkpointing = "none"

    @property
    def stack(self) -> TransformerStack:
        """The layers whose last states the head reads."""
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
        """The last states [B, T, M]; of `slots` theirs alone: [B, N, M], or [number of True, M] of a mask.

        Args:
            ids: token ids [B, T]; those of empty slots are not looked at.
            tokens: [B|1, T]; unless given, every slot is a token, numbered from 0 or from where `cache`
                ended. Packed documents are Tokens.packed, padding is Tokens.from_lengths.
            slots: a slice of slots; slot numbers [N] for all rows, or [B, N] row by row; a bool mask [B, T].
            types, cache, memory, context, record: as in `TransformerStack.forward`; the cache may be one of rows.

        Raises DataError for a slot that is not there, or a tensor of a wrong kind, and as `Decoder.forward`."""
        tokens = checked_tokens(self.spec, ids, tokens, cache, context)
        mask = slots if isinstance(slots, Tensor) and slots.dtype == torch.bool else None
        if mask is not None and mask.shape != ids.shape:
            raise DataError(f"logits_for: a mask must be {[*ids.shape]} like the ids, got {[*mask.shape]}")
        some = None if slots is None or mask is not None else slot_numbers(slots, *ids.shape).to(ids.device)
        hidden: Tensor = self.stack(
            ids,
            tokens,
            types=types,
            cache=cache,
            memory=memory,
            gradient_checkpointing=self.gradient_checkpointing,
            context=context,
            slots=some,
            record=record,
        )
        return hidden if mask is None else hidden[mask]


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


def slot_numbers(slots: Tensor | slice, batch: int, count: int) -> Tensor:
    """The slots, of `count`, that a slice or numbers from either end name, row by row: [B, N].

    Raises DataError for a slot that is not there, or a tensor of a wrong kind."""
    if isinstance(slots, slice):
        return torch.arange(count)[slots].expand(batch, -1)
    rows_fit = slots.dim() == 1 or (slots.dim() == 2 and slots.shape[0] == batch)
    if slots.is_floating_point() or not rows_fit:
        raise DataError(
            f"logits_for: slot numbers [N] or [{batch}, N], a bool mask or a slice are needed, "
            f"got {slots.dtype} {list(slots.shape)}"
        )
    if slots.numel() and not -count <= int(slots.min()) <= int(slots.max()) < count:
        raise DataError(f"logits_for: slots must lie in {-count}..{count - 1}, got {slots.tolist()}")
    return (slots % count if count else slots).expand(batch, -1)
