"""An accelerated model computes what the model computes, and `restore` gives back the model.

Weights are drawn with standard deviation 0.3, so that attention is far from uniform. Two correct float32 computations
of such a model differ by some tens of roundings (6e-8 each): by up to 1e-5 of the largest logit, and of the largest
gradient of a layer. A layer is the unit, not a tensor: the gradient of a key's bias is 0, since softmax is invariant to
it, so that its computed value is rounding alone.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers.models.llama.modeling_llama import LlamaAttention

from headway.errors import ConfigError
from headway.integrations.transformers import accelerate, restore
from headway.integrations.transformers.attention_layers import unsupported_reason
from headway.integrations.transformers.modules import relative
from headway.integrations.transformers.own_attention import attention_layers
from headway.integrations.transformers.products import side_by_side
from headway.integrations.transformers.steps import CACHE
from headway.native.linear import MOST_ROWS
from tests.checkpoints.shares import share
from tests.integrations.accelerated import FAMILIES, GROUPED, LENGTH, VOCAB, close, inputs, made, run, sunk


@share("family", FAMILIES, 0, 2)
def test_loss_logits_and_gradients_are_as_before(family: str) -> None:
    model = made(family)
    arguments = inputs(model)
    loss, logits, gradients = run(model, arguments)
    report = accelerate(model)
    assert not {name for name, reason in report.left.items() if "differs" in reason}, str(report)
    assert family == "Longformer" or report.taken["attention"] == len(attention_layers(model)) >= 2
    own_loss, own_logits, own_gradients = run(model, arguments)
    close(own_loss, loss, 1e-5)
    real = arguments["attention_mask"].bool()
    close(own_logits[real], logits[real], 1e-5)
    assert own_gradients.keys() == gradients.keys()
    scales = largest(gradients)
    for name, gradient in gradients.items():
        error = float((own_gradients[name] - gradient).abs().max()) / scales[layer_of(name)]
        assert error <= 1e-5, f"{name}: {error:.1e}"


class Exact(TorchFunctionMode):
    """Makes a float64 model compute everything in float64, including what its code casts to float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def layer_of(name: str) -> str:
    return name.rpartition(".")[0]


def largest(gradients: dict[str, Tensor]) -> dict[str, float]:
    """Returns the largest gradient of each layer, over its weight and bias."""
    scales: dict[str, float] = {}
    for name, t in gradients.items():
        scales[layer_of(name)] = max(scales.get(layer_of(name), 0.0), float(t.abs().max()))
    return scales


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_as_near_to_float64_as_those_of_transformers(family: str) -> None:
    """Compares means over tensors of the root mean squared error, relative to the largest gradient of the layer."""
    model = made(family)
    arguments = inputs(model)
    exact = copy.deepcopy(model).double()
    if family != "Longformer":
        exact.set_attn_implementation("eager")
    if family in ("Qwen2Moe", "Qwen3Moe", "Mixtral", "GptOss"):  # torch's grouped products have no float64
        exact.set_experts_implementation("eager")
    with Exact():
        _, logits, gradients = run(exact, arguments)
    scales = largest(gradients)

    def errors() -> tuple[float, float]:
        _, own_logits, own_gradients = run(model, arguments)
        real = arguments["attention_mask"].bool()
        off = [
            float((own_gradients[n] - t).square().mean().sqrt()) / scales[layer_of(n)]
            for n, t in gradients.items()
        ]
        return float((own_logits - logits)[real].square().mean().sqrt()), sum(off) / len(off)

    theirs = errors()
    accelerate(model)
    for ours, allowed in zip(errors(), theirs, strict=True):
        assert 0 < ours <= 2 * allowed, (ours, allowed)


def graph(model: Any) -> list[Any]:
    """Returns name and identity of every module, parameter and buffer, and the names of the modules' own attributes."""
    state: list[Any] = [(name, id(p), p.requires_grad, p._version) for name, p in model.named_parameters()]
    state += [(name, id(t)) for name, t in model.named_buffers()]
    for name, module in model.named_modules():
        state.append(
            (name, id(module), sorted(module.__dict__), id(module.__dict__.get("forward")), module.training)
        )
    return [*state, model.config._attn_implementation]


@share("family", FAMILIES, 1, 2)
def test_restore_gives_back_the_same_objects(family: str) -> None:
    model = made(family)
    before = graph(model)
    weights = None if family in ("Bert", "Roberta") else "int8"
    accelerate(model, weights)
    assert graph(model) != before
    restore(model)
    assert graph(model) == before
    with pytest.raises(ConfigError, match="not accelerated"):
        restore(model)


@pytest.mark.parametrize(
    "family",
    [
        *("Llama", "Gemma2", "GPT2", "Phi", "Marian"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("Mistral", "Qwen2", "Qwen3", "Phi3", "Cohere")
        ),
    ],
)
def test_greedy_text_is_as_before(family: str) -> None:
    model = made(family)
    ids = torch.randint(3, VOCAB, (2, 11))
    mask = torch.ones_like(ids)
    mask[0, :4] = family == "Marian"
    for attention_mask, options in ((None, {}), (None, {"num_beams": 2}), (mask, {})):
        arguments = {"attention_mask": attention_mask, "max_new_tokens": 40, "do_sample": False, **options}
        expected = model.generate(ids, **arguments)
        accelerate(model)
        assert torch.equal(model.generate(ids, **arguments), expected)
        restore(model)


