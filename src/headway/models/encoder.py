"""The one encoder class: a bidirectional stack and a head.

Legend: B rows, T slots, M width, E columns of the embedding, V vocab, C labels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.models.mixers import norm_of
from headway.models.spec import ModelSpec
from headway.models.stack import TransformerStack, make_output
from headway.models.transformer import Transformer, check_targets
from headway.nn import IGNORE_INDEX, Linear, Losses, output_cross_entropy, trained_rows
from headway.nn.feedforward import named_activation
from headway.nn.scale import capped, scaled
from headway.parallel import ContextParallel
from headway.tokens import Tokens


class Encoder(Transformer):
    """A bidirectional encoder like BERT: every token attends to both sides, as far as the patterns allow.

    Parameters: `model` is the stack, `head` the layers on top of it (`headway.models.Head`): head.dense, head.norm
    (masked-lm), head.out; a tied masked-lm head has no head.out.weight.

    Args:
        spec: the architecture; `spec.causal` must be False.
        backend: attention backend of every layer.

    Attributes: see `Transformer`.
    """

    def __init__(self, spec: ModelSpec, backend: str = "auto") -> None:
        super().__init__(spec)
        if spec.causal or spec.encoder is not None:
            raise ConfigError("Encoder: this spec is a decoder's; build it with headway.models.build(spec)")
        self.model = TransformerStack(spec, backend)
        self.head = HeadLayer(spec, self.model)

    def forward(
        self,
        ids: Tensor,
        *,
        tokens: Tokens | None = None,
        types: Tensor | None = None,
        logits_for: Tensor | slice | None = None,
        targets: Tensor | None = None,
        context: ContextParallel | None = None,
    ) -> Tensor | Losses:
        """Returns the output of the head (see `Head`); for a masked-lm head with targets, their summed loss.

        Args:
            ids: token ids [B, T]; ids in empty slots are ignored.
            tokens: [B|1, T]; if None every slot is a token. Mark global tokens with `tokens.with_global(...)`.
            types: token types [B, T] (BERT's segments), all 0 if None.
            logits_for: for heads with an output per token: the slots to compute, as in `Decoder.forward`.
            targets: [B, T], the token that belongs in each slot; `IGNORE_INDEX` (-100) if it is not trained on. The
                head is computed for the other slots only, and hits are counted.
            context: context parallelism: rows whose tokens are sharded over ranks, as in `Decoder.forward`.
        Raises:
            DataError: ids, types or targets outside their tables. ConfigError: tokens that do not fit ids, rows beyond
                the context limit, logits_for or context with a head that has one output per row, targets with a head
                other than masked-lm.
        """
        if context is not None and self.spec.head.task in ("classify", "embed"):
            raise ConfigError(
                f"Encoder: Head({self.spec.head.task!r}) needs whole rows, but context parallel shards them; train "
                "this head without it"
            )
        if logits_for is not None and self.spec.head.task in ("classify", "embed"):
            raise ConfigError(
                f"Encoder: Head({self.spec.head.task!r}) gives one output per row, not per slot; drop logits_for"
            )
        check_targets(ids, targets, logits_for)
        hidden = self.hidden(ids, tokens=tokens, types=types, context=context, slots=logits_for)
        if targets is not None:
            return self.head.cross_entropy(hidden, targets)
        tokens = Tokens.range(ids.shape[1], device=ids.device) if tokens is None else tokens
        out: Tensor = self.head(hidden, tokens)
        return out


class HeadLayer(nn.Module):
    """`spec.head` as a module on top of the stack `below`: dense, norm and out, each if the head has it. For a
    decoder it has no `out`: the output layer is the decoder's own."""

    def __init__(self, spec: ModelSpec, below: TransformerStack) -> None:
        super().__init__()
        head = spec.head
        self.task, self.pool, self.unit = head.task, head.pool, head.unit
        self.vocab, self.logit_scale, self.logit_cap = spec.vocab, spec.logit_scale, spec.logit_cap
        masked = head.task == "masked-lm"
        inner = spec.head.inputs(spec.width, spec.columns)
        self.dense = Linear(spec.width, inner, bias=head.bias) if head.dense is not None else None
        self.act = torch.tanh if head.dense == "tanh" else named_activation(head.dense or "relu")
        has_norm = head.needs_vocab and head.dense is not None
        self.norm = norm_of(spec)(inner) if has_norm else None
        self.drop = nn.Dropout(0.0 if head.task == "answer" else spec.dropout)
        self.drop_pooled = spec.pooled_dropout and head.task == "classify" and head.dense is not None
        self.out: nn.Module | None = None
        if masked:
            self.out = make_output(spec, inner, below)
        elif head.outputs:
            self.out = Linear(spec.width, head.outputs)

    def forward(self, hidden: Tensor, tokens: Tokens) -> Tensor:
        """Returns the output, as in `Head`, for the last states [B, T, M], or those of the selected slots."""
        x = hidden
        if self.task in ("classify", "embed"):
            x = pooled(hidden, tokens, self.pool)
            x = self.drop(x) if self.drop_pooled else x
        x = self.before_output(x)
        if self.task == "masked-lm":
            assert self.out is not None
            return capped(self.out(scaled(x, self.logit_scale)), self.logit_cap)
        if self.out is not None:
            x = self.out(self.drop(x))
        return F.normalize(x, dim=-1) if self.unit else x

    def cross_entropy(self, hidden: Tensor, targets: Tensor) -> Losses:
        """Returns the `Losses` of the last states [B, T, M] for targets [B, T], computed only for targets that are not
        ignored.

        Raises ConfigError if the head has no output over the vocab.
        """
        if self.task != "masked-lm" or self.out is None:
            raise ConfigError(
                f"Encoder: targets need Head('masked-lm'), this model has Head({self.task!r}); compute the loss from "
                "its outputs"
            )
        mask = targets != IGNORE_INDEX
        rows, wanted = trained_rows(hidden, targets)
        x = scaled(self.before_output(rows), self.logit_scale)
        losses = output_cross_entropy(self.out, x, wanted, self.vocab, cap=self.logit_cap, hits=True)
        assert losses.hits is not None
        each = losses.each.new_zeros(targets.shape).masked_scatter(mask, losses.each)
        return losses._replace(each=each, hits=torch.zeros_like(mask).masked_scatter(mask, losses.hits))

    def before_output(self, x: Tensor) -> Tensor:
        """Returns the input of `out` for x [..., M]: applies dense and norm, if the head has them."""
        x = x if self.dense is None else self.act(self.dense(x))
        return x if self.norm is None else self.norm(x)


def pooled(hidden: Tensor, tokens: Tokens, how: str) -> Tensor:
    """Returns one vector per row, [B, M]: the state of its first or last token, or the mean over its tokens. For
    packed documents, one per document, [N, M], row by row in the order of document numbers.

    A row without tokens gives zeros.
    """
    rows = hidden.shape[0]
    if tokens.document is not None:
        return _pooled_documents(hidden, tokens.expand(rows), how)
    if how in ("first", "last"):
        index = tokens.index.expand(rows, -1)
        at = torch.zeros_like(index[:, :1]) if how == "first" else index.amax(1, keepdim=True).clamp(min=0)
        return ((index == at).to(hidden.dtype).unsqueeze(1) @ hidden).squeeze(1)
    valid = tokens.valid.expand(rows, -1)
    states = torch.where(valid.unsqueeze(-1), hidden, 0)
    return states.sum(1) / valid.sum(1, keepdim=True).clamp(min=1)


def _pooled_documents(hidden: Tensor, tokens: Tokens, how: str) -> Tensor:
    """Returns `pooled` for each document; documents do not affect each other, even if one holds NaN."""
    assert tokens.document is not None
    rows = torch.arange(tokens.rows, device=tokens.device).unsqueeze(1)
    # numbers that are unique over rows: with documents 0, 1, 2, those of row 1 become 3, 4, 5
    numbers = rows * (tokens.document.amax() + 1) + tokens.document
    pooled_slots = tokens.index == 0 if how == "first" else tokens.valid
    if how == "last":
        most = tokens.index.new_full((int(numbers.amax()) + 1,), -1)
        most = most.scatter_reduce(0, numbers[pooled_slots], tokens.index[pooled_slots], "amax")
        pooled_slots = pooled_slots & (tokens.index == most[numbers])
    _, group, counts = numbers[pooled_slots].unique(return_inverse=True, return_counts=True)
    wide = hidden[pooled_slots].to(torch.promote_types(hidden.dtype, torch.float32))
    sums = wide.new_zeros(len(counts), hidden.shape[2]).index_add(0, group, wide)
    mean: Tensor = sums / counts.unsqueeze(1)
    return mean.to(hidden.dtype)
