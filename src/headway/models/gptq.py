"""GPTQ: chooses quantization codes so that layer outputs change least (Frantar et al. 2023, "GPTQ", section 3.3,
algorithm 1).

    H = sum over inputs x of x x^T, with a share of its mean diagonal added to the diagonal
    U = the upper Cholesky factor of H^-1
    for each input i:  q_i = round(w_i),  e = (w_i - q_i) / U[i, i],  w_j -= e U[i, j] for all j > i

Legend: I inputs, O outputs, G groups of inputs.
"""

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.quantization import QuantizedMatrix, quantize_clipped, round_weights

DAMPING = 0.01
BLOCK = 128
"""Number of inputs whose errors are accumulated before the weights of later inputs are updated."""


def gptq(weight: Tensor, hessian: Tensor, bits: int, group: int | None = None) -> QuantizedMatrix:
    """Returns symmetric codes of weights [O, I], given H [I, I] of the inputs.

    Scales are those of `quantize_clipped`. Inputs are rounded in descending order of H[i, i] (the paper's code calls
    it "act-order") with the scales of the original weights; groups remain groups of neighbouring inputs. The factor is
    computed in float64, everything else in float32, or in float64 for float64 weights. Raises ConfigError if H is not
    finite.
    """
    outputs, inputs = weight.shape
    group_size = min(group or inputs, inputs)
    w = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
    w[:, hessian.diagonal() == 0] = 0  # weights of inputs that are always 0 do not matter
    scale = quantize_clipped(w, bits, group_size).scale
    order = hessian.diagonal().argsort(descending=True)
    factor = inverse_factor(hessian[order][:, order]).to(w.dtype)
    w, groups = w[:, order], order // group_size
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    for first in range(0, inputs, BLOCK):
        last = min(first + BLOCK, inputs)
        errors = w.new_empty(outputs, last - first)
        for i in range(first, last):
            column = round_weights(w[:, i : i + 1], scale[:, groups[i], None], None, bits, 1)
            codes[:, order[i]] = column.codes[:, 0]
            e = (w[:, i] - column.dequantize(w.dtype)[:, 0]) / factor[i, i]
            w[:, i + 1 : last].addr_(e, factor[i, i + 1 : last], alpha=-1)
            errors[:, i - first] = e
        w[:, last:].addmm_(errors, factor[first:last, last:], alpha=-1)
    return QuantizedMatrix(codes, scale, None, bits, group_size)


def inverse_factor(hessian: Tensor) -> Tensor:
    """Returns the upper triangular U [I, I] with U^T U = (H + damping)^-1, in float64. Inputs that are always 0 get
    H[i, i] = 1."""
    h = hessian.double().clone()
    if not h.isfinite().all():
        raise ConfigError(
            "gptq: inputs of a layer are not finite; the model overflows on the calibration text"
        )
    diagonal = h.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor
