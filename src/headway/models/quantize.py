"""Models with smaller weights: quantized to 8 or 4 bits, or bf16 compressed losslessly to 70 % of its bytes.

quantize_model(model, "int8")                        # one scale per 32 inputs of an output
quantize_model(model, "int8", group=-1)              # one scale per output
quantize_model(model, "int4", calibrate=rows)        # codes by GPTQ
compress_model(model)                                # lossless

Legend: T tokens of a row, I inputs and O outputs of a layer.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headway.errors import BackendError, ConfigError, check_known
from headway.models.build import Model
from headway.models.decoder import Decoder
from headway.models.gptq import gptq
from headway.native.loader import library, why_missing
from headway.native.panels import GROUP
from headway.nn import block_linears, linears
from headway.nn.adapters import adapter_names
from headway.nn.weights import CompressedWeight, Plain, Rounded, from_codes
from headway.quantization import quantize_clipped


class WeightKind(NamedTuple):
    """A quantization of weights: number of bits, and inputs that share a scale (None: one scale per output)."""

    bits: int
    group: int | None

    def __str__(self) -> str:
        each = "output" if self.group is None else f"{self.group} inputs"
        return f"int{self.bits} in the blocks with a scale for each {each}"


KINDS: Mapping[str, WeightKind] = {"int8": WeightKind(8, 32), "int4": WeightKind(4, 32)}
WHOLE_ROW = -1
"""The value of `group` that means one scale per output."""


def weight_kind(weights: str, group: int | None = None) -> WeightKind:
    """Returns the kind of "int8" or "int4" weights, with groups of `group` inputs if given, or one scale per output
    (-1).

    Raises ConfigError for another name, and for group sizes that the kernels do not support.
    """
    check_known(weights, KINDS, "quantize: there is no kind of weights")
    if group is None:
        return KINDS[weights]
    if group != WHOLE_ROW and (group < 1 or group % GROUP):
        raise ConfigError(
            f"quantize: group must be a multiple of {GROUP}, or {WHOLE_ROW} for one scale per output, got {group}"
        )
    return KINDS[weights]._replace(group=None if group == WHOLE_ROW else group)


def quantize_model(
    model: Model,
    weights: str,
    *,
    group: int | None = None,
    output: bool = False,
    calibrate: Sequence[Tensor] | None = None,
) -> None:
    """Quantizes the weights of all linear layers of the blocks, in place; the model is frozen and put into evaluation
    mode.

    Args:
        weights: "int8" or "int4", with one scale per 32 inputs of an output.
        group: number of inputs that share a scale instead, a multiple of 32; -1 for all.
        output: whether to quantize the output layer as well, which must not be the embedding.
        calibrate: rows of ids [T]. Codes are then chosen by `gptq`, block by block: the inputs of a block are the
            outputs of the quantized blocks before it on these rows. Otherwise weights are rounded to the nearest code
            (`quantize_clipped`), as are those of the output layer in any case.
    Raises ConfigError for other weights or groups, a model that has quantized layers or adapters, an output layer that
    is the embedding, calibration of a model that is not a decoder, and weights that are not finite.
    """
    bits, group = weight_kind(weights, group)
    _require_plain(model, "quantize_model")
    head = linears(model).get("lm_head") if output else None
    if output and (head is None or head.embedding is not None):
        raise ConfigError(
            "quantize_model: output=True needs an output layer that is not tied to the embedding; leave output out"
        )
    if calibrate is not None and not (isinstance(model, Decoder) and len(calibrate)):
        raise ConfigError("quantize_model: calibrate needs a decoder and at least one row of ids")
    _require_finite(model)
    model.eval().requires_grad_(False)
    nearest = [] if head is None else [head]
    if calibrate is not None:
        assert isinstance(model, Decoder)
        _calibrated(model, calibrate, bits, group)
    else:
        nearest += block_linears(model).values()
    for layer in nearest:
        layer.keep(from_codes(quantize_clipped(layer.matrix, bits, group)))


def compress_model(model: Model) -> None:
    """Compresses the weights of each linear layer losslessly, in place; the model is frozen and put into evaluation
    mode.

    Embeddings, and an output layer tied to one, are left unchanged. Layers are compressed one at a time, so the
    weights are never in memory twice. Decoding steps speed up as far as they are bound by memory bandwidth (up to 1.4
    times, on CPUs with AVX-512 VBMI2 and bf16; on other CPUs compression only saves memory, and is slower).

    Raises ConfigError for weights that are not bf16 on the CPU, and for a model with adapters or quantized layers;
    BackendError if there are no native kernels.
    """
    _require_plain(model, "compress_model")
    check_compressible(model)
    model.eval().requires_grad_(False)
    for layer in linears(model).values():
        if layer.embedding is None and isinstance(layer.kept, Plain):
            layer.keep(CompressedWeight.pack(layer.matrix))


def check_compressible(model: nn.Module) -> None:
    """Raises ConfigError for weights that are not bf16 on the CPU, and BackendError if there are no native kernels
    to read compressed weights."""
    kinds = {(p.dtype, p.device.type) for p in model.parameters()}
    if kinds != {(torch.bfloat16, "cpu")}:
        actual = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ConfigError(
            f"compression needs weights in bfloat16 on the CPU, got {actual}; load the model in bf16"
        )
    if library() is None:
        raise BackendError(f"compressed weights need the native kernels: {why_missing()}")


def _require_plain(model: nn.Module, what: str) -> None:
    if adapter_names(model) or any(not layer.kept.exact for layer in linears(model).values()):
        raise ConfigError(
            f"{what}: the model has adapters or quantized layers; merge adapters first (headway surgery merge), and "
            "use unquantized weights"
        )


def _require_finite(model: nn.Module) -> None:
    """Raises ConfigError for a parameter with infinite or NaN values."""
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if (wrong := ~value.isfinite()).any():
            first = wrong.nonzero()[0].tolist()
            raise ConfigError(
                f"quantize_model: {name} has {int(wrong.sum()):,} of {value.numel():,} numbers that are infinite or "
                f"NaN, the first at {first} ({float(value[tuple(first)])}), which cannot be quantized; use an earlier "
                "checkpoint of its training, or download its files again"
            )


def quantized_layers(model: nn.Module) -> dict[str, Rounded]:
    """Returns the weights of 8 or 4 bits by the names of their linear layers."""
    weights = {name: layer.kept for name, layer in linears(model).items() if layer.coded}
    return {name: weight for name, weight in weights.items() if isinstance(weight, Rounded)}


@torch.no_grad()
def _calibrated(model: Decoder, rows: Sequence[Tensor], bits: int, group: int | None) -> None:
    """Quantizes every block by GPTQ, from the first to the last."""
    blocks = model.model.blocks
    states, options = _first_states(model, rows)
    for number, block in enumerate(blocks):
        hessians = _hessians(block, states, [row[number] for row in options])
        for name, layer in linears(block).items():
            if name in hessians:
                codes = gptq(layer.matrix, hessians[name], bits, group)
            else:  # an expert that no calibration token chose
                codes = quantize_clipped(layer.matrix, bits, group)
            layer.keep(from_codes(codes))
        states = [block(x, **row[number]) for x, row in zip(states, options, strict=True)]


def _first_states(model: Decoder, rows: Sequence[Tensor]) -> tuple[list[Tensor], list[list[dict[str, Any]]]]:
    """Returns, for each row, the input of the first block, and the keyword arguments of every block."""
    states: list[Tensor] = []
    options: list[list[dict[str, Any]]] = []
    blocks = model.model.blocks

    def keep(block: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        if block is blocks[0]:
            states.append(args[0])
            options.append([])
        options[-1].append(kwargs)

    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(keep, with_kwargs=True))
        for row in rows:
            model.hidden(row[None])
    return states, options


def _hessians(
    block: nn.Module, states: Sequence[Tensor], options: Sequence[dict[str, Any]]
) -> dict[str, Tensor]:
    """Returns H [I, I], the sum of x x^T over its inputs, in float64, for every linear layer of a block that gets
    inputs. Layers with the same input tensor share H."""
    hessians: dict[str, Tensor] = {}
    last: list[tuple[Tensor, str]] = []
    shared: dict[str, str] = {}

    def add(name: str, x: Tensor) -> None:
        if last and last[-1][0] is x:
            shared[name] = last[-1][1]
            return
        last[:] = [(x, name)]
        flat = x.reshape(-1, x.shape[-1]).float()
        product = (flat.T @ flat).double()
        hessians[name] = hessians[name].add_(product) if name in hessians else product

    layers = linears(block)
    with ExitStack() as hooks:
        for name, layer in layers.items():
            note = partial(lambda name, _, args: add(name, args[0]), name)
            hooks.enter_context(layer.register_forward_pre_hook(note))
        for x, row in zip(states, options, strict=True):
            block(x, **row)
    return {name: hessians[at] for name in layers if (at := shared.get(name, name)) in hessians}
