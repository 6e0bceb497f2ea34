"""Several residual streams, of which each layer computes one (AltUp), and a low-rank branch beside attention (LAuReL).

Legend: B rows, T tokens, S streams, M width of a stream, R rank.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway.errors import ConfigError, check_whole
from headway.nn.linear import Linear
from headway.nn.scale import scaled

LEAST = 1e-5
"""Lower bound of the mean square that a stream is divided by."""


@dataclass(frozen=True)
class AltUp:
    """Alternating updates: a residual stream of S times the width, of which a layer computes one part and predicts the
    others (Baykal et al. 2023, "Alternating Updates for Efficient Transformers", section 3; Gemma 3n).

    streams: S.   clip: in training, the largest absolute value of a coefficient."""

    streams: int = 4
    clip: float = 120.0

    def __post_init__(self) -> None:
        check_whole("AltUp: streams", self.streams, 2)
        if not 0 < self.clip < math.inf:
            raise ConfigError(f"AltUp: clip must be a finite number above 0, got {self.clip!r}")


class AlternatingUpdates(nn.Module):
    """Predicts and corrects the streams x_1 .. x_S around a layer y = layer(p_1), with r(z) = tanh(W norm(z) / M):

        p_i = x_i + sum over j of a_ij x_j        a = A r(x_1)        predicted
        x_i = p_i + (1 + b_i) (y - p_1)           b = B r(y)          corrected

    Parameters under the names of Hugging Face: modality_router W [S, M], prediction_coefs A [S S, S], correction_coefs
    B [S, S], router_norm [M], and correct_output_scale [M], which multiplies x_1 for embeddings of the layer."""

    def __init__(self, altup: AltUp, width: int, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        streams = altup.streams
        self.altup, self.width = altup, width
        self.correct_output_scale = nn.Parameter(torch.ones(width))
        self.correction_coefs = nn.Parameter(torch.zeros(streams, streams))
        self.prediction_coefs = nn.Parameter(torch.zeros(streams * streams, streams))
        self.modality_router = Linear(width, streams, bias=False)
        self.router_norm = norm()

    def predict(self, x_BTSM: Tensor) -> Tensor:
        """Predicts all streams before the layer: [B, T, S, M] -> [B, T, S, M]."""
        a = self._coefficients(self.prediction_coefs, x_BTSM[..., 0, :])
        predicted: Tensor = x_BTSM + a.unflatten(-1, (self.altup.streams, -1)) @ x_BTSM
        return predicted

    def correct(self, predicted: Tensor, y_BTM: Tensor) -> Tensor:
        """Corrects the predicted streams [B, T, S, M] by the output of the layer [B, T, M]; returns [B, T, S, M]."""
        b = self._coefficients(self.correction_coefs, y_BTM) + 1.0
        return predicted + b[..., None] * (y_BTM - predicted[..., 0, :])[..., None, :]

    def add_to_others(self, x_BTSM: Tensor, added: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the streams with added(scale x_1) [B, T, M] added to all of them but the first."""
        first = x_BTSM[..., :1, :].clone()  # a view would keep all streams for the backward
        more = added(first[..., 0, :] * self.correct_output_scale)
        return torch.cat((first, x_BTSM[..., 1:, :] + more[..., None, :]), -2)

    def _coefficients(self, matrix: Tensor, z_BTM: Tensor) -> Tensor:
        """Returns the product of the router's output with `matrix` [N, S], for z [B, T, M]: [B, T, N]. These
        matrices stay unchanged when linear layers are quantized or adapted."""
        routed = self.modality_router(self.router_norm(z_BTM) * self.width**-1.0)
        dtype = torch.promote_types(z_BTM.dtype, torch.float32)
        matrix = matrix.clamp(-self.altup.clip, self.altup.clip) if self.training else matrix
        routed = routed.to(dtype).tanh().to(z_BTM.dtype)
        return torch.sum(routed[..., None, :] * matrix, -1)


class Streams(nn.Module):
    """Maps embeddings to the streams of `AltUp`, and these to the last hidden states, by products of M x M that are
    scaled to the mean square of the first stream.

        x_1 = x,   x_i = |x| U_i x / |U_i x|            into
        x = (x_1 + sum of |x_1| V_i x_i / |V_i x_i|) / S        out

    Parameters: into U, out V: S - 1 matrices [M, M] each."""

    def __init__(self, altup: AltUp, width: int) -> None:
        super().__init__()
        self.into, self.out = (
            nn.ModuleList(Linear(width, width, bias=False) for _ in range(altup.streams - 1)) for _ in "io"
        )

    def split(self, x_BTM: Tensor) -> Tensor:
        """Returns the streams of the embeddings, concatenated: [B, T, M] -> [B, T, S M]."""
        return torch.cat((x_BTM, *(_as_large(layer(x_BTM), x_BTM) for layer in self.into)), -1)

    def join(self, x: Tensor) -> Tensor:
        """Returns the last hidden states of the streams: [B, T, S M] -> [B, T, M]."""
        first, *others = x.chunk(len(self.out) + 1, -1)
        pairs = zip(self.out, others, strict=True)
        return torch.stack((first, *(_as_large(layer(other), first) for layer, other in pairs))).mean(0)


def _as_large(y: Tensor, x: Tensor) -> Tensor:
    """Returns y with each token scaled to the mean square of x."""
    target, square = (z.square().mean(-1, keepdim=True) for z in (x, y))
    return y * (target.sqrt() / square.clamp(min=LEAST).sqrt())


class LaurelProduct(nn.Module):
    """A low-rank branch beside a sub-layer, x + norm(x L R) (Menghani et al. 2024, "LAuReL: Learned Augmented Residual
    Layer", section 2.2; Gemma 3n).

    Parameters under the names of Hugging Face: linear_left [R, M], linear_right [M, R], post_laurel_norm [M]."""

    def __init__(self, width: int, rank: int, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.linear_left = Linear(width, rank, bias=False)
        self.linear_right = Linear(rank, width, bias=False)
        self.post_laurel_norm = norm()

    def join(self, x_BTM: Tensor, y_BTM: Tensor, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Joins a residual stream x, the output y of attention and its input `normed`. Returns two terms whose sum
        is (x + y + normed + norm(normed L R)) / sqrt(2)."""
        beside: Tensor = normed + self.post_laurel_norm(self.linear_right(self.linear_left(normed)))
        return scaled(x_BTM, 2**-0.5), scaled(y_BTM + beside, 2**-0.5)
