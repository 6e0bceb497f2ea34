"""A mixture of experts equals the weighted sum of every expert on every row."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.nn import Experts, Linear, MixtureOfExperts, linears
from headway.nn.weights import Int4, Int8

BASE = Experts(count=8, top=3, hidden=12)
KINDS = {
    "softmax": BASE,
    "one": replace(BASE, top=1),
    "all": replace(BASE, top=8),
    "not normalized": replace(BASE, normalized=False, scale=0.7),
    "router bias": replace(BASE, router_bias=True),
    "shared": replace(BASE, shared=20),
    "shared behind a gate": replace(BASE, shared=20, shared_gate=True),
    "sigmoid": replace(BASE, score="sigmoid", choice_bias=True, scale=2.5),
    "groups": replace(BASE, score="sigmoid", choice_bias=True, groups=4, top_groups=2),
}


def made(experts: Experts, **options: Any) -> MixtureOfExperts:
    """Returns a layer of width 10 in float64 whose biases are not 0."""
    layer = MixtureOfExperts(experts, 10, **{"gated": True, **options}).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for t in (*layer.parameters(), *layer.buffers()):
            t.copy_(torch.randn(t.shape, generator=generator, dtype=torch.float64) * 0.5)
    return layer


def weights_of_all(layer: MixtureOfExperts, rows: Tensor) -> Tensor:
    """Returns every expert's weight for every row [R, E], 0 for those not chosen, by the published formulas."""
    options, gate = layer.gate.how, layer.gate
    logits = rows @ gate.weight.T + (0 if gate.bias is None else gate.bias)
    weights = torch.zeros_like(logits)
    for row, row_logits in enumerate(logits):
        scores = (
            row_logits.exp() / row_logits.exp().sum()
            if options.score == "softmax"
            else 1 / (1 + (-row_logits).exp())
        )
        bias = gate.e_score_correction_bias
        choices = (scores.detach() if bias is None else scores.detach() + bias).tolist()
        group_size = options.count // options.groups
        groups = [range(i * group_size, (i + 1) * group_size) for i in range(options.groups)]
        if options.groups > 1:
            groups.sort(key=lambda group: -sum(sorted(choices[i] for i in group)[-2:]))
        candidates = [i for group in groups[: options.top_groups] for i in group]
        chosen = sorted(candidates, key=lambda i: -choices[i])[: options.top]
        total = sum(scores[i] for i in chosen) if options.normalized else 1.0
        for i in chosen:
            weights[row, i] = options.scale * scores[i] / total
    return weights


def naive(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """Computes the weighted sum of every expert on every row."""
    rows = x.reshape(-1, x.shape[-1])
    outputs = torch.stack([expert(rows) for expert in layer.experts], 1)
    y = (weights_of_all(layer, rows)[..., None] * outputs).sum(1)
    if layer.shared_expert is not None:
        gate = layer.shared_expert_gate
        y = y + layer.shared_expert(rows) * (1 if gate is None else torch.sigmoid(rows @ gate.weight.T))
    return y.view(x.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_chosen_experts_are_every_expert_on_every_row_weighted(kind: str) -> None:
    layer = made(KINDS[kind])
    x = torch.randn(2, 9, 10, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(x), naive(layer, x)
    assert (actual - expected).abs().max() < 1e-12 * expected.abs().max()
    leaves = [x, *layer.parameters()]
    our_grads, naive_grads = (
        torch.autograd.grad(y.square().sum(), leaves, allow_unused=True) for y in (actual, expected)
    )
    for name, a, b in zip(["x", *dict(layer.named_parameters())], our_grads, naive_grads, strict=True):
        assert a is not None, name
        assert (a - b).abs().max() <= 1e-12 * max(float(b.abs().max()), 1.0), name
    with torch.no_grad():
        assert torch.equal(layer(x), actual)
        alone = torch.cat([layer(row[None, None]) for row in x.flatten(0, 1)], 1).view(x.shape)
        assert (alone - actual).abs().max() < 1e-12 * expected.abs().max()
        assert layer(x[:, :0]).shape == (2, 0, 10)


@pytest.mark.parametrize("kind", ["softmax", "shared behind a gate", "groups"])
def test_gradients_are_those_of_differences(kind: str) -> None:
    layer = made(KINDS[kind], bias=True)
    x = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))
        return y

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x, *layer.parameters()), fast_mode=True)


