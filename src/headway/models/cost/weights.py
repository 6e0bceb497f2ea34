"""Counts weights and their bytes on modules without memory, and the parameters that an adapter adds.

Legend: M width, E columns of the embedding, L layers, H query heads, K kv heads, D per head, F width of the
feed-forward, V vocab.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from headway.errors import ConfigError
from headway.models.build import Model, blank
from headway.models.quantize import WeightKind
from headway.models.spec import ModelSpec
from headway.native.panels import panel_bytes
from headway.nn import Lora
from headway.nn.adapters import target_layers
from headway.nn.weights.nf4 import nf4_bytes

PLACES: Mapping[str, str] = {
    "encoder": r"^encoder\.",
    "output layer": r"^(lm_)?head\b",
    "positions": r"\bfrequency_offset\b|\bscores?\b",
    "norms": "norm",
    "per-layer inputs": r"\bper_layer\.(gate|proj)\b",
    "streams": r"\b(altup|streams|laurel)\b",
    "experts": r"\bmlp\.experts\b",
    "feed-forward": r"\bmlp\b",
    "attention": "attn",
    "embedding": r"\bembed_",
}
"""Regular expressions that assign parameters to places by name; the first match counts."""
OPTIONAL = ("positions", "encoder", "experts", "per-layer inputs", "streams")
"""Places that are reported only if they are not empty."""
_MIXER = r"(?:model|decoder)\.layers\.(\d+)\.self_attn\."
"""Matches the names of a stack's mixers. An encoder beside a decoder is a separate stack and does not match."""


def place_of(name: str) -> str:
    """Returns the place under which `parameters` counts the parameter, or layer, of that name."""
    return next(place for place, pattern in PLACES.items() if re.search(pattern, name))


@lru_cache(maxsize=16)
def on_meta(spec: ModelSpec) -> Model:
    """Returns the module of a spec on the meta device, without memory; it is cached and must not be modified."""
    with torch.device("meta"):
        return blank(spec)


@lru_cache(maxsize=128)
def parameters(spec: ModelSpec) -> dict[str, int]:
    """Returns the number of parameters by place; their sum is `parameter_count`.

        embedding      V E, tables of `Learned` and of token types, the projection of E columns to M; V L P for
                       per-layer embeddings of P columns
        per-layer inputs     3 L P M, which compute and add the per-layer embeddings
        streams        2 (S - 1) M M + L (M (S + 1) + S^2 (S + 1)) for S residual streams (AltUp); L 2 M R for LAuReL's
                       rank R
        attention      L (M D (H + K + K) + H D M), biases, cross-attention, projections of global tokens, sink logits
                       L H, output gates L M H or L M H D
        feed-forward   L 3 M F, or 2 M F if not gated, and biases; routers, and experts shared by all tokens
        experts        the routed experts, as feed-forwards
        norms          M each (P for per-layer embeddings), E after an embedding, D on queries and on keys; twice with
                       norm_bias
        positions      trained angles and score tables
        output layer   V E, or 0 if tied, biases, and the other parameters of the head
        encoder        all of the encoder's, without a shared embedding

    Patterns have no parameters.
    """
    counts = dict.fromkeys(reversed([*PLACES]), 0)
    for name, parameter in on_meta(spec).named_parameters():
        counts[place_of(name)] += parameter.numel()
    return {place: n for place, n in counts.items() if n or place not in OPTIONAL}


@lru_cache(maxsize=128)
def block_numbers(spec: ModelSpec) -> Mapping[str, int]:
    """Returns the number of parameters of each block by its name, including the encoder's, without positions."""
    counts = Counter[str]()
    for name, parameter in on_meta(spec).named_parameters():
        block = re.match(r".*\.layers\.\d+\.", name)
        if block and not re.search(PLACES["positions"], name):
            counts[block[0]] += parameter.numel()
    return counts


def parameter_count(spec: ModelSpec) -> int:
    """Returns the total number of trained parameters; a tied output layer counts once."""
    return sum(parameters(spec).values())


def matrix_weights(spec: ModelSpec) -> int:
    """Returns the number of weights that every token is multiplied with in a stack: L (M D (2 H + 2 K) + 3 M F).

    2 M F if not gated; L M H more with a gate per head, L M H D with a gate per channel; for a layer with another
    mixer its matrices instead; 3 L P M for per-layer embeddings of P columns; E M more if E is not M;
    `stream_products`; 2 L M D H more for the queries and outputs of cross-attention (its keys and values belong to
    source tokens: `memory_weights`). The second set of projections, of global tokens, is not counted. With experts, F
    is `hidden_units`, and each expert's router has M.
    """
    m, h, d = spec.width, spec.heads, spec.head_dim
    across = 2 * m * d * h * (spec.encoder is not None)
    projected = spec.columns * m * (spec.columns != m)
    fed = m * sum(fed_outputs(spec, layer) for layer in range(spec.layers))
    each = 3 * m * spec.layers * spec.per_layer_embedding
    return (
        sum(mixing_weights(spec)) + spec.layers * across + fed + projected + each + sum(stream_products(spec))
    )


