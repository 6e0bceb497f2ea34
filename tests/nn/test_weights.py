"""Every form of weights, with every adapter, whole or shared by ranks, in every use: all cells of a table are run."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.errors import BackendError
from headway.models import ModelSpec, build
from headway.nn import Linear, Lora, LowRank, Share, linears
from headway.nn.linear import products
from headway.nn.weights import WEIGHTS, BlockQuantized, Packed, Weight
from headway.parallel import Exchange, TensorParallel
from tests.pairwise import chequered
from tests.parallel.simulation import simulate

OUTPUTS, INPUTS, RANKS = 48, 512, 2
ADAPTERS: dict[str, tuple[Lora, ...]] = {
    "none": (),
    "lora": (Lora(rank=3, alpha=5),),
    "dora": (Lora(rank=3, alpha=5, magnitude=True),),
    "two": (Lora(rank=3, alpha=5), Lora(rank=2, alpha=-1, stabilized=True)),
}
SHARES: dict[str, int | None] = {"whole": None, "outputs shared": 0, "inputs shared": 1}
USES = {"train": 7, "prefill": 70, "decode": 2}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer_of(weights: str, adapters: str, outputs: int = OUTPUTS) -> Linear:
    layer = Linear(INPUTS, outputs)
    w = numbers(outputs, INPUTS).bfloat16()  # which every form takes
    layer.bias.data = numbers(outputs, seed=1)
    layer.keep(WEIGHTS[weights].pack(w if weights == "compressed" else w.float()))
    for number, lora in enumerate(ADAPTERS[adapters]):
        parts = [numbers(lora.rank, INPUTS, seed=2), numbers(outputs, lora.rank, seed=3)]
        magnitude = numbers(outputs, seed=4).abs() if lora.magnitude else None
        layer.adapters[str(number)] = LowRank(lora, *(0.1 * part for part in parts), magnitude)
        layer.active = (*layer.active, str(number))
    layer.requires_grad_(False)
    layer.adapters.requires_grad_(True)
    return layer


def formula(layer: Linear, x: Tensor) -> Tensor:
    """Computes the layer in the dtype of x, with dequantized weights and with adapters as matrices."""
    w = layer.matrix.to(x.dtype)
    merged = w
    for part in layer.adapters.values():
        a, b, m = (
            None if t is None else t.to(x.dtype)
            for t in (part.lora_A, part.lora_B, part.lora_magnitude_vector)
        )
        adapted = w + part.lora.scale * b @ a
        merged = (
            merged - w + (adapted if m is None else (m / adapted.detach().norm(dim=1))[:, None] * adapted)
        )
    return x @ merged.T + layer.bias.to(x.dtype)


@dataclass
class Found:
    y: Tensor
    dx: Tensor | None = None
    adapters: dict[str, Tensor] | None = None


def run(layer: Linear, x: Tensor, use: str) -> Found:
    if use != "train":
        with torch.no_grad():
            return Found(layer(x))
    x = x.clone().requires_grad_()
    y = layer(x)
    trained = dict(layer.adapters.named_parameters())
    dx, *grads = torch.autograd.grad(y.square().sum(), [x, *trained.values()])
    return Found(y.detach(), dx, dict(zip(trained, grads, strict=True)))


def shared(layer: Linear, x: Tensor, use: str, axis: int | None) -> list[Found]:
    """Returns the result of each rank, with its outputs joined and its gradients of whole parameters summed."""
    if axis is None:
        return [run(layer, x, use)]

    def rank(exchange: Exchange) -> Found:
        part, share = layer_of(*layer.made), Share(TensorParallel(exchange), axis)  # type: ignore[attr-defined]
        span = share.part(INPUTS if axis else OUTPUTS)
        part.divide(share)
        result = run(part, x[:, span.start : span.stop] if axis else x, use)
        if axis == 0:
            result.y = torch.cat(exchange.gather(result.y), 1)
        elif result.dx is not None:
            result.dx = torch.cat(exchange.gather(result.dx), 1)
        for name, grad in (result.adapters or {}).items():
            cut = {"lora_A": 1, "lora_B": None} if axis else {"lora_A": None}
            dim = cut.get(name.rpartition(".")[2], None if axis else 0)
            gathered = exchange.gather(grad)
            result.adapters[name] = sum(gathered) if dim is None else torch.cat(gathered, dim)  # type: ignore[index]
        return result

    return simulate(RANKS, rank)


@chequered("weights,share,adapters", list(WEIGHTS), list(SHARES), list(ADAPTERS))
def test_every_cell_is_the_formula(weights: str, share: str, adapters: str) -> None:
    """At most twice the error of the same formula in float32, and for codes without gradients the cost of rounding x:
    at most m / 254 sum |w| of a group of 32."""
    layer = layer_of(weights, adapters)
    layer.made = weights, adapters  # type: ignore[assignment]
    coarse = (
        2.0**-8 if (weights, adapters) == ("compressed", "dora") else 0.0
    )  # norms in the dtype of the weights
    for use, rows in USES.items():
        x = numbers(rows, INPUTS, seed=5)
        exact, in_float32 = (formula(layer, x.to(dtype)).detach() for dtype in (torch.float64, torch.float32))
        tolerance = 2 * (in_float32 - exact).abs().max() + 16 * 2.0**-24 * exact.abs().max()
        if use != "train" and issubclass(WEIGHTS[weights], Packed):
            largest = x.double().unflatten(1, (-1, 32)).abs().amax(2)
            rounding = (largest / 254) @ layer.matrix.double().unflatten(1, (-1, 32)).abs().sum(2).T
            tolerance = tolerance + rounding * (
                12 if adapters == "dora" else 1
            )  # gains of this layer are below 12
        tolerance = tolerance + coarse * exact.abs().max()
        for result in shared(layer, x, use, SHARES[share]):
            assert torch.all((result.y - exact).abs() <= tolerance), (
                use,
                float((result.y - exact).abs().max()),
            )
            if use == "train":
                check_gradients(layer, x, result, 3e-5 + 2 * coarse)


def check_gradients(layer: Linear, x: Tensor, result: Found, tolerance: float) -> None:
    exact_x = x.double().requires_grad_()
    trained = dict(layer.adapters.named_parameters())
    dx, *grads = torch.autograd.grad(formula(layer, exact_x).square().sum(), [exact_x, *trained.values()])
    assert result.dx is not None
    assert result.adapters is not None
    pairs = [(result.dx, dx), *zip(result.adapters.values(), grads, strict=True)]
    for actual, expected in pairs:
        assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_part_is_those_numbers_to_the_bit(weights: str) -> None:
    weight = layer_of(weights, "none").kept
    columns = (
        (range(256, 512), range(256)) if isinstance(weight, BlockQuantized) else (range(128, 256), range(64))
    )
    for axis, rows in ((0, range(16, 48)), (0, range(16)), *((1, span) for span in columns)):
        assert weight.part_reason(axis, rows) is None
        part = weight.part(axis, rows)
        assert torch.equal(part.dequantize(), weight.dequantize().narrow(axis, rows.start, len(rows)))
        assert part.shape == tuple(part.dequantize().shape)


@pytest.mark.parametrize(
    ("weights", "cut"), [("int8", 48), ("int4", 24), ("nf4", 32), ("q4_K", 128), ("q5_K", 384), ("q6_K", 32)]
)
def test_a_part_that_cuts_a_group_has_its_reason(weights: str, cut: int) -> None:
    reason = layer_of(weights, "none").kept.part_reason(1, range(cut))
    assert reason is not None
    assert f"{cut} inputs per process" in reason


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(BackendError, match="got 96"):
        WEIGHTS["q5_K"].pack(numbers(4, 96))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_what_a_layer_keeps_survives_casts_copies_and_state_dicts(weights: str) -> None:
    layer = layer_of(weights, "none")
    before, packed = layer.matrix, weights not in ("plain", "compressed")
    state = layer.state_dict()
    assert ("weight" in state) is not packed
    layer.to(torch.bfloat16)
    assert torch.equal(layer.matrix.float(), before.float())  # the plain ones are numbers of bf16
    loaded = layer_of(weights, "none")
    if packed:
        loaded.load_state_dict({name: torch.zeros_like(t) for name, t in state.items()})
        assert not torch.equal(loaded.matrix, before)
        loaded.load_state_dict(state)
    assert torch.equal(loaded.matrix, before)
    layer.keep(WEIGHTS["plain"].pack(before))
    assert [name for name, _ in layer.named_buffers()] == []
    assert torch.equal(layer.weight, before)


def test_layers_of_one_input_share_what_their_forms_share() -> None:
    """Bit-identical to each layer alone, whichever forms are combined."""
    x = numbers(9, INPUTS, seed=5)
    layers = [layer_of(weights, adapters) for weights in WEIGHTS for adapters in ("none", "lora")]
    with torch.no_grad():
        alone = [layer(x) for layer in layers]
        for chosen in (
            [0, 1],
            [2, 3],
            [4, 5],
            [4, 6],
            [7, 5, 6],
            [8, 9],
            [0, 4, 8],
            [1, 3, 5, 7, 9],
            [4, 10, 12, 14],
        ):
            for index, y in zip(chosen, products(x, [layers[i] for i in chosen]), strict=True):
                assert torch.equal(y, alone[index]), chosen


@dataclass(frozen=True, eq=False)
class Signs(Weight):
    """A form from outside of the package: signs, and a scale for each output."""

    name = "signs"
    signs: Tensor
    scale: Tensor

    @classmethod
    def pack(cls, w: Tensor) -> "Signs":
        return cls(w.sign().to(torch.int8), w.float().abs().mean(1))

    @property
    def shape(self) -> tuple[int, int]:
        return self.signs.shape[0], self.signs.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        return {"signs": self.signs, "scale": self.scale}

    def with_tensors(self, tensors: dict[str, Tensor]) -> "Signs":
        return Signs(**tensors)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return (self.signs * self.scale[:, None]).to(dtype or torch.float32)


@pytest.mark.parametrize("adapters", ADAPTERS)
def test_a_form_from_outside_is_one_class(adapters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form multiplies, gives gradients and takes adapters."""
    monkeypatch.setitem(WEIGHTS, "signs", Signs)
    test_every_cell_is_the_formula("signs", "whole", adapters)
    layer = layer_of("signs", adapters)
    assert layer.kept.native() == "the kernels do not support weights in signs"
    assert "cannot be sharded" in (layer.kept.part_reason(0, range(8)) or "")


@torch.no_grad()
def test_a_form_from_outside_runs_in_a_model() -> None:
    model: Any = build(ModelSpec.of("llama", vocab=37, width=32, layers=2, heads=4, hidden=48), seed=0).eval()
    ids = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(0))
    before = model(ids)
    for layer in linears(model.model).values():
        layer.keep(Signs.pack(layer.matrix))
    changed = model.double()(ids)
    assert not torch.equal(changed.float(), before)
    for layer in linears(model.model).values():
        layer.keep(WEIGHTS["plain"].pack(layer.matrix.double()))
    torch.testing.assert_close(model(ids), changed)
