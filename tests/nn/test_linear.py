"""All products with weights go through `Linear`, so that another form of weights takes effect everywhere."""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from headway.attention.linear_attention import LinearAttentionSpec
from headway.checkpoints import load_folder, save_folder
from headway.checkpoints.restore import build_model
from headway.models import FAMILIES, Encoder, EncoderDecoder, Head, Model, ModelSpec, build
from headway.models.decoder import Decoder
from headway.nn import IGNORE_INDEX, Linear, Losses, linears, output_cross_entropy
from headway.nn.weights import Plain, Weight
from headway.tokens import Tokens
from tests.checkpoints.shares import share

SIZE: dict[str, Any] = {"vocab": 37, "width": 24, "layers": 2, "heads": 4, "hidden": 40}
LABELS = Head("classify", labels=("a", "b", "c"), dense="tanh")


def specs() -> Iterator[tuple[str, ModelSpec]]:
    for family in FAMILIES:
        yield family, ModelSpec.of(family, **SIZE)
    yield "untied", ModelSpec.of("llama", **SIZE, tied=False, output_bias=True, logit_scale=0.5)
    yield "tied", ModelSpec.of("llama", **SIZE, tied=True)
    yield "linear", ModelSpec.of("llama", **SIZE).with_mixer(LinearAttentionSpec())
    bert = ModelSpec.of("bert", **SIZE, embedding_width=16)
    yield "embedding of another width", bert
    yield "untied encoder", replace(bert, tied=False)
    for head in (LABELS, Head("tag", labels=("a", "b")), Head("answer"), Head("embed", dense="gelu")):
        yield head.task, bert.with_head(head)
    for family in ("transformer", "bart", "t5"):
        yield f"{family} of two", ModelSpec.of_pair(family, **SIZE)
    yield "two embeddings", ModelSpec.of_pair("bart", **SIZE, encoder={"vocab": 29}, tied=False)


ALL = dict(specs())
IDS = torch.randint(29, (2, 9), generator=torch.Generator().manual_seed(0))


def run(model: Model) -> Tensor:
    if isinstance(model, EncoderDecoder):
        return model(IDS, IDS[:, :5])
    if isinstance(model, Encoder):
        return model(IDS, tokens=Tokens.range(9).with_global([0]))
    return model(IDS)


@dataclass
class Counted:
    size: float = 0.0
    calls: int = 0


@dataclass(frozen=True, eq=False)
class Added(Weight):
    """W, and `size` times another term beside it: a form from outside of the package."""

    name = "added"
    w: Tensor
    counted: Counted = field(default_factory=Counted)

    @classmethod
    def pack(cls, w: Tensor) -> "Added":
        return cls(w.detach())

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.w.shape)

    def tensors(self) -> dict[str, Tensor]:
        return {"w": self.w}

    def with_tensors(self, tensors: dict[str, Tensor]) -> "Added":
        return replace(self, w=tensors["w"])

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.w if dtype is None else self.w.to(dtype)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        self.counted.calls += 1
        y, size = F.linear(x, self.w, bias), self.counted.size
        return (
            y if not size else y + size * x.abs().mean(-1, keepdim=True) * torch.linspace(0, 1, y.shape[-1])
        )


def added(layer: Linear, size: float = 0.0) -> Counted:
    layer.keep(Added(layer.matrix.detach(), counted := Counted(size)))
    return counted


@share("name", ALL, 0, 3)
def test_every_product_with_a_weight_goes_through_the_form_that_is_kept(name: str) -> None:
    """A form that adds nothing changes no bit and is called everywhere; one that adds something shows in each layer."""
    spec = ALL[name]
    plain = build(spec, seed=0).eval()
    changed = build(spec, seed=0).eval()
    counts = {n: added(layer) for n, layer in linears(changed).items()}
    layers = [n for n, m in plain.named_modules() if isinstance(m, nn.Linear)]
    assert sorted(counts) == sorted(n for n in layers if not n.endswith(ROUTES))
    with torch.no_grad():
        assert torch.equal(run(changed), run(plain))
        idle = [n for n, counted in counts.items() if not counted.calls]
        assert all(".experts." in n for n in idle), idle
        reference = run(plain)
        for counted in (counted for n, counted in counts.items() if n not in idle):
            counted.size = 0.1
            assert not torch.equal(run(changed), reference)
            counted.size = 0.0