def stream_products(spec: ModelSpec) -> tuple[int, int]:
    """Returns the numbers that a token is multiplied with for S residual streams (AltUp) and LAuReL's rank R: (up to
    the last layer's mixer, after it).

    2 (S - 1) M M in all, and in each layer M S + S^3 + S S M to predict (products of streams with each other
    included), M S + S S to correct, and 2 M R.
    """
    m, s = spec.width, 0 if spec.altup is None else spec.altup.streams
    ends = max(s - 1, 0) * m * m
    before, behind = m * s + s**3 + s * s * m, m * s + s * s + 2 * m * spec.laurel
    return ends + spec.layers * before + (spec.layers - 1) * behind, behind + ends


@lru_cache(maxsize=128)
def mixing_weights(spec: ModelSpec) -> tuple[int, ...]:
    """Returns the number of weights in each layer's mixer that every token is multiplied with."""
    counts = [0] * spec.layers
    for name, (outputs, inputs) in linear_sizes(spec).items():
        layer = re.match(rf"{_MIXER}(?!\w+_global_)", name)
        if layer:
            counts[int(layer[1])] += outputs * inputs
    return tuple(counts)


@lru_cache(maxsize=128)
def output_weights(spec: ModelSpec) -> int:
    """Returns the part of the last layer's `mixing_weights` that follows the mixing: the output projection and an
    output gate."""
    each = ((re.fullmatch(rf"{_MIXER}[go]_proj", name), o * i) for name, (o, i) in linear_sizes(spec).items())
    return sum(size for layer, size in each if layer and int(layer[1]) == spec.layers - 1)


def hidden_units(spec: ModelSpec) -> tuple[int, ...]:
    """Returns the hidden units F that a token passes through in each layer: with experts, those of its chosen
    experts and of the shared ones."""
    each = enumerate(spec.experts)
    return tuple(spec.hidden_of(i) if experts is None else experts.units for i, experts in each)


def fed_outputs(spec: ModelSpec, layer: int) -> int:
    """Returns how many products with M inputs a token's feed-forward in a layer consists of: (2 or 3) F, plus the
    router's."""
    experts = spec.experts[layer]
    routed = 0 if experts is None else experts.count + experts.shared_gate
    return (2 + spec.gated) * hidden_units(spec)[layer] + routed


def active_parameters(spec: ModelSpec) -> int:
    """Returns the number of parameters that one token uses: all but those of the experts that are not chosen for it."""
    read = expert_share(spec)
    return parameter_count(spec) - round((1 - read) * parameters(spec).get("experts", 0))


def expert_share(spec: ModelSpec, batch: int = 1) -> float:
    """Returns the share of the experts' weights that a step of one token per row reads: 1 - (1 - K / E)^batch for E
    experts of which each token chooses K, the expected value if choices are uniform and independent; 1 without
    experts."""
    mixtures = [e for e in spec.experts if e is not None]
    read = sum(e.hidden * e.count * (1 - (1 - e.top / e.count) ** batch) for e in mixtures)
    return read / sum(e.hidden * e.count for e in mixtures) if mixtures else 1.0


def gates(spec: ModelSpec, head_dim: int) -> int:
    """Returns the number of output gates per token of a layer: H, or H D; 0 without gates."""
    return 0 if spec.gate is None else spec.heads * (1 if spec.gate == "head" else head_dim)


def memory_weights(spec: ModelSpec) -> int:
    """Returns the number of decoder weights that each of the encoder's last states is multiplied with: 2 L M D K; 0
    without an encoder."""
    return 2 * spec.layers * spec.width * spec.head_dim * spec.kv_heads * (spec.encoder is not None)