def test_a_product_of_more_rows_than_a_step_of_decoding_is_torchs_own() -> None:
    """The kernels sum in another order than torch, so bits tell which of them computed a product."""
    model = made("Llama")
    mlp = model.model.layers[0].mlp
    rows = torch.randn(MOST_ROWS + 1, 32)
    expected = [F.linear(rows, linear.weight) for linear in (mlp.gate_proj, mlp.up_proj)]
    accelerate(model)
    with torch.no_grad():
        assert all(map(torch.equal, side_by_side(rows, (mlp.gate_proj, mlp.up_proj)), expected))
        few = side_by_side(rows[:MOST_ROWS], (mlp.gate_proj, mlp.up_proj))
    assert not any(map(torch.equal, few, (t[:MOST_ROWS] for t in expected)))
    restore(model)


@pytest.mark.parametrize("padding", [0, 4])
def test_a_step_behind_padding_is_that_of_the_model(padding: int) -> None:
    """A decode step with a cache, and a mask that says which slots are padding."""
    model = made("Llama")
    ids, mask = torch.randint(3, VOCAB, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :padding] = 0

    @torch.no_grad()
    def stepped() -> Tensor:
        past = model(ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True)[CACHE]
        return model(ids[:, -1:], attention_mask=mask, **{CACHE: past}).logits  # type: ignore[no-any-return]

    expected = stepped()
    accelerate(model)
    close(stepped(), expected, 1e-5)


ASKED: dict[str, dict[str, Any]] = {
    "as it is": {},
    "smoothed labels": {"label_smoothing": 0.2},
    "a sum": {"reduction": "sum"},
    "each token's": {"reduction": "none"},
    "another number for no label": {"ignore_index": 3},
    "weights of labels": {"weight": torch.arange(VOCAB) / VOCAB},
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_cross_entropy_of_logits_is_what_it_is_asked_for(asked: dict[str, Any]) -> None:
    """In training no logits are computed, but a user's own loss on them still gets every option it asks for."""
    model = made("Llama").train()
    ids = torch.randint(3, VOCAB, (2, LENGTH))
    labels = ids.flatten().roll(1).index_fill(0, torch.tensor([5, 6]), asked.get("ignore_index", -100))

    def loss() -> tuple[Tensor, Tensor]:
        losses = F.cross_entropy(model(ids).logits.view(-1, VOCAB), labels, **asked)
        slope = torch.autograd.grad(losses.sum(), model.lm_head.weight)[0]
        return losses.detach(), slope

    expected = loss()
    accelerate(model)
    for ours, theirs in zip(loss(), expected, strict=True):
        close(ours, theirs, 1e-5)


class Doubled(nn.Module):
    """A norm defined by a user, unknown to headway."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Indexed(LlamaAttention):
    """Attention that passes an argument which headway does not know."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        attention_interface = kwargs["attention_interface"]
        return attention_interface(self, hidden_states, indices=kwargs["indices"])


def test_attention_that_is_given_what_ours_does_not_know_is_left() -> None:
    layer = Indexed(transformers.LlamaConfig(**GROUPED), 0)
    assert unsupported_reason(layer) == "its attention depends on indices, which ours does not know"


@pytest.mark.parametrize("family", ["GptOss", "GraniteSWA"])
def test_attention_with_sinks_is_taken(family: str) -> None:
    model = sunk(family)
    ids = torch.randint(3, VOCAB, (1, LENGTH))
    with torch.no_grad():
        expected = model(ids).logits
        assert accelerate(model).taken["attention"]
        close(model(ids).logits, expected, 1e-5)
    restore(model)


def test_attention_is_left_where_the_string_would_be_refused() -> None:
    """Doge's layers read their mask, which is noticed in a trial forward."""
    why = "applies `where` to its attention mask"
    model = transformers.DogeForCausalLM(transformers.DogeConfig(**GROUPED)).eval()
    before, ids = model.config._attn_implementation, torch.randint(3, VOCAB, (1, LENGTH))
    with torch.no_grad():
        expected = model(ids).logits
        report = accelerate(model)
        assert "attention" not in report.taken
        assert model.config._attn_implementation == before
        assert why in report.left["model.layers.0.self_attn"]
        close(model(ids).logits, expected, 1e-5)
    restore(model)


def test_an_unknown_module_is_left_and_named() -> None:
    model = made("Llama")
    model.model.layers[1].input_layernorm = Doubled(32)
    report = accelerate(model)
    assert report.left["model.layers.1.input_layernorm"] == "unknown class Doubled"
    assert "unknown class Doubled" in str(report)
    assert "forward" not in model.model.layers[1].input_layernorm.__dict__
    assert report.taken["RMS norm"] == 4
    restore(model)


def test_modules_that_differ_are_told_apart() -> None:
    """`relative` decides whether a module may replace another: the largest difference over the largest number."""
    x = torch.tensor([[1.0, -4.0, 2.0]])
    assert relative(x, x) == 0
    assert relative((x + torch.tensor([0.0, 0.0, 1.0]),), x) == 0.25
    assert relative(x[:0], x[:0]) == 0
    for result in (x[0], x.double(), x * torch.nan):
        assert relative(result, x) == float("inf")
