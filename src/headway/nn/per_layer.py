"""Embeddings of a token for each layer, in addition to the embedding that the first layer gets.

Legend: B rows, T tokens, M width of the model, L layers, P columns for each layer.
"""

from collections.abc import Callable

from torch import Tensor, nn

from headway.nn.embeddings import TokenEmbedding
from headway.nn.feedforward import named_activation
from headway.nn.linear import Linear
from headway.nn.scale import scaled
from headway.tokens import Tokens


class PerLayerEmbedding(nn.Module):
    """The per-layer embeddings p = (norm(x W / sqrt(M)) + sqrt(P) E'[ids]) / sqrt(2), L vectors of size P for each
    token, with x the input of the first layer (Gemma 3n and 4 in `transformers`). If the vocabulary is larger than V,
    ids from V on use the row of id 0.

    Parameters: embed_tokens [V, L P], proj [L P, M], norm [P]."""

    def __init__(
        self, vocab: int, width: int, layers: int, columns: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.width, self.columns = width, columns
        self.embed_tokens = TokenEmbedding(vocab, layers * columns)
        self.proj = Linear(width, layers * columns, bias=False)
        self.norm = norm(columns)

    def forward(self, ids: Tensor, tokens: Tokens, x_BTM: Tensor) -> Tensor:
        """Returns the embeddings of ids [B, T] with x [B, T, M]: [B, T, L, P]."""
        known_ids = ids.where(ids < self.embed_tokens.vocab, 0)
        of_token = scaled(self.embed_tokens(known_ids, tokens), self.columns**0.5)
        of_x = scaled(self.proj(x_BTM), self.width**-0.5)
        p, embedded = (y.unflatten(-1, (-1, self.columns)) for y in (of_x, of_token))
        return scaled(self.norm(p) + embedded, 2**-0.5)


class PerLayerInput(nn.Module):
    """The term norm((act(x Wg) * p) Wp) that a block adds to x, from a token's embedding p for its layer.

    Parameters: gate [P, M], proj [M, P], norm [M]."""

    def __init__(self, width: int, columns: int, activation: str, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.act = named_activation(activation)
        self.gate = Linear(width, columns, bias=False)
        self.proj = Linear(columns, width, bias=False)
        self.norm = norm()

    def forward(self, x_BTM: Tensor, p_BTP: Tensor) -> Tensor:
        """Returns the term for x [B, T, M] and p [B, T, P]: [B, T, M]."""
        y: Tensor = self.norm(self.proj(self.act(self.gate(x_BTM)) * p_BTP))
        return y
