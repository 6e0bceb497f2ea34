"""Writes what is done to rows beside products as cases for driver.cpp, with float64 results: norms and gates, forward
and backward, rotations, cross entropy, and forward short convolutions and the gated delta rule. No kernel of this
machine is needed: a backward reads what the formula gives for its forward.

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
from headway.native import convolution, delta, loader, rows
from headway.nn.fused import plain_gated, plain_rms_norm
from headway.positions import tables
from tests.delta.cases import draw as draw_delta
from tests.delta.cases import results as delta_results
from tests.native.arm.attention import piece
from tests.native.arm.calls import Call, taken
from tests.native.arm.files import CaseFile
from tests.tolerance import ulp

SIZES = ((1, 1), (3, 7), (5, 16), (2, 33), (9, 64), (17, 129))
EPS = 1e-5
Result = tuple[Tensor, Tensor, Tensor | float]
"""What a call fills, its float64 value, and what terms amount to that cancel in it."""
Made = tuple[str, Callable[[], Any], Callable[[Any], Sequence[Result]]]
"""A name, what makes the call, and the results of what that returns."""


class Taken:
    """A library that takes calls and makes none."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getattr__(self, function: str) -> Callable[..., int]:
        def take(*given: Any) -> int:
            self.calls.append(taken(function, given))
            return 0

        return take


