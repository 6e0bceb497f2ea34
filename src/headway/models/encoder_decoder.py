"""The one encoder-decoder class: the Transformer of 2017 and its successors.

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
    """p(target | source): an encoder over the source, and a decoder that attends to the encoder's last states (Vaswani
    et al. 2017, section 3).

    Parameters: `encoder` and `decoder` are the stacks, `lm_head` the output layer. A shared embedding belongs to the
    decoder; if both embeddings and the output layer are one matrix, only decoder.embed_tokens.weight exists.

    Args:
        spec: the decoder's spec, with `spec.encoder`.
        backend: attention backend of every layer.

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
        """The decoder stack."""
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
        """Returns the logits [B, T, V] of the target token that follows each slot (teacher forcing); with `targets`,
        the summed loss instead.

        Args:
            source: source token ids [B, S].
            ids: target ids [B, T], shifted right: the first one is the decoder's start token.
            source_tokens, tokens: [B|1, S] and [B|1, T]; if None every slot is a token.
            logits_for: slots whose logits are computed, as in `Decoder.forward`.
            targets: [B, T], the token that follows each slot; `IGNORE_INDEX` (-100) if it is not trained on.
            label_smoothing: probability mass of each target that is spread evenly over all tokens; see
                `chunked_cross_entropy`.
        With targets it returns `Losses`, without materializing all logits at once; `each` is differentiable.
        Raises DataError and ConfigError as `Decoder.forward` does.
        """
        memory = self.encode(source, tokens=source_tokens)
        if memory.states.shape[0] != ids.shape[0]:
            raise ConfigError(
                f"EncoderDecoder: {source.shape[0]} sources but {ids.shape[0]} targets; give one source per target"
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
        """Returns the encoder's last states for `source` [B, S]; `record` as in `TransformerStack.forward`."""
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
        """Returns the cross-attention keys and values of the encoder's states for every decoder layer."""
        cross_layers = [block.cross_attn for block in self.decoder.blocks]
        return [layer.keys(memory.states, memory.tokens) for layer in cross_layers if layer is not None]
