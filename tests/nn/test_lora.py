"""Adapters beside frozen layers: against weights that contain them, and what is trained."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.errors import ConfigError
from headway.models import ModelSpec, build
from headway.nn import (
    Adapter,
    Linear,
    Lora,
    LowRank,
    adapted,
    adapter_names,
    attach,
    block_linears,
    merge,
    named_adapter_parameters,
    set_active,
    unmerge,
)
from headway.nn.weights import Nf4

SIZE: dict[str, Any] = {"vocab": 37, "width": 24, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 40}
IDS = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(0))
LORAS = st.builds(
    Lora,
    rank=st.integers(1, 9),
    alpha=st.floats(-20, 20),
    stabilized=st.booleans(),
    magnitude=st.booleans(),
)


def small(family: str = "llama", dtype: torch.dtype = torch.float64) -> Any:
    return build(ModelSpec.of(family, **SIZE), seed=0, dtype=dtype).eval()


def trained(model: Any, lora: Lora, seed: int = 1) -> Adapter:
    """Returns an adapter as it is after some steps: none of its tensors has its initial values."""
    fresh, generator = Adapter.fresh(model, lora), torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(value.shape, generator=generator) for name, value in fresh.tensors.items()}
    tensors = {
        name: value * (1 + 0.3 * noise[name]) if "magnitude" in name else value + 0.2 * noise[name]
        for name, value in fresh.tensors.items()
    }
    return Adapter(fresh.layers, tensors)


def naive(layer: Linear, part: LowRank) -> tuple[Tensor, Tensor]:
    """Returns (weight with the adapter, norms of its rows), by the formula of the papers, with the matrix B A."""
    lora = part.lora
    scale = lora.alpha / (lora.rank**0.5 if lora.stabilized else lora.rank)
    merged = layer.weight + scale * part.lora_B @ part.lora_A
    norm = merged.pow(2).sum(1, keepdim=True).sqrt()
    if part.lora_magnitude_vector is None:
        return merged, norm
    return part.lora_magnitude_vector[:, None] * merged / norm.detach(), norm


@settings(max_examples=25, deadline=None)
@given(lora=LORAS, bias=st.booleans(), seed=st.integers(0, 99))
def test_the_products_side_by_side_are_the_formula_with_its_gradients(
    lora: Lora, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer, x = Linear(6, 5, bias=bias).double(), torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    parts = [
        torch.randn(lora.rank, 6),
        torch.randn(5, lora.rank),
        *([torch.rand(5)] if lora.magnitude else []),
    ]
    part = LowRank(lora, *(value.double() for value in parts))
    layer.adapters["mine"], layer.active = part, ("mine",)
    weight, _ = naive(layer, part)
    expected, y = torch.nn.functional.linear(x, weight, layer.bias), layer(x)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    actual_grads = torch.autograd.grad(y.square().sum(), (x, *part.parameters()))
    expected_grads = torch.autograd.grad(expected.square().sum(), (x, *part.parameters()))
    for a, b in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(part.merged(layer.weight.detach()), weight.detach())


@pytest.mark.parametrize("magnitude", [False, True])
def test_a_fresh_adapter_adds_nothing_and_is_a_function_of_its_seed(magnitude: bool) -> None:
    model = small()
    expected = model(IDS)
    adapters = [Adapter.fresh(model, Lora(rank=3, magnitude=magnitude), seed=seed) for seed in (0, 0, 1)]
    attach(model, adapters[0])
    torch.testing.assert_close(model(IDS), expected, rtol=0, atol=1e-12 if magnitude else 0)
    first, same_seed, other_seed = (
        adapter.tensors["model.layers.0.mlp.down_proj.lora_A.weight"] for adapter in adapters
    )
    assert torch.equal(first, same_seed)
    assert not torch.equal(first, other_seed)
    assert first.abs().max() <= 40**-0.5
    assert first.std() == pytest.approx(
        (40 * 3) ** -0.5, rel=0.2
    )  # PEFT's: kaiming_uniform_ with a = sqrt(5)


def test_all_linear_layers_of_the_blocks_unless_some_are_asked_for() -> None:
    model = small()
    layers = block_linears(model)
    assert len(layers) == 7 * 2
    assert Adapter.fresh(model, Lora()).layers.keys() == layers.keys()
    chosen = Adapter.fresh(model, Lora(), ("q_proj", "v_proj"))
    assert sorted(chosen.layers) == [f"model.layers.{i}.self_attn.{n}_proj" for i in (0, 1) for n in "qv"]
    with pytest.raises(ConfigError, match=r"no linear layer 'q_prj' \(did you mean \"q_proj\"\?\)"):
        Adapter.fresh(model, Lora(), ("q_prj",))
    cross = build(ModelSpec.of_pair("transformer", **{**SIZE, "kv_heads": 4}), seed=0)
    assert len(block_linears(cross)) == 2 * 6 + 2 * 10


def test_what_is_trained_is_the_adapter_and_nothing_else() -> None:
    model = small(dtype=torch.float32).train()
    attach(model, trained(model, Lora(rank=2, magnitude=True)))
    model(IDS, targets=IDS).total.backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, _ in named_adapter_parameters(model)}
    assert len(with_gradient) == 3 * 14
    assert all(p.requires_grad == (name in with_gradient) for name, p in model.named_parameters())


def test_several_add_up_and_merge_and_unmerge_restores_the_bits() -> None:
    model = small(dtype=torch.float32)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    base, outputs = model(IDS), {}
    for name, lora in (("a", Lora(rank=2)), ("b", Lora(rank=3, alpha=-4)), ("c", Lora(magnitude=True))):
        attach(model, trained(model, lora, seed=len(outputs)), name)
        set_active(model, [name])
        outputs[name] = model(IDS)
    assert adapter_names(model) == ["a", "b", "c"]
    layer = dict(adapted(model))["model.layers.0.mlp.up_proj"]
    x = torch.randn(4, 24)
    for active in ([], ["a"], ["c"], ["a", "b"], ["a", "b", "c"]):
        set_active(model, active)
        plain = x @ layer.weight.T
        parts = [layer.adapters[name](x, layer.kept, plain) for name in active]
        torch.testing.assert_close(layer(x), plain + sum(parts), rtol=1e-6, atol=1e-6)
        unmerged = model(IDS)
        merge(model)
        assert all(linear.merged for _, linear in adapted(model))
        torch.testing.assert_close(model(IDS), unmerged, rtol=1e-5, atol=1e-5)
        with pytest.raises(ConfigError, match=r"merged into the weights; unmerge"):
            set_active(model, [])
        unmerge(model)
        assert torch.equal(model(IDS), unmerged)
    set_active(model, [])
    assert torch.equal(model(IDS), base)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in weights.items())
    assert all((value - base).abs().max() > 1e-3 for value in outputs.values())


def test_dropout_falls_on_the_input_of_the_adapter_alone_and_in_training_only() -> None:
    model = small()
    attach(model, trained(model, Lora(rank=2, dropout=0.5, magnitude=True)))
    layer = dict(adapted(model))["model.layers.1.self_attn.v_proj"]
    part, x = layer.adapters["default"], torch.randn(5, 24, dtype=torch.float64)
    assert isinstance(part, LowRank)
    weight, _ = naive(layer, part)
    torch.testing.assert_close(layer(x), x @ weight.T)
    layer.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        actual = layer(x)
        torch.manual_seed(3)
        dropped = torch.nn.functional.dropout(x, 0.5)
    torch.testing.assert_close(actual, x @ layer.weight.T + dropped @ (weight - layer.weight).T)


def test_what_cannot_be_is_refused() -> None:
    model = small()
    adapter = trained(model, Lora(rank=2))
    attach(model, adapter, "a")
    with pytest.raises(ConfigError, match="the adapter name 'a' exists already"):
        attach(model, adapter, "a")
    with pytest.raises(ConfigError, match=r"the adapter name 'a\.b' is empty or has a dot"):
        attach(model, adapter, "a.b")
    with pytest.raises(ConfigError, match=r"there is no adapter 'aa' \(did you mean \"a\"\?\); there are a"):
        set_active(model, ["aa"])
    with pytest.raises(ConfigError, match="there is no adapter 'b'"):
        Adapter.of(model, "b")
    with pytest.raises(ConfigError, match=r"the model has no layer model\.layers\.0\.mlp\.gate_proj"):
        attach(small("gpt_neox"), adapter)
    with pytest.raises(ConfigError, match="a rank of at least 1"):
        Lora(rank=0)
    quantized = small()
    for layer in block_linears(quantized).values():
        layer.keep(Nf4.pack(layer.matrix))
    attach(quantized, adapter)
    with pytest.raises(ConfigError, match=r"q_proj has weights in nf4"):
        merge(quantized)


def test_what_is_attached_is_what_was_given() -> None:
    model = small()
    adapter = trained(model, Lora(rank=2, magnitude=True))
    attach(model, adapter, "a")
    attached = Adapter.of(model, "a")
    assert attached.layers == adapter.layers
    assert attached.tensors.keys() == adapter.tensors.keys()
    assert all(torch.equal(attached.tensors[n].to(v.dtype), v) for n, v in adapter.tensors.items())


def test_an_attached_adapter_is_a_copy() -> None:
    """Training the adapter of one model changes neither the given adapter nor another model that has it."""
    first, second = small(), small()
    adapter = trained(first, Lora(rank=2, magnitude=True))
    before = {name: value.clone() for name, value in adapter.tensors.items()}
    attach(first, adapter)
    attach(second, adapter)
    with torch.no_grad():
        for _, parameter in named_adapter_parameters(first):
            parameter.add_(1)
    for untouched in (adapter, Adapter.of(second, "default")):
        assert all(torch.equal(untouched.tensors[name], value) for name, value in before.items())