ROUTES = ("mlp.gate", "shared_expert_gate")
"""Matrices that choose experts, which stay as they are: they are neither quantized nor adapted."""


class Inside(TorchFunctionMode):
    """Fails if a parameter of two axes is a factor of a product outside of a `Linear` or a router."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.depth, self.products, self.called = 0, 0, Counter[nn.Module]()
        for name, layer in model.named_modules():
            if isinstance(layer, Linear) or name.endswith(ROUTES):
                layer.register_forward_pre_hook(
                    lambda layer, _: (self.called.update([layer]), self.step(1))[1]
                )
                layer.register_forward_hook(lambda *_: self.step(-1))

    def step(self, by: int) -> None:
        self.depth += by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if any(part in name for part in ("linear", "matmul", "mm", "einsum", "conv", "dot")):
            weights = [a for a in args if isinstance(a, nn.Parameter) and a.dim() > 1]
            assert not weights or self.depth, (
                f"{name} of {[tuple(w.shape) for w in weights]} outside of a Linear"
            )
            self.products += bool(weights)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ALL)
def test_no_product_with_a_weight_stands_outside_of_a_linear(name: str) -> None:
    model = build(ALL[name], seed=0, backend="dense" if ALL[name].softmax_layers else "auto").eval()
    with torch.no_grad(), Inside(model) as inside:
        run(model)
    assert inside.products == inside.called.total()
    idle = [n for n, m in model.named_modules() if isinstance(m, Linear) and m not in inside.called]
    assert all(".experts." in n for n in idle), idle


SOURCE = Path(__file__).parents[2] / "src" / "headway"
PRODUCTS = {
    *("nn/linear.py", "nn/products.py", "nn/lora.py"),
    *("nn/weights/base.py", "nn/weights/compressed.py", "nn/weights/rounded.py"),
    *("nn/cross_entropy.py", "nn/experts.py"),
    *("integrations/transformers/products.py", "integrations/transformers/loss.py"),
    "checkpoints/formats/meta.py",
}
"""Files that may write products with weights: the layer and its products, the one that is tied to an embedding, those
that replace it, its fused loss, routers, the same for models of transformers, and the formulas that check files of
Meta. `classic` is plain torch, too: the classes that the documents print."""


def test_no_file_but_these_writes_such_a_product() -> None:
    violations = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name in PRODUCTS or name.startswith("classic/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            function = node.func if isinstance(node, ast.Call) else None
            if isinstance(function, ast.Attribute) and function.attr in ("Linear", "linear", "bilinear"):
                owner = ast.unparse(function.value)
                if owner in ("nn", "F", "torch.nn", "nn.functional", "torch.nn.functional"):
                    violations.append(f"{name}:{node.lineno} {ast.unparse(function)}")
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                sides = ast.unparse(node.left), ast.unparse(node.right)
                violations += [f"{name}:{node.lineno} {s}" for s in sides if ".weight" in s]
    assert not violations


def test_it_is_torch_s_own_layer() -> None:
    torch.manual_seed(3)
    ours = Linear(7, 5)
    torch.manual_seed(3)
    theirs = nn.Linear(7, 5)
    x = torch.randn(2, 7)
    assert torch.equal(ours(x), theirs(x))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_a_model_is_changed_in_place_and_by_name() -> None:
    model = build(ModelSpec.of("llama", **SIZE), seed=0).eval()
    before = run(model)
    weights = {name: layer.matrix for name, layer in linears(model).items() if name.endswith("v_proj")}
    for name in weights:
        added(model.get_submodule(name), 1.0)
    assert [n for n, layer in linears(model).items() if layer.kept.name == "added"] == [*weights]
    assert not torch.equal(run(model), before)
    for name, w in weights.items():
        model.get_submodule(name).keep(Plain(w))
    assert torch.equal(run(model), before)
    assert [*model.state_dict()] == [*build(model.spec, seed=0).state_dict()]


def test_a_tied_output_layer_has_no_matrix_of_its_own(tmp_path: Path) -> None:
    model = build(ModelSpec.of("llama", **SIZE, tied=True, output_bias=True), seed=0).eval()
    assert isinstance(model, Decoder)
    assert model.lm_head.is_output
    assert model.lm_head.weight is None
    assert [name for name, _ in model.lm_head.named_parameters()] == ["bias"]
    assert model.lm_head.matrix is model.model.embed_tokens.weight
    assert "tied" in repr(model.lm_head)
    save_folder(tmp_path / "m", model)
    loaded = build_model(load_folder(tmp_path / "m"))
    assert torch.equal(run(loaded), run(model))
    in_float64 = build(model.spec, seed=0, dtype=torch.float64)
    assert in_float64.lm_head.matrix.dtype == torch.float64
    with torch.no_grad():
        model.model.embed_tokens.weight *= 2
    assert not torch.equal(run(model), run(loaded))


def test_losses_of_an_adapted_output_layer_are_those_of_its_logits() -> None:
    plain = build(ModelSpec.of("llama", **SIZE), seed=0)
    adapted = build(ModelSpec.of("llama", **SIZE), seed=0)
    added(adapted.lm_head, 0.3)
    targets = IDS.roll(-1, 1)
    for model in (plain, adapted):
        loss = torch.nn.functional.cross_entropy(model(IDS).flatten(0, 1), targets.flatten(), reduction="sum")
        torch.testing.assert_close(model(IDS, targets=targets).total, loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("label_smoothing", [None, 0.1])
def test_what_is_not_trained_costs_no_output_layer_and_changes_nothing(label_smoothing: float | None) -> None:
    """With most targets ignored, losses, hits and gradients are those of all targets with weights of 0 or 1."""
    generator = torch.Generator().manual_seed(0)
    layer = Linear.output(8, 11).double()
    x = torch.randn(3, 7, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (3, 7), generator=generator)
    is_trained = torch.rand(3, 7, generator=generator) < 0.4

    def counted(x: Tensor, targets: Tensor) -> tuple[Losses, int]:
        with FlopCounterMode(display=False) as counter:
            losses = output_cross_entropy(layer, x, targets, 11, label_smoothing=label_smoothing, hits=True)
            losses.total.backward()
        return losses, counter.get_total_flops()

    flops_of_trained = counted(x[is_trained], targets[is_trained])[1]
    x.grad, layer.weight.grad = None, None
    losses, flops = counted(x, targets.where(is_trained, IGNORE_INDEX))
    assert flops == flops_of_trained > 0
    gradients = [x.grad, layer.weight.grad]
    x.grad, layer.weight.grad = None, None
    logits = layer(x)
    token_losses = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=label_smoothing or 0.0
    )
    (token_losses * is_trained.flatten()).sum().backward()
    unsmoothed = (
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        * is_trained
    )
    assert torch.allclose(losses.each, unsmoothed, rtol=1e-12, atol=1e-12)
    assert float(losses.nats) == pytest.approx(float(unsmoothed.detach().sum()), rel=1e-12)
    assert losses.hits is not None
    assert torch.equal(losses.hits, is_trained & (logits.argmax(-1) == targets))
    assert losses.tokens == int(is_trained.sum())
    for actual, expected in zip(gradients, (x.grad, layer.weight.grad), strict=True):
        assert actual is not None
        assert expected is not None
        assert torch.allclose(actual, expected, rtol=1e-12, atol=1e-12)
