"""Bytes that parts of a layer save of one token for the backward.

Legend: as in `headway.models.cost.activations`.
"""

from collections.abc import Sequence

from headway.models.spec import ModelSpec
from headway.native.interface import ACTIVATIONS
from headway.nn import Experts


def per_layer_bytes(spec: ModelSpec, layers: int, e: int) -> int:
    """Bytes of one token's embeddings for all layers: the input of their norm; and in `layers` layers the gate, its
    activation, the product with the embedding, and the input and result of the norm behind."""
    each, m = spec.per_layer_embedding, spec.width
    root = max(e, 4) * (1 + (spec.norm == "layer"))
    embedded = spec.layers * (input_size(spec, e) * each + root)
    return (
        embedded + spec.layers * e * each + layers * (3 * e * each + e * m + norm_bytes(spec, m, e) - e * m)
    )


def stream_bytes(spec: ModelSpec, layers: int, attended: int, fed: int, e: int) -> int:
    """Bytes of one token beyond those of one residual stream: in each layer S streams, the first of them apart, the
    output of the layer, its difference from the prediction, the inputs of both routers, the first stream in front of
    embeddings of the layer, and coefficients; at both ends S - 1 products, and streams; and the result of a low rank,
    and gates that are cut."""
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
    """Bytes of one token beside the hidden units of its experts: the router's input where it is widened, its scores, in
    training once more for each of its losses (`headway.nn.router_losses`), and twice the divisor of weights; of each
    chosen expert the weight (twice where it is normalized, and once more in the dtype of the rest), number, and places
    in both orders, 8 bytes each; input and output rows. Of a shared expert behind a gate its output, and the gate's."""
    if experts is None:
        return 0
    w, m, k = max(e, 4), spec.width, experts.top
    weights = w * (1 + experts.normalized) + e * (w > e)
    scores = experts.count * (1 + bool(experts.aux_loss_coef) + bool(experts.z_loss_coef))
    routing = w * (m * (w > e) + scores + 2 * experts.normalized)
    return routing + k * (weights + 24 + 2 * e * m) + experts.shared_gate * e * (m + 1)


def spared_bytes(spec: ModelSpec, experts: Experts | None, e: int) -> int:
    """The part of `routing_bytes` that `headway.nn.expert_rows` does not save of one token, in float32: input and
    output rows, the input of down, and one of the orders."""
    whole = spec.gated and not (spec.mlp_bias or spec.activation_dropout)
    if experts is None or e != 4 or not whole or spec.activation not in ACTIVATIONS:
        return 0
    return experts.top * (e * (2 * spec.width + experts.hidden) + 8)


def norm_bytes(spec: ModelSpec, width: int, e: int) -> int:
    """Bytes of one norm of one token, with its result: its input, in float32 with an offset, and the root of its mean
    square; for "layer" its mean, too."""
    return (e + input_size(spec, e)) * width + max(e, 4) * (1 + (spec.norm == "layer"))


def qk_norm_bytes(spec: ModelSpec, heads: Sequence[int], head_dim: int, e: int) -> int:
    """Bytes of one token's norms of queries and keys, over `heads` heads each."""
    if spec.qk_norm == "none":
        return 0
    roots = (len(heads) if spec.qk_norm == "all" else sum(heads)) * (1 + (spec.norm == "layer"))
    root = e if spec.norm == "layer" else 4  # torch's own layer norm keeps them in the dtype of the rest
    return input_size(spec, e) * head_dim * sum(heads) + root * roots


def input_size(spec: ModelSpec, e: int) -> int:
    return max(e, 4) if spec.norm_offset and spec.norm == "rms" else e
