"""The one encoder-decoder: the Transformer of 2017, and what came of it.

Legend: B rows, S source slots, T target slots of the call, M width, V vocab.
"""

from dataclasses import dataclass

from torch import Tensor

from headway.attention import KeyValues
from headway.errors import ConfigError
from headway.models.decoder import Autoregressive
from headway.models.inputs import checked_tokens
from headway.models.spec import ModelSpec
from headway.models.stack import TransformerStack, make_output
from headway.nn import Losses
from headway.nn.record import Record
from headway.tokens import Tokens


@dataclass(frozen=True, eq=False)
class Memory:
    """An encoder's last states [B, S, M] and their tokens."""

    states: Tensor
    tokens: Tokens


class EncoderDecoder(Autoregressive):
    """p(target | source): an encoder over the source, and a decoder that attends to the encoder's last states
    (Vaswani et al. 2017, section 3).

    Parameters: `encoder` and `decoder` are the stacks, `lm_head` the output layer. A shared embedding is the
    decoder's; where all three are one there is only decoder.embed_tokens.weight.

    Args:
        spec: the decoder's, with `spec.encoder`.
        backend: of attention, in every layer.

    Attributes: see `Transformer`.
    """

    def __init__(self, spec: ModelSpec, backend: str = "auto") -> None:
        super().__init__(spec)
        if spec.encoder is None:
            raise ConfigError("EncoderDecoder: the spec has no encoder; give ModelSpec(encoder=...)")
        self.encoder = TransformerStack(spec.encoder, backend, embedding=not spec.shared_embedding)
        self.decoder = TransformerStack(spec, backend)
        self.head = None
        self.lm_head = make_output(spec, spec.width, self.decoder)

    @property
    def stack(self) -> TransformerStack:
        """`decoder`."""
        return self.decoder

    def forward(  # type: ignore[override]
        self,
        source: Tensor,
        ids: Tensor,
        *,
        source_tokens: Tokens | None = None,
        tokens: Tokens | None = None,
        logits_for: Tensor | slice | None = None,
        targets: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor | Losses:
        """Logits [B, T, V] of the target token that follows each slot (teacher forcing); given the tokens that do
        follow, their summed loss.

        Args:
            source: ids [B, S] of what is translated.
            ids: target ids [B, T], shifted: the first is the one that decoding starts from.
            source_tokens, tokens: [B|1, S] and [B|1, T]; every slot is a token unless given.
            logits_for: slots whose logits are computed; as in `Decoder.forward`.
            targets: [B, T] the token that follows each slot, `IGNORE_INDEX` (-100) where none is trained.
            label_smoothing: share of each target that all tokens have evenly; see `chunked_cross_entropy`.
        With targets it returns `Losses`, without ever holding all logits; `each` is differentiable.
        Raises DataError and ConfigError as `Decoder.forward` does.
        """
        memory = self.encode(source, tokens=source_tokens)
        if memory.states.shape[0] != ids.shape[0]:
            raise ConfigError(
                f"EncoderDecoder: {source.shape[0]} sources and {ids.shape[0]} targets; give as many of both"
            )
        return super().forward(
            ids,
            tokens=tokens,
            memory=self.memory_keys(memory),
            logits_for=logits_for,
            targets=targets,
            label_smoothing=label_smoothing if targets is not None else label_smoothing or None,
        )

    def encode(self, source: Tensor, *, tokens: Tokens | None = None, record: Record | None = None) -> Memory:
        """The encoder's last states of `source` [B, S]; `record` as in `TransformerStack.forward`."""
        assert self.spec.encoder is not None
        tokens = checked_tokens(self.spec.encoder, source, tokens)
        table = self.decoder.embed_tokens if self.spec.shared_embedding else None
        states = self.encoder(
            source,
            tokens,
            embedding=table,
            gradient_checkpointing=self.gradient_checkpointing,
            record=record,
        )
        return Memory(states, tokens)

    def memory_keys(self, memory: Memory) -> list[KeyValues]:
        """Every decoder layer's keys and values of the encoder's states."""
        across = [block.cross_attn for block in self.decoder.blocks]
        return [layer.keys(memory.states, memory.tokens) for layer in across if layer is not None]