def test_an_expert_without_rows_has_a_gradient_of_zero() -> None:
    layer = made(replace(BASE, top=1))
    layer(torch.randn(1, 10, dtype=torch.float64)).sum().backward()
    used = [any(p.grad.any() for p in expert.parameters()) for expert in layer.experts]
    assert sum(used) == 1
    assert all(p.grad is not None for p in layer.parameters())


@torch.no_grad()
def test_a_row_reads_the_weights_of_its_own_experts_alone() -> None:
    """Counted by the layers that are called, and by their bytes."""
    layer = made(replace(BASE, shared=20))
    read: list[int] = []
    for part in linears(layer).values():
        part.register_forward_pre_hook(lambda part, args: read.append(part.nbytes))
    layer(torch.randn(1, 1, 10, dtype=torch.float64))
    assert sum(read) == 8 * 3 * 10 * (3 * 12 + 20)
    read.clear()
    x = torch.randn(1, 40, 10, dtype=torch.float64)
    layer(x)
    chosen = len(set(layer.gate(x[0])[0].flatten().tolist()))
    assert sum(read) == 8 * 3 * 10 * (chosen * 12 + 20)


def test_the_router_is_computed_in_float32_and_its_choosing_bias_stays_so() -> None:
    layer = made(KINDS["sigmoid"]).float()
    bias = layer.gate.e_score_correction_bias.clone()
    layer = layer.bfloat16()
    assert layer.gate.weight.dtype == torch.bfloat16
    assert torch.equal(layer.gate.e_score_correction_bias, bias)
    assert layer.gate(torch.randn(4, 10).bfloat16())[1].dtype == torch.float32
    with torch.device("meta"):
        blank = MixtureOfExperts(KINDS["sigmoid"], 10)
    empty = blank._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"))
    assert torch.equal(empty.gate.e_score_correction_bias, torch.zeros(8))


@pytest.mark.parametrize("form", [Int8, Int4])
@torch.no_grad()
def test_experts_in_fewer_bits_are_the_dequantized_ones(form: Any) -> None:
    layer = MixtureOfExperts(replace(BASE, hidden=64, shared=32), 32, gated=True).eval()
    plain = MixtureOfExperts(replace(BASE, hidden=64, shared=32), 32, gated=True).eval()
    plain.load_state_dict(layer.state_dict())
    for name, part in linears(layer).items():
        part.keep(form.pack(part.matrix))
        plain_linear = plain.get_submodule(name)
        assert isinstance(plain_linear, Linear)
        plain_linear.weight.copy_(part.matrix)
    x = torch.randn(2, 7, 32)
    expected = plain(x)
    assert (layer(x) - expected).abs().max() < 0.03 * expected.abs().max()


def test_dropout_falls_in_training_alone() -> None:
    layer = made(replace(BASE, shared=20), dropout=0.5)
    x = torch.randn(4, 10, dtype=torch.float64)
    assert not torch.equal(layer(x), layer(x))
    assert torch.allclose(layer.eval()(x), naive(layer, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"top": 9}, "top=9 is more than the 8 experts"),
        ({"count": 0}, "count must be a whole number of at least 1"),
        ({"groups": 3}, "groups=3 must divide 8 experts"),
        ({"groups": 8}, "groups of two or more"),
        ({"top_groups": 2}, "top_groups=2 is more than groups=1"),
        ({"groups": 4, "top_groups": 1}, "top=3 is more than the 2 experts of 1 groups"),
        ({"score": "softmx"}, "there is no score 'softmx' .did you mean"),
        ({"shared_gate": True}, "shared_gate=True needs a shared expert"),
        ({"scale": 0.0}, "scale must be a finite number above 0"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(BASE, **wrong)


def test_a_layer_needs_its_width() -> None:
    with pytest.raises(ConfigError, match="hidden=0 is for ModelSpec only"):
        MixtureOfExperts(replace(BASE, hidden=0), 10)


def test_modules_are_named_as_files_have_them() -> None:
    names = {name for name, _ in made(KINDS["shared behind a gate"]).named_parameters()}
    assert {"gate.weight", "experts.7.down_proj.weight", "shared_expert.up_proj.weight"} < names
    assert "shared_expert_gate.weight" in names
    assert isinstance(made(BASE).gate, nn.Linear)
