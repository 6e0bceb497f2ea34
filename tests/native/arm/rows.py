"""Writes operations on rows beside products as cases for driver.cpp, with float64 results: norms and gates, forward
and backward, rotations, cross entropy, and forward short convolutions and the gated delta rule. Needs no kernel of this
machine: a backward reads what the formula gives for its forward.

    python -m tests.native.arm.rows FILE"""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.attention.delta.convolution import _plain as plain_convolution
from headway.native import convolution, delta, rows
from headway.nn.fused import plain_gated, plain_rms_norm
from headway.positions import tables
from tests.delta.cases import draw as draw_delta
from tests.delta.cases import results as delta_results
from tests.native.arm.attention import piece
from tests.native.arm.calls import Taken, running
from tests.native.arm.files import CaseFile
from tests.tolerance import ulp

SIZES = ((1, 1), (3, 7), (5, 16), (2, 33), (9, 64), (17, 129))
EPS = 1e-5
Result = tuple[Tensor, Tensor, Tensor | float]
"""A tensor that a call fills, its float64 value, and the magnitude of the terms that cancel in it."""
Made = tuple[str, Callable[[], Any], Callable[[Any], Sequence[Result]]]
"""A name, a function that makes the call, and one that returns the results from what the call returns."""


def write(
    file: CaseFile, name: str, make: Callable[[], Any], results: Callable[[Any], Sequence[Result]]
) -> None:
    dll = Taken()
    with running(dll):
        returned = make()
    (call,) = dll.calls
    for address, data in call.before.items():
        file.memory(address, data)
    file.links(call.links.items())
    file.call(call)
    for i, (actual, expected, terms) in enumerate(results(returned)):
        if not actual.numel():
            continue
        begin, expected = piece(call, actual.data_ptr()), expected.detach().double()
        index = torch.arange(actual.untyped_storage().nbytes() // actual.element_size())
        first = (actual.data_ptr() - begin) // actual.element_size()
        offsets = first + index.as_strided(actual.shape, actual.stride()).flatten()
        tolerances = 2.0**-19 * (expected.abs() + torch.as_tensor(terms, dtype=torch.float64))
        if actual.dtype == torch.bfloat16:
            tolerances = tolerances + 2.01 * ulp(
                expected, actual.dtype
            )  # intermediate results are rounded, too
        numbers = (t.expand_as(expected).flatten().numpy() for t in (expected, tolerances))
        file.check(f"{name}, result {i}", begin, str(actual.dtype)[6:], offsets.numpy(), *numbers)
    file.end(name)


def gradients(out: Tensor, tensors: Sequence[Tensor], d_out: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(out, tensors, d_out.double())]


def norms(generator: torch.Generator, dtype: torch.dtype, count: int, width: int) -> Iterator[Made]:
    x, y, dy = (torch.randn(count, width, generator=generator).to(dtype) for _ in range(3))
    gain, shift = (torch.randn(width, generator=generator).to(dtype) for _ in range(2))
    total = (x.double() + y.double()).to(dtype)
    for kind in ("rms", "layer"):
        exact_x, g, b = (t.double().requires_grad_() for t in (total, gain, shift))
        expected = (
            F.layer_norm(exact_x, (width,), g, b, EPS)
            if kind == "layer"
            else plain_rms_norm(exact_x, g, EPS, b)
        )
        mean = exact_x.detach().mean(1) if kind == "layer" else None
        center = exact_x.detach() if mean is None else exact_x.detach() - mean[:, None]
        factor = (center.square().mean(1) + EPS).rsqrt()
        terms = factor[:, None].clamp_min(1.0) * (1 + exact_x.detach().abs()) * (2 + gain.double().abs())
        if dtype == torch.bfloat16:  # the value before the shift is rounded twice, and may cancel with it
            terms = 2.0**12 * (expected.detach() - b.detach()).abs()
        yield (
            f"{kind} norm",
            lambda kind=kind: rows.norm(kind, x, y, gain, shift, EPS),
            lambda normed, expected=expected, factor=factor, terms=terms: [
                (normed.y, expected, terms),
                (normed.sum, total, 0.0),
                (normed.by, factor, factor.square()),
            ],
        )
        d_wide, d_gain, d_shift = gradients(expected, (exact_x, g, b), dy)
        normed = rows.Normed(x, total, None if mean is None else mean.float(), factor.float())
        if dtype == torch.float32:
            sum_terms = count * (1 + factor.max() * exact_x.detach().abs().max()) * 4
            slope_terms = (
                factor[:, None] * 8 * (1 + factor[:, None] * exact_x.detach().abs()) * (1 + gain.abs().max())
            )
            yield (
                f"{kind} norm, backward",
                lambda kind=kind, normed=normed: rows.norm_backward(kind, dy, None, normed, gain, True, True),
                lambda result, d=(d_wide, d_gain, d_shift), s=(slope_terms, sum_terms, sum_terms): [
                    *zip(result, d, s, strict=True)
                ],
            )


def gates(generator: torch.Generator, dtype: torch.dtype, count: int, width: int) -> Iterator[Made]:
    gate, up, dy = (torch.randn(count, width, generator=generator).to(dtype) for _ in range(3))
    for act in ("silu", "gelu", "gelu_pytorch_tanh", "relu", "sigmoid"):
        g, u = (t.double().requires_grad_() for t in (gate, up))
        expected = plain_gated(g, u, act)
        rounding = 2.0**12 if dtype == torch.bfloat16 else 1.0  # act(gate) is rounded to bf16
        size = rounding * (1 + up.double().abs())
        yield (
            f"gate {act}",
            lambda act=act: rows.gate(act, gate, up),
            lambda y, expected=expected, size=size: [(y, expected, size)],
        )
        expected_grads = gradients(expected, (g, u), dy)
        yield (
            f"gate {act}, backward",
            lambda act=act: rows.gate_backward(act, dy, gate, up),
            lambda result, expected_grads=expected_grads, size=size: [
                *zip(result, expected_grads, (4 * size, 4 * size), strict=True)
            ],
        )


def rotations(generator: torch.Generator, dtype: torch.dtype, count: int, width: int) -> Iterator[Made]:
    dim, rotated = 2 * width, 2 * ((width + 1) // 2)
    x = torch.randn(2, 3, count, dim, generator=generator).to(dtype)
    angles = torch.rand(count, rotated // 2, generator=generator) * 6
    for pairing in ("halves", "adjacent"):
        full_angles = angles.repeat(1, 2) if pairing == "halves" else angles.repeat_interleave(2, 1)
        cos, sin = full_angles.cos(), full_angles.sin()
        expected = tables.rotate(x.double(), cos.double(), sin.double(), pairing)
        yield (
            f"rotation of {pairing}",
            lambda pairing=pairing, cos=cos, sin=sin: rows.rotate([x], cos, sin, pairing),
            lambda result, expected=expected: [(result[0], expected, 4.0)],
        )


def entropies(generator: torch.Generator, dtype: torch.dtype, count: int, width: int) -> Iterator[Made]:
    logits = (5 * torch.randn(count, width, generator=generator)).to(dtype)
    targets = torch.arange(count) % width
    exact_logits = logits.double()
    expected = F.cross_entropy(exact_logits, targets, reduction="none")
    expected_grad = exact_logits.softmax(-1) - F.one_hot(targets, width)
    overwritten = logits.clone()
    yield (
        "cross entropy",
        lambda: rows.cross_entropy(overwritten, None, targets, True),
        lambda losses: [(losses, expected, exact_logits.abs().amax()), (overwritten, expected_grad, 1.0)],
    )


def convolutions(generator: torch.Generator, _: torch.dtype, count: int, width: int) -> Iterator[Made]:
    x, weight, bias = (
        torch.randn(*size, generator=generator) for size in ((2, count, width), (width, 4), (width,))
    )
    past = torch.randn(2, 3, width, generator=generator)
    for act in ("none", "silu"):
        exact = [t.double().requires_grad_() for t in (x, weight, bias, past)]
        expected = plain_convolution(*exact, None, act)
        yield (
            f"convolution {act}",
            lambda act=act: convolution.forward(x, weight, bias, past, None, act),
            lambda y, expected=expected: [(y, expected, 8.0)],
        )


def deltas(generator: torch.Generator, dtype: torch.dtype, count: int, width: int) -> Iterator[Made]:
    for channels in (False, True):
        inputs = draw_delta(count * 5, d=min(width, 64), e=width, channels=channels, dtype=dtype)
        low, exact = inputs.to(dtype), inputs.to(torch.float64)
        expected = delta_results(exact, "recurrent")
        values = [t.detach() for t in low]
        if not channels:
            values[3] = values[3].unsqueeze(-1) if values[3].dim() == 3 else values[3]
        values[4] = values[4].unsqueeze(-1) if values[4].dim() == 3 else values[4]
        scale = values[0].shape[-1] ** -0.5
        yield (
            f"delta rule{', of channels' if channels else ''}",
            lambda values=values, scale=scale: delta.forward(*values, None, scale, 1e-6, True),
            lambda result, expected=expected: [*zip(result, expected[:2], (16.0, 16.0), strict=True)],
        )


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = (norms, gates, rotations, entropies, convolutions, deltas)
    with CaseFile(Path(sys.argv[1])) as file:
        for kind, dtype, (count, width) in product(kinds, (torch.float32, torch.bfloat16), SIZES):
            if kind is convolutions and dtype == torch.bfloat16:
                continue  # intermediate results are rounded: tests/native/test_convolution.py
            for name, make, results in kind(generator, dtype, count, width):
                write(file, f"{name} {count} x {width} {str(dtype)[6:]}", make, results)
        print(f"{file.cases} cases, {file.checks} checks of {file.numbers} numbers")


if __name__ == "__main__":
    main()
