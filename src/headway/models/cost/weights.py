"""Numbers in the weights and their bytes, counted on modules without memory, and what an adapter adds.

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
"""Regular expressions that place parameters by their names: the first match counts."""


OPTIONAL = ("positions", "encoder", "experts", "per-layer inputs", "streams")
"""Places that are reported only where they are not empty."""
_MIXER = r"(?:model|decoder)\.layers\.(\d+)\.self_attn\."
"""The mixers of a stack; an encoder beside a decoder is another stack."""


def place_of(name: str) -> str:
    """Returns the place under which `parameters` counts the parameter, or the layer, of that name."""
    return next(place for place, pattern in PLACES.items() if re.search(pattern, name))


@lru_cache(maxsize=16)
def on_meta(spec: ModelSpec) -> Model:
    """The module of a spec, without memory: for reading only."""
    with torch.device("meta"):
        return blank(spec)


@lru_cache(maxsize=128)
def parameters(spec: ModelSpec) -> dict[str, int]:
    """Numbers in the weights, by where they are; their sum is `parameter_count`.

        embedding      V E, tables of `Learned` and of token types, and what projects E columns to M; V L P
                       with P columns for each layer
        per-layer inputs     3 L P M, which make and add these
        streams        2 (S - 1) M M + L (M (S + 1) + S^2 (S + 1)) of S residual streams; L 2 M R of a rank R beside
                       attention
        attention      L (M D (H + K + K) + H D M), biases, cross-attention, projections of global tokens, sink logits
                       L H, output gates L M H or L M H D
        feed-forward   L 3 M F, or 2 M F not gated, and biases; routers, and experts that all tokens have
        experts        those that are chosen from, as feed-forwards
        norms          M for each (P of all layers' embeddings), E behind an embedding, D on queries and on keys; twice
                       with norm_bias
        positions      trained angles and tables of scores
        output layer   V E, or 0 when tied, biases, and what else the head has
        encoder        all of the encoder's, without a shared embedding

    Patterns have none.
    """
    counts = dict.fromkeys(reversed([*PLACES]), 0)
    for name, parameter in on_meta(spec).named_parameters():
        counts[place_of(name)] += parameter.numel()
    return {place: n for place, n in counts.items() if n or place not in OPTIONAL}


@lru_cache(maxsize=128)
def block_numbers(spec: ModelSpec) -> Mapping[str, int]:
    """Numbers in each block, an encoder's too, without positions, by its name."""
    counts = Counter[str]()
    for name, parameter in on_meta(spec).named_parameters():
        block = re.match(r".*\.layers\.\d+\.", name)
        if block and not re.search(PLACES["positions"], name):
            counts[block[0]] += parameter.numel()
    return counts


def parameter_count(spec: ModelSpec) -> int:
    """All trained numbers; a tied output layer counts once."""
    return sum(parameters(spec).values())


def matrix_weights(spec: ModelSpec) -> int:
    """Weights that every token is multiplied with in a stack: L (M D (2 H + 2 K) + 3 M F), 2 M F not gated; L M H more
    with a gate of each head, L M H D of each channel; of a layer with another mixer those of its matrices; 3 L P M of
    embeddings of P columns for each layer; E M more where E is not M; `stream_products`; beside an encoder 2 L M D H
    more, of the queries and outputs of cross-attention. (Its keys and values are of source tokens: `memory_weights`. A
    second set of projections is for tokens that data mark.) With experts F are `hidden_units`, and routers are M for
    each."""
    m, h, d = spec.width, spec.heads, spec.head_dim
    across = 2 * m * d * h * (spec.encoder is not None)
    projected = spec.columns * m * (spec.columns != m)
    fed = m * sum(fed_outputs(spec, layer) for layer in range(spec.layers))
    each = 3 * m * spec.layers * spec.per_layer_embedding
    return (
        sum(mixing_weights(spec)) + spec.layers * across + fed + projected + each + sum(stream_products(spec))
    )


def stream_products(spec: ModelSpec) -> tuple[int, int]:
    """Numbers that a token is multiplied with for S residual streams, and a rank R beside attention: up to what the
    last layer mixes, and behind it. 2 (S - 1) M M, and in each layer M S + S^3 + S S M to predict, the products of
    streams with each other among them, M S + S S to correct, and 2 M R."""
    m, s = spec.width, 0 if spec.altup is None else spec.altup.streams
    ends = max(s - 1, 0) * m * m
    before, behind = m * s + s**3 + s * s * m, m * s + s * s + 2 * m * spec.laurel
    return ends + spec.layers * before + (spec.layers - 1) * behind, behind + ends


@lru_cache(maxsize=128)
def mixing_weights(spec: ModelSpec) -> tuple[int, ...]:
    """The weights of each layer's mixer that every token is multiplied with."""
    counts = [0] * spec.layers
    for name, (outputs, inputs) in linear_sizes(spec).items():
        layer = re.match(rf"{_MIXER}(?!\w+_global_)", name)
        if layer:
            counts[int(layer[1])] += outputs * inputs
    return tuple(counts)


@lru_cache(maxsize=128)
def output_weights(spec: ModelSpec) -> int:
    """The part of `mixing_weights` in the last layer behind its mixer: the output projection and an output gate."""
    each = ((re.fullmatch(rf"{_MIXER}[go]_proj", name), o * i) for name, (o, i) in linear_sizes(spec).items())
    return sum(size for layer, size in each if layer and int(layer[1]) == spec.layers - 1)


def hidden_units(spec: ModelSpec) -> tuple[int, ...]:
    """Hidden units of the feed-forward that a token passes through in each layer, F: of the experts that are chosen for
    it, and of those that all have."""
    each = enumerate(spec.experts)
    return tuple(spec.hidden_of(i) if experts is None else experts.units for i, experts in each)


def fed_outputs(spec: ModelSpec, layer: int) -> int:
    """Numbers whose products with M others are the feed-forward of a token in a layer: (2 or 3) F, and of a router."""
    experts = spec.experts[layer]
    routed = 0 if experts is None else experts.count + experts.shared_gate
    return (2 + spec.gated) * hidden_units(spec)[layer] + routed


def active_parameters(spec: ModelSpec) -> int:
    """Numbers of the weights that a token is computed with: all but those of experts that are not chosen for it."""
    read = expert_share(spec)
    return parameter_count(spec) - round((1 - read) * parameters(spec).get("experts", 0))


def expert_share(spec: ModelSpec, batch: int = 1) -> float:
    """Returns the share of the experts' weights that a step of one token per row reads: E (1 - (1 - K / E)^batch) of E
    experts, the expected number where tokens choose K each, evenly and independently; K for one row. 1 without
    experts."""
    having = [e for e in spec.experts if e is not None]
    read = sum(e.hidden * e.count * (1 - (1 - e.top / e.count) ** batch) for e in having)
    return read / sum(e.hidden * e.count for e in having) if having else 1.0


def gates(spec: ModelSpec, head_dim: int) -> int:
    """Output gates of a layer: H, or H D."""
    return 0 if spec.gate is None else spec.heads * (1 if spec.gate == "head" else head_dim)


def memory_weights(spec: ModelSpec) -> int:
    """Weights that every last state of an encoder is multiplied with in the decoder: 2 L M D K; 0 without one."""
    return 2 * spec.layers * spec.width * spec.head_dim * spec.kv_heads * (spec.encoder is not None)


def weight_bytes_read(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> int:
    """Bytes of weights that a step of one token per row reads: everything of a decoder once, but of an embedding that
    is not also the output layer only `batch` rows, and of experts those that are chosen (`expert_share`); nothing of an
    encoder, nor the projections that make keys of its states.

    Raises ConfigError for an encoder, which takes no such steps."""
    must_decode(spec, "weight_bytes_read")
    counts = parameters(spec)
    rows = (0 if spec.tied else batch) + (batch if spec.positions.rows else 0)
    embedding = counts["embedding"] - (spec.vocab * spec.width if spec.tied else 0)
    of_memory = memory_weights(spec) // spec.width * (spec.width + spec.qkv_bias)
    idle = round((1 - expert_share(spec, batch)) * counts.get("experts", 0))
    looked_up = rows * spec.width + batch * spec.layers * spec.per_layer_embedding
    read = sum(counts.values()) - counts.get("encoder", 0) - of_memory - embedding - idle + looked_up
    return read * dtype.itemsize


def must_decode(spec: ModelSpec, what: str) -> None:
    """Raises ConfigError for an encoder."""
    if spec.kind == "encoder":
        raise ConfigError(
            f"{what} is of decoding, token by token, and an encoder reads whole rows at once; "
            "ask for prefill_flops, activation_bytes or training_bytes"
        )


def stacks(spec: ModelSpec, context: int, source: int | None = None) -> list[tuple[ModelSpec, int]]:
    """Each stack and the tokens of its rows: `spec`, and of an encoder-decoder the encoder, whose sources have as many
    unless given. Raises ConfigError for a source that there is no encoder for."""
    if spec.encoder is not None:
        return [(spec, context), (spec.encoder, context if source is None else source)]
    if source is not None:
        raise ConfigError(
            f"source={source} is the length of an encoder-decoder's sources, and this {spec.kind} has none"
        )
    return [(spec, context)]


class Codes(NamedTuple):
    """Weights as the codes of a file: a description, and by layer name how many weights there are and their bytes in
    memory."""

    what: str
    sizes: Mapping[str, tuple[int, int]]

    def __str__(self) -> str:
        return self.what


Quantized = WeightKind | Codes | Literal["nf4"]


class Kept(NamedTuple):
    """How weights are stored: the dtype of products, which all weights have except the `quantized` ones; and why."""

    dtype: torch.dtype
    quantized: Quantized | None = None
    why: str = ""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return dtype if self.quantized is None else f"{self.quantized}, else {dtype}"


def kept_bytes(spec: ModelSpec, kept: Kept) -> dict[str, int]:
    """Bytes of the weights by place, as `parameters` names them; of weights of few bits those in memory
    (`headway.models.quantize.quantize_model`), where scales lie with each 32 inputs."""
    e, saved = kept.dtype.itemsize, Counter[str]()
    for name, (count, nbytes) in _sizes(spec, kept.quantized).items():
        saved[place_of(name)] += count * e - nbytes
    return {place: count * e - saved[place] for place, count in parameters(spec).items()}


def _sizes(spec: ModelSpec, quantized: Quantized | None) -> Mapping[str, tuple[int, int]]:
    """Returns, for each quantized layer, how many weights it has and their bytes."""
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
    """Trained numbers of an adapter: R (I + O) for each layer, and O more with magnitudes; `targets` as in
    `headway.nn.Adapter.fresh`."""
    sizes = linear_sizes(spec, targets).values()
    return sum(lora.rank * (inputs + outputs) + outputs * lora.magnitude for outputs, inputs in sizes)


def linear_sizes(spec: ModelSpec, targets: Sequence[str] = ()) -> Mapping[str, tuple[int, int]]:
    """(O, I) of each linear layer of the blocks by its name, or of those that are `targets`."""
    layers = target_layers(on_meta(spec), targets)
    return {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}


def trained_bytes(numbers: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the gradients and moments of so many trained numbers: e and, where another dtype computes, w; and
    2 w, with e bytes per number of what computes, and w = max(e, 4) of what is trained."""
    e, w = dtype.itemsize, max(dtype.itemsize, 4)
    return numbers * (e + (w if w > e else 0) + 2 * w)
