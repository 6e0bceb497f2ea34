"""Weights in 8 and 4 bits: what is stored, and products against the stated formulas in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headway.native import linear as kernels
from headway.native.panels import PANEL, Panels
from headway.nn import Linear
from headway.nn.linear import products
from headway.nn.weights import from_codes
from headway.nn.weights.rounded import dequantized_linear
from headway.quantization import QuantizedMatrix, quantize_clipped, quantize_weights
from tests.native.presence import needs_kernels
from tests.native.weights import rounded
from tests.saved import saved_tensors

FORMS = [(8, None, True), (8, 64, True), (8, 32, False), (8, None, False), (4, 32, True), (4, 96, False)]
"""(bits, group, symmetric)."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(layer: Linear, matrix: QuantizedMatrix) -> Linear:
    layer.keep(from_codes(matrix))
    return layer.eval().requires_grad_(False)


def exact(matrix: QuantizedMatrix) -> Tensor:
    """Returns scale (code - zero) in float64."""
    inputs = matrix.codes.shape[1]
    scale, zero = (
        t.double().repeat_interleave(matrix.group, 1)[:, :inputs]
        for t in (matrix.scale, matrix.zero_or_middle)
    )
    return scale * (matrix.codes.double() - zero)


@pytest.mark.parametrize(("bits", "group", "symmetric"), FORMS)
@settings(max_examples=20)
@given(outputs=st.integers(1, 40), inputs=st.integers(1, 140), seed=st.integers(0, 99))
def test_panels_give_back_codes_scales_and_zeros(
    bits: int, group: int | None, symmetric: bool, outputs: int, inputs: int, seed: int
) -> None:
    w = numbers(outputs, inputs, seed=seed)
    matrix = quantize_weights(w, bits, group, symmetric=symmetric)
    panels = Panels.pack(matrix)
    unpacked = panels.unpack()
    assert torch.equal(unpacked.codes, matrix.codes)
    assert torch.equal(unpacked.zero_or_middle, matrix.zero_or_middle)
    assert (unpacked.zero is None, unpacked.bits, unpacked.group) == (symmetric, bits, matrix.group)
    torch.testing.assert_close(
        unpacked.scale, matrix.scale, rtol=2.0**-11 if panels.has_scales else 0, atol=0
    )
    repacked = Panels.pack(unpacked)
    assert torch.equal(repacked.data, panels.data)
    assert torch.equal(repacked.unpack().scale, unpacked.scale)
    parts = [panels.unpack(first, 1) for first in range(len(panels.data))]
    assert torch.equal(torch.cat([part.codes for part in parts]), unpacked.codes)
    assert torch.equal(torch.cat([part.scale for part in parts]), unpacked.scale)


@given(
    seed=st.integers(0, 99),
    sizes=st.lists(st.sampled_from([0.0, 1e-30, 1e-6, 1.0, 1e4]), min_size=4, max_size=4),
)
def test_scales_of_groups_are_kept_to_the_rounding_of_float16_at_the_largest_of_their_row(
    seed: int, sizes: list[float]
) -> None:
    """Whichever group has the largest scale, also if the first is 0; below 2^-14 of it, float16 has fixed steps."""
    w = (
        numbers(5, 4, 32, seed=seed)
        * torch.tensor([sizes, sizes[::-1], [0, *sizes[1:]], [0, 0, 0, 1], [0] * 4])[..., None]
    )
    matrix = quantize_weights(w.flatten(1), 8, 32)
    actual = Panels.pack(matrix).unpack().scale.double()
    expected, largest = matrix.scale.double(), matrix.scale.double().amax(1, keepdim=True)
    assert torch.all((actual - expected).abs() <= expected * 2.0**-11 + largest * 2.0**-25)


@pytest.mark.parametrize(("bits", "group", "symmetric"), FORMS)
def test_weights_are_kept_to_half_a_step(bits: int, group: int | None, symmetric: bool) -> None:
    w = numbers(37, 130)
    w[3], w[5, :64] = 0, 1e-30
    matrix = quantize_weights(w, bits, group, symmetric=symmetric)
    step = matrix.scale.double().repeat_interleave(matrix.group, 1)[:, :130]
    assert torch.all((exact(matrix) - w).abs() <= step * (0.5 + 2**-16))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_clipped_scale_is_never_worse_and_survives_every_way_of_keeping_it(bits: int) -> None:
    w = numbers(19, 160)
    clipped = quantize_clipped(w, bits, 32)
    plain = quantize_weights(w, bits, 32)
    in_bf16 = QuantizedMatrix(plain.codes, plain.scale.bfloat16().float(), None, bits, 32)
    errors = [(exact(m) - w).square().view(19, 5, 32).sum(2) for m in (clipped, in_bf16)]
    assert torch.all(errors[0] <= errors[1] * (1 + 1e-6))
    assert bits == 8 or errors[0].sum() < 0.9 * errors[1].sum()
    assert torch.equal(clipped.scale, clipped.scale.bfloat16().float())
    assert torch.equal(Panels.pack(clipped).unpack().scale, clipped.scale)


