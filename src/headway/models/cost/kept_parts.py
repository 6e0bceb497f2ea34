"""Bytes that parts of a layer save for the backward pass, per token.

Legend: as in `headway.models.cost.activations`.
"""

from collections.abc import Sequence

from headway.models.spec import ModelSpec
from headway.native.interface import ACTIVATIONS
from headway.nn import Experts


def per_layer_bytes(spec: ModelSpec, layers: int, e: int) -> int:
    """Returns the bytes of one token's per-layer embeddings: the input of their norm; and in each of `layers` layers
    the gate, its activation, the product with the embedding, and the input and result of the norm that follows."""
    each, m = spec.per_layer_embedding, spec.width
    root = max(e, 4) * (1 + (spec.norm == "layer"))
    embedded = spec.layers * (input_size(spec, e) * each + root)
    return (
        embedded + spec.layers * e * each + layers * (3 * e * each + e * m + norm_bytes(spec, m, e) - e * m)
    )


def stream_bytes(spec: ModelSpec, layers: int, attended: int, fed: int, e: int) -> int:
    """Returns the bytes per token that are saved beyond those of a single residual stream.

    With S streams (AltUp), for each layer: the S streams, a copy of the first, the layer's output, its difference from
    the prediction, the inputs of both routers, the first stream before the per-layer embedding, and coefficients; at
    both ends the S - 1 products and the streams. Besides: the result of LAuReL's low rank, and sparse gates.
    """
    m, w = spec.width, max(e, 4)
    total: int = spec.laurel and attended * (e * spec.laurel + norm_bytes(spec, m, e) - e * m)
    total += e * sum(
        sorted((bool(s) * spec.hidden_of(i) for i, s in enumerate(spec.mlp_sparsity)), reverse=True)[:fed]
    )
    if spec.altup is None:
        return total
    s = spec.altup.streams
    routed = w * (2 * s + 2) + 2 * s * e * (w > e) + e * (s * s + s)
    ends = e * (m * (3 * s - 1) + 8 * (s - 1))
    return total + ends + layers * (e * m * (s + 5 + bool(spec.per_layer_embedding)) + routed)


def routing_bytes(spec: ModelSpec, experts: Experts | None, e: int) -> int:
    """Returns the bytes per token of routing and expert rows, besides the experts' hidden units.

    The router's input if it is widened; its scores, in training once more for each router loss
    (`headway.nn.router_losses`); twice the divisor of the weights; for each chosen expert the weight (twice if it is
    normalized, and once more in the dtype of the model), the expert's number and the places in both orders, 8 bytes
    each; input and output rows. For a shared expert with a gate: its output, and the gate's.
    """
    if experts is None:
        return 0
    w, m, k = max(e, 4), spec.width, experts.top
    weights = w * (1 + experts.normalized) + e * (w > e)
    scores = experts.count * (1 + bool(experts.aux_loss_coef) + bool(experts.z_loss_coef))
    routing = w * (m * (w > e) + scores + 2 * experts.normalized)
    return routing + k * (weights + 24 + 2 * e * m) + experts.shared_gate * e * (m + 1)


def spared_bytes(spec: ModelSpec, experts: Experts | None, e: int) -> int:
    """Returns the part of `routing_bytes` that `headway.nn.expert_rows` does not save per token, in float32: input and
    output rows, the input of the down projection, and one of the orders."""
    whole = spec.gated and not (spec.mlp_bias or spec.activation_dropout)
    if experts is None or e != 4 or not whole or spec.activation not in ACTIVATIONS:
        return 0
    return experts.top * (e * (2 * spec.width + experts.hidden) + 8)


def norm_bytes(spec: ModelSpec, width: int, e: int) -> int:
    """Returns the bytes that one norm saves per token, its result included: its input (in float32 if the norm has an
    offset) and the root mean square; for "layer" also the mean."""
    return (e + input_size(spec, e)) * width + max(e, 4) * (1 + (spec.norm == "layer"))


def qk_norm_bytes(spec: ModelSpec, heads: Sequence[int], head_dim: int, e: int) -> int:
    """Returns the bytes that one token's norms of queries and keys save; `heads` are the numbers of heads of each."""
    if spec.qk_norm == "none":
        return 0
    roots = (len(heads) if spec.qk_norm == "all" else sum(heads)) * (1 + (spec.norm == "layer"))
    root = e if spec.norm == "layer" else 4  # torch's layer norm keeps them in the model's dtype
    return input_size(spec, e) * head_dim * sum(heads) + root * roots


def input_size(spec: ModelSpec, e: int) -> int:
    """Returns the bytes per number of a norm's saved input, which an RMSNorm with an offset widens to float32."""
    return max(e, 4) if spec.norm_offset and spec.norm == "rms" else e
