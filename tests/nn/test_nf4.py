"""NF4 against bitsandbytes, a naive search, and products with the dequantized weights."""

import hashlib

import pytest
import torch
from torch import Tensor, nn

from headway.models import Decoder, ModelSpec, build
from headway.nn import Adapter, Linear, Lora, attach, block_linears
from headway.nn.weights import Nf4
from headway.nn.weights.nf4 import VALUES, dynamic_map
from tests.saved import saved_tensors
from tests.tolerance import assert_rounded_once


def weights(rows: int, columns: int) -> Tensor:
    """Returns the same numbers on every machine."""
    n = torch.arange(rows * columns)
    return (((n * 7919) % 20011 - 10005).float() / 65536).view(rows, columns)


def nf4(layer: Linear) -> Linear:
    layer.keep(Nf4.pack(layer.matrix))
    return layer


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("shape", "codes", "scales"),
    [
        ((96, 200), "ce0ca813bff0af9a", "78ff9efc34923f12"),
        ((33, 50), "e6927cb308eede27", "7c4132ffaffc0045"),
    ],
)
def test_codes_and_scales_are_those_of_bitsandbytes(shape: tuple[int, int], codes: str, scales: str) -> None:
    """Digests of the results of bitsandbytes 0.50.2 for the same numbers:
    `quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=True)`."""
    packed = Nf4.pack(weights(*shape))
    assert (digest(packed.codes), digest(packed.scales)) == (codes, scales)


@pytest.mark.parametrize("shape", [(8, 64), (300, 64), (7, 9), (1, 1), (33, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_number_has_the_nearest_value_of_its_block(shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(0.02).to(dtype)
    w.view(-1)[: min(64, w.numel() // 2)] = 0  # a block without a scale
    packed = Nf4.pack(w)
    flat, codes = w.float().view(-1), torch.stack((packed.codes >> 4, packed.codes & 15), 1).view(-1)
    blocks = flat.split(64)
    largest = torch.stack([block.abs().max() for block in blocks])
    values = torch.tensor(VALUES)
    for i, block in enumerate(blocks):
        chosen = values[codes[i * 64 : i * 64 + len(block)].long()]
        best = (block[:, None] - values * largest[i]).abs().min(1).values
        torch.testing.assert_close((block - chosen * largest[i]).abs(), best, rtol=1e-5, atol=1e-8)
    maxima = [part.abs().max() for part in (largest - largest.mean()).split(256)]
    step = torch.cat([m.expand(len(p)) for m, p in zip(maxima, largest.split(256), strict=True)])
    distances = (largest - largest.mean())[:, None] - dynamic_map() * step[:, None]
    torch.testing.assert_close(
        (packed.scale() - largest).abs(), distances.abs().min(1).values, rtol=1e-4, atol=1e-7
    )
    expected = values[codes[: len(flat)].long()] * packed.scale().repeat_interleave(64)[: len(flat)]
    assert torch.equal(packed.dequantize(dtype), expected.view(shape).to(dtype))


@pytest.mark.parametrize("bias", [False, True])
def test_the_layer_is_the_product_with_its_matrix_and_keeps_no_weight_for_the_backward(bias: bool) -> None:
    torch.manual_seed(0)
    layer = nf4(Linear(70, 33, bias=bias))
    x = torch.randn(2, 5, 70, requires_grad=True)
    with saved_tensors() as saved:
        y = layer(x)
    assert max((t.numel() for t in saved), default=0) < 33 * 70
    expected = nn.functional.linear(x, layer.matrix, layer.bias)
    assert torch.equal(y, expected)
    grad = torch.randn_like(y)
    assert torch.equal(*(torch.autograd.grad(out, x, grad)[0] for out in (y, expected)))


def test_bytes_of_a_weight_and_a_cast_of_the_model_that_leaves_them_alone() -> None:
    layer = nf4(Linear(512, 1024, bias=False))
    stored = sum(b.numel() * b.itemsize for b in layer.buffers())
    assert stored / (512 * 1024) == pytest.approx(0.5 + 1 / 64 + 4 / 64 / 256, rel=1e-4)
    assert not [*layer.parameters()]
    before = layer.matrix
    cast = layer.to(torch.bfloat16)
    assert torch.equal(cast.matrix, before)
    x, w = torch.randn(3, 512).bfloat16().double(), before.bfloat16().double()
    assert_rounded_once(cast(x.bfloat16()), x @ w.T, terms=(x.square() @ w.square().T).sqrt())


@pytest.mark.parametrize("magnitude", [False, True])
def test_an_adapter_on_quantized_layers_is_one_on_the_weights_that_they_stand_for(magnitude: bool) -> None:
    spec = ModelSpec.of("llama", vocab=37, width=32, layers=2, heads=4, hidden=48)
    ids = torch.randint(37, (2, 7), generator=torch.Generator().manual_seed(0))
    quantized, plain = (build(spec, seed=0) for _ in range(2))
    assert isinstance(quantized, Decoder)
    for name, layer in block_linears(quantized).items():
        nf4(layer)
        plain.get_submodule(name).weight.data = layer.matrix
    losses, gradients = [], []
    for model in (quantized, plain):
        attach(model, Adapter.fresh(quantized, Lora(rank=4, magnitude=magnitude)))
        loss = model(ids, targets=ids).total
        loss.backward()
        losses.append(loss.detach())
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*losses)
    assert gradients[0].keys() == gradients[1].keys()
    for name, value in gradients[0].items():
        torch.testing.assert_close(value, gradients[1][name], rtol=1e-4, atol=1e-6)