def weight_bytes_read(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> int:
    """Returns the bytes of weights that a step of one token per row reads: every weight of a decoder once, but only
    `batch` rows of an embedding that is not also the output layer, and only the chosen experts (`expert_share`);
    nothing of an encoder, nor the projections to cross-attention keys and values. Raises ConfigError for an
    encoder.
    """
    must_decode(spec, "weight_bytes_read")
    counts = parameters(spec)
    rows = (0 if spec.tied else batch) + (batch if spec.positions.rows else 0)
    projection = 0 if spec.columns == spec.width else spec.width * (spec.columns + 1)
    embedding = counts["embedding"] - (spec.vocab * spec.columns if spec.tied else 0) - projection
    of_memory = memory_weights(spec) // spec.width * (spec.width + spec.qkv_bias)
    idle = round((1 - expert_share(spec, batch)) * counts.get("experts", 0))
    looked_up = rows * spec.columns + batch * spec.layers * spec.per_layer_embedding
    read = sum(counts.values()) - counts.get("encoder", 0) - of_memory - embedding - idle + looked_up
    return read * dtype.itemsize


def must_decode(spec: ModelSpec, what: str) -> None:
    """Raises ConfigError if the model is an encoder."""
    if spec.kind == "encoder":
        raise ConfigError(
            f"{what} is for decoding token by token, which an encoder does not do; "
            "use prefill_flops, activation_bytes or training_bytes"
        )


def stacks(spec: ModelSpec, context: int, source: int | None = None) -> list[tuple[ModelSpec, int]]:
    """Returns each stack with the number of tokens of its rows: `spec`, and the encoder of an encoder-decoder, with
    `source` tokens (`context` if None). Raises ConfigError if `source` is given and there is no encoder."""
    if spec.encoder is not None:
        return [(spec, context), (spec.encoder, context if source is None else source)]
    if source is not None:
        raise ConfigError(
            f"source={source} is for encoder-decoders only, but this model is of kind {spec.kind}; leave source out"
        )
    return [(spec, context)]


class Codes(NamedTuple):
    """Weights stored as the codes of a quantized file: a description, and for each layer name (number of weights,
    their bytes in memory)."""

    what: str
    sizes: Mapping[str, tuple[int, int]]

    def __str__(self) -> str:
        return self.what


Quantized = WeightKind | Codes | Literal["nf4"]


class Kept(NamedTuple):
    """How weights are stored: the dtype of all but the `quantized` weights, which is also that of products; and the
    reason."""

    dtype: torch.dtype
    quantized: Quantized | None = None
    why: str = ""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return dtype if self.quantized is None else f"{self.quantized}, else {dtype}"


def kept_bytes(spec: ModelSpec, kept: Kept) -> dict[str, int]:
    """Returns the bytes of the weights by place, as in `parameters`; for quantized weights their bytes in memory
    (`headway.models.quantize.quantize_model`), with scales for each 32 inputs."""
    e, saved = kept.dtype.itemsize, Counter[str]()
    for name, (count, nbytes) in _sizes(spec, kept.quantized).items():
        saved[place_of(name)] += count * e - nbytes
    return {place: count * e - saved[place] for place, count in parameters(spec).items()}


def _sizes(spec: ModelSpec, quantized: Quantized | None) -> Mapping[str, tuple[int, int]]:
    """Returns the number of weights and their bytes for each quantized layer."""
    if quantized is None:
        return {}
    if isinstance(quantized, Codes):
        return quantized.sizes
    layers = linear_sizes(spec)
    if quantized == "nf4":
        return {name: (o * i, nf4_bytes(o * i)) for name, (o, i) in layers.items()}
    bits, group = quantized
    return {
        name: (o * i, panel_bytes(o, i, bits, group is not None and group < i))
        for name, (o, i) in layers.items()
    }


def adapter_parameters(spec: ModelSpec, lora: Lora, targets: Sequence[str] = ()) -> int:
    """Returns the number of trained parameters of an adapter: R (I + O) for each layer, and O more with magnitudes;
    `targets` as in `headway.nn.Adapter.fresh`."""
    sizes = linear_sizes(spec, targets).values()
    return sum(lora.rank * (inputs + outputs) + outputs * lora.magnitude for outputs, inputs in sizes)


def linear_sizes(spec: ModelSpec, targets: Sequence[str] = ()) -> Mapping[str, tuple[int, int]]:
    """Returns (O, I) by name of the linear layers of the blocks, or of those selected by `targets`."""
    layers = target_layers(on_meta(spec), targets)
    return {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}


def trained_bytes(numbers: int, dtype: torch.dtype = torch.float32) -> int:
    """Returns the bytes of the gradients, master weights and Adam moments of so many trained parameters: e + 2 w
    each, and w more if the model computes in a narrower dtype, with e bytes per number there and w = max(e, 4)."""
    e, w = dtype.itemsize, max(dtype.itemsize, 4)
    return numbers * (e + (w if w > e else 0) + 2 * w)