@needs_kernels
@pytest.mark.parametrize(("bits", "group", "symmetric"), FORMS)
@pytest.mark.parametrize("rows", [1, 3, 64, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_sums_of_integers(
    bits: int, group: int | None, symmetric: bool, rows: int, dtype: torch.dtype
) -> None:
    """Integers are exact; the scales of inputs are at most three roundings off, the sum over G groups G more."""
    layer = quantized(Linear(150, 35), quantize_weights(numbers(35, 150), bits, group, symmetric=symmetric))
    matrix, x = layer.kept.panels.unpack(), numbers(rows, 150, seed=1).to(dtype)
    q, scale = (t.double() for t in rounded(x))
    weights = nn.functional.pad(exact(matrix), (0, 10)).unflatten(1, (-1, 32))
    terms = torch.einsum("rgi,ogi->rog", q, weights) * scale[:, None]
    bias = layer.bias.detach().double()
    expected = terms.sum(2) + bias
    tolerance = (terms.abs().sum(2) + bias.abs()) * 2.0**-24 * (5 + 8)
    if dtype == torch.bfloat16:
        tolerance = tolerance + expected.abs() * 2.0**-8
    with torch.no_grad():
        actual = layer(x)
    assert actual.dtype == dtype
    assert torch.all((actual.double() - expected).abs() <= tolerance)


@pytest.mark.parametrize(("bits", "group", "symmetric"), FORMS)
def test_a_large_matrix_is_packed_as_its_rows_are(
    bits: int, group: int | None, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = quantize_weights(numbers(75, 150), bits, group, symmetric=symmetric)
    packed = Panels.pack(matrix)
    monkeypatch.setattr("headway.native.panels.AT_ONCE", 2 * PANEL * 150)
    assert torch.equal(Panels.pack(matrix).data, packed.data)


@pytest.mark.parametrize(("bits", "group", "symmetric"), FORMS)
def test_the_dequantized_product_is_that_of_its_blocks(
    bits: int, group: int | None, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.nn.weights.rounded.AT_ONCE", 32 * 150)  # two panels at a time
    layer = quantized(Linear(150, 75), quantize_weights(numbers(75, 150), bits, group, symmetric=symmetric))
    x = numbers(5, 13, 150, seed=1)
    w, bias = exact(layer.kept.panels.unpack()), layer.bias.detach().double()
    expected = x.double() @ w.T + bias
    tolerance = (x.double().abs() @ w.abs().T + bias.abs()) * 2.0**-24 * 152
    with torch.no_grad():
        actual = dequantized_linear(x, layer.kept.panels, layer.bias)
        assert torch.all((actual.double() - expected).abs() <= tolerance)
        in_bf16 = dequantized_linear(x.bfloat16(), layer.kept.panels, layer.bias.bfloat16())
        expected = x.bfloat16().double() @ layer.matrix.bfloat16().double().T + layer.bias.bfloat16().double()
        tolerance = tolerance + expected.abs() * 2.0**-7
        assert torch.all((in_bf16.double() - expected).abs() <= tolerance)


@needs_kernels
@pytest.mark.parametrize(("bits", "group", "symmetric"), FORMS)
@pytest.mark.parametrize("rows", [5, 100])
def test_rounding_the_inputs_costs_what_is_stated(
    bits: int, group: int | None, symmetric: bool, rows: int
) -> None:
    """At most m / 254 sum |w'| of each group; averaged over outputs, the deviation of independent roundings."""
    layer = quantized(
        Linear(320, 200, bias=False), quantize_weights(numbers(200, 320), bits, group, symmetric=symmetric)
    )
    x = numbers(rows, 320, seed=1)
    w = exact(layer.kept.panels.unpack())
    largest, groups = x.double().unflatten(1, (-1, 32)).abs().amax(2), w.unflatten(1, (-1, 32))
    with torch.no_grad():
        error = (layer(x).double() - x.double() @ w.T).abs()
    sums = (x.double().abs() @ w.abs().T) * 2.0**-22
    assert torch.all(error <= (largest / 254) @ groups.abs().sum(2).T + sums)
    deviation = ((largest / 440).square() @ groups.square().sum(2).T).sqrt()
    assert 0.9 < float((error / deviation).square().mean().sqrt()) < 1.1


def test_no_rows_give_no_rows() -> None:
    layer = quantized(Linear(70, 33), quantize_weights(numbers(33, 70), 4, 32))
    with torch.no_grad():
        assert torch.equal(layer(numbers(0, 13, 70)), torch.empty(0, 13, 33))


def test_without_the_native_library_weights_are_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = quantized(Linear(70, 33), quantize_weights(numbers(33, 70), 4, 32))
    x = numbers(3, 70)
    monkeypatch.setattr(kernels, "library", lambda: None)
    with torch.no_grad():
        assert torch.equal(layer(x), nn.functional.linear(x, layer.matrix, layer.bias))


@needs_kernels
def test_layers_of_one_input_share_a_call_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [
        quantized(Linear(96, size, bias=size > 40), quantize_weights(numbers(size, 96), bits, 32))
        for size, bits in ((48, 8), (16, 4), (33, 8))
    ]
    calls: list[int] = []
    monkeypatch.setattr(
        "headway.nn.weights.rounded.linear", lambda x, m, b: calls.append(len(m)) or kernels.linear(x, m, b)
    )
    x = numbers(70, 96)
    with torch.no_grad():
        alone = [layer(x) for layer in layers]
        assert all(torch.equal(a, b) for a, b in zip(products(x, layers), alone, strict=True))
        assert calls == [1, 1, 1, 3]
        hooked: list[Tensor] = []
        layers[1].register_forward_hook(lambda module, args, out: hooked.append(out))
        products(x, layers)  # hooks are called
        assert torch.equal(hooked[0], alone[1])
        plain = [Linear(96, 5), *layers[:1]]
        assert all(torch.equal(a, layer(x)) for a, layer in zip(products(x, plain), plain, strict=True))


def test_gradients_reach_inputs_and_no_weight() -> None:
    """If a gradient is recorded, inputs are not rounded, and the gradient is that of the dequantized weights."""
    layer = quantized(Linear(64, 16), quantize_weights(numbers(16, 64), 8))
    x = numbers(3, 64).requires_grad_()
    with saved_tensors() as saved:
        y = layer(x)
    assert max((t.numel() for t in saved), default=0) < 16 * 64
    expected = nn.functional.linear(x, layer.matrix, layer.bias)
    assert torch.equal(y, expected)
    grad = torch.randn_like(y)
    assert torch.equal(*(torch.autograd.grad(out, x, grad)[0] for out in (y, expected)))
    assert not [p for name, p in layer.named_parameters() if name != "bias"]


def test_a_cast_of_the_model_leaves_the_weights_alone() -> None:
    layer = quantized(Linear(512, 96, bias=False), quantize_weights(numbers(96, 512), 4, 32))
    before = layer.matrix
    assert layer.nbytes == 96 * 512 * 18 // 32 + 4 * 96
    assert torch.equal(layer.to(torch.bfloat16).matrix, before)
    assert "int4, scales of groups of 32" in repr(layer)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [None, 8, 12])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_part_of_a_matrix_is_that_part_of_its_numbers(
    bits: int, group: int | None, symmetric: bool
) -> None:
    matrix = quantize_weights(numbers(6, 48), bits, group, symmetric=symmetric)
    full = matrix.dequantize()
    for axis, rows in ((0, range(2, 5)), (0, range(6)), (1, range(24, 48)), (1, range(48)), (1, range(24))):
        part = matrix.part(axis, rows)
        assert torch.equal(part.dequantize(), full.narrow(axis, rows.start, len(rows)))
        assert (part.bits, part.zero is None) == (bits, symmetric)
        assert part.scale.shape == part.zero_or_middle.shape
        assert part.scale.shape[1] == -(-part.codes.shape[1] // part.group)
    if group is None:  # a row has one scale, so any inputs are a part
        assert torch.equal(matrix.part(1, range(5, 12)).dequantize(), full[:, 5:12])
    else:
        for rows in (range(1, 1 + group), range(group + 1)):
            with pytest.raises(AssertionError):
                matrix.part(1, rows)


@pytest.mark.parametrize(("bits", "middle"), [(4, 8), (8, 128)])
def test_codes_of_zero_are_the_middle_unless_they_are_kept(bits: int, middle: int) -> None:
    matrix = quantize_weights(numbers(3, 32), bits, 16)
    assert torch.equal(matrix.zero_or_middle, torch.full((3, 2), middle, dtype=torch.uint8))
    moved = matrix.moved(lambda t: t.flip(0))
    assert moved.zero is None
    assert torch.equal(moved.dequantize(), matrix.dequantize().flip(0))
    with_zeros = quantize_weights(numbers(3, 32), bits, 16, symmetric=False)
    assert with_zeros.zero_or_middle is with_zeros.zero
    assert torch.equal(with_zeros.moved(lambda t: t.flip(0)).dequantize(), with_zeros.dequantize().flip(0))