def write(
    to: CaseFile, name: str, make: Callable[[], Any], results: Callable[[Any], Sequence[Result]]
) -> None:
    dll, before = Taken(), loader.search
    found = loader.Found(loader.Library("none", Path(), dll))  # type: ignore[arg-type]
    loader.search = lambda: found  # type: ignore[assignment]
    try:
        made = make()
    finally:
        loader.search = before  # type: ignore[assignment]
    (call,) = dll.calls
    for at, data in call.before.items():
        to.memory(at, data)
    to.links(call.links.items())
    to.call(call)
    for i, (got, right, terms) in enumerate(results(made)):
        if not got.numel():
            continue
        begin, right = piece(call, got.data_ptr()), right.detach().double()
        index = torch.arange(got.untyped_storage().nbytes() // got.element_size())
        first = (got.data_ptr() - begin) // got.element_size()
        offsets = first + index.as_strided(got.shape, got.stride()).flatten()
        allowed = 2.0**-19 * (right.abs() + torch.as_tensor(terms, dtype=torch.float64))
        if got.dtype == torch.bfloat16:
            allowed = allowed + 2.01 * ulp(right, got.dtype)  # what lies between is rounded, too
        numbers = (t.expand_as(right).flatten().numpy() for t in (right, allowed))
        to.check(f"{name}, result {i}", begin, str(got.dtype)[6:], offsets.numpy(), *numbers)
    to.end(name)


def gradients(out: Tensor, given: Sequence[Tensor], by: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(out, given, by.double())]


def norms(draw: torch.Generator, dtype: torch.dtype, count: int, width: int) -> Iterator[Made]:
    x, y, dy = (torch.randn(count, width, generator=draw).to(dtype) for _ in range(3))
    gain, shift = (torch.randn(width, generator=draw).to(dtype) for _ in range(2))
    total = (x.double() + y.double()).to(dtype)
    for kind in ("rms", "layer"):
        wide, g, b = (t.double().requires_grad_() for t in (total, gain, shift))
        right = (
            F.layer_norm(wide, (width,), g, b, EPS) if kind == "layer" else plain_rms_norm(wide, g, EPS, b)
        )
        mean = wide.detach().mean(1) if kind == "layer" else None
        center = wide.detach() if mean is None else wide.detach() - mean[:, None]
        by = (center.square().mean(1) + EPS).rsqrt()
        terms = by[:, None].clamp_min(1.0) * (1 + wide.detach().abs()) * (2 + gain.double().abs())
        if dtype == torch.bfloat16:  # what the shift is added to is rounded twice, and they may cancel
            terms = 2.0**12 * (right.detach() - b.detach()).abs()
        yield (
            f"{kind} norm",
            lambda kind=kind: rows.norm(kind, x, y, gain, shift, EPS),
            lambda made, right=right, by=by, terms=terms: [
                (made.y, right, terms),
                (made.sum, total, 0.0),
                (made.by, by, by.square()),
            ],
        )
        d_wide, d_gain, d_shift = gradients(right, (wide, g, b), dy)
        made = rows.Normed(x, total, None if mean is None else mean.float(), by.float())
        if dtype == torch.float32:
            many = count * (1 + by.max() * wide.detach().abs().max()) * 4
            steep = by[:, None] * 8 * (1 + by[:, None] * wide.detach().abs()) * (1 + gain.abs().max())
            yield (
                f"{kind} norm, backward",
                lambda kind=kind, made=made: rows.norm_backward(kind, dy, None, made, gain, True, True),
                lambda found, d=(d_wide, d_gain, d_shift), s=(steep, many, many): [
                    *zip(found, d, s, strict=True)
                ],
            )


def gates(draw: torch.Generator, dtype: torch.dtype, count: int, width: int) -> Iterator[Made]:
    gate, up, dy = (torch.randn(count, width, generator=draw).to(dtype) for _ in range(3))
    for act in ("silu", "gelu", "gelu_pytorch_tanh", "relu", "sigmoid"):
        g, u = (t.double().requires_grad_() for t in (gate, up))
        right = plain_gated(g, u, act)
        half = 2.0**12 if dtype == torch.bfloat16 else 1.0  # act(gate) is rounded to bf16
        size = half * (1 + up.double().abs())
        yield (
            f"gate {act}",
            lambda act=act: rows.gate(act, gate, up),
            lambda y, right=right, size=size: [(y, right, size)],
        )
        back = gradients(right, (g, u), dy)
        yield (
            f"gate {act}, backward",
            lambda act=act: rows.gate_backward(act, dy, gate, up),
            lambda found, back=back, size=size: [*zip(found, back, (4 * size, 4 * size), strict=True)],
        )


def rotations(draw: torch.Generator, dtype: torch.dtype, count: int, width: int) -> Iterator[Made]:
    dim, rotated = 2 * width, 2 * ((width + 1) // 2)
    x = torch.randn(2, 3, count, dim, generator=draw).to(dtype)
    angles = torch.rand(count, rotated // 2, generator=draw) * 6
    for pairing in ("halves", "adjacent"):
        each = angles.repeat(1, 2) if pairing == "halves" else angles.repeat_interleave(2, 1)
        cos, sin = each.cos(), each.sin()
        right = tables.rotate(x.double(), cos.double(), sin.double(), pairing)
        yield (
            f"rotation of {pairing}",
            lambda pairing=pairing, cos=cos, sin=sin: rows.rotate([x], cos, sin, pairing),
            lambda made, right=right: [(made[0], right, 4.0)],
        )


def entropies(draw: torch.Generator, dtype: torch.dtype, count: int, width: int) -> Iterator[Made]:
    logits = (5 * torch.randn(count, width, generator=draw)).to(dtype)
    targets = torch.arange(count) % width
    whole = logits.double()
    right = F.cross_entropy(whole, targets, reduction="none")
    slope = whole.softmax(-1) - F.one_hot(targets, width)
    taking = logits.clone()
    yield (
        "cross entropy",
        lambda: rows.cross_entropy(taking, None, targets, True),
        lambda losses: [(losses, right, whole.abs().amax()), (taking, slope, 1.0)],
    )


def convolutions(draw: torch.Generator, _: torch.dtype, count: int, width: int) -> Iterator[Made]:
    x, weight, bias = (
        torch.randn(*size, generator=draw) for size in ((2, count, width), (width, 4), (width,))
    )
    past = torch.randn(2, 3, width, generator=draw)
    for act in ("none", "silu"):
        wide = [t.double().requires_grad_() for t in (x, weight, bias, past)]
        right = plain_convolution(*wide, None, act)
        yield (
            f"convolution {act}",
            lambda act=act: convolution.forward(x, weight, bias, past, None, act),
            lambda y, right=right: [(y, right, 8.0)],
        )


def deltas(draw: torch.Generator, dtype: torch.dtype, count: int, width: int) -> Iterator[Made]:
    for channels in (False, True):
        given = draw_delta(count * 5, d=min(width, 64), e=width, channels=channels, dtype=dtype)
        low, exact = given.to(dtype), given.to(torch.float64)
        right = delta_results(exact, "recurrent")
        values = [t.detach() for t in low]
        if not channels:
            values[3] = values[3].unsqueeze(-1) if values[3].dim() == 3 else values[3]
        values[4] = values[4].unsqueeze(-1) if values[4].dim() == 3 else values[4]
        scale = values[0].shape[-1] ** -0.5
        yield (
            f"delta rule{', of channels' if channels else ''}",
            lambda values=values, scale=scale: delta.forward(*values, None, scale, 1e-6, True),
            lambda made, right=right: [*zip(made, right[:2], (16.0, 16.0), strict=True)],
        )


def main() -> None:
    draw = torch.Generator().manual_seed(0)
    kinds = (norms, gates, rotations, entropies, convolutions, deltas)
    with CaseFile(Path(sys.argv[1])) as to:
        for kind, dtype, (count, width) in product(kinds, (torch.float32, torch.bfloat16), SIZES):
            if kind is convolutions and dtype == torch.bfloat16:
                continue  # what lies between is rounded: tests/native/test_convolution.py
            for name, make, results in kind(draw, dtype, count, width):
                write(to, f"{name} {count} x {width} {str(dtype)[6:]}", make, results)
        print(f"{to.cases} cases, {to.checks} checks of {to.numbers} numbers")


if __name__ == "__main__":
    main()
