"""The table of `transformers` modules for which headway has an equal replacement; and the arguments that a class passes
to the functions it calls, read from its source.

A class is known if the bytecode of its `forward` is that of a class in the table: most families are copies of a few. A
replacement is used only after both have computed the same from random numbers.

Legend: M width, F hidden width.
"""

import ast
import copy
import importlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from inspect import getsource, unwrap
from textwrap import dedent
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headway.integrations.transformers.longformer import longformer_forward
from headway.integrations.transformers.products import linear_forward, put, side_by_side
from headway.nn import fused

ATTENTION = "attention_interface"
"""The variable name by which every layer calls the attention function of its config."""
SEED = 0
TOLERANCE = 1e-5
ROWS, SAMPLE = 3, 64
"""Number of tokens that are compared; and of outputs of a linear layer, or hidden units of a feed-forward."""

ACTIVATIONS: Mapping[str, str] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_pytorch_tanh",
    "ReLU": "relu",
}
"""Class of an activation in transformers or torch -> its name."""

Sample = tuple[nn.Module, tuple[Any, ...]]
"""A module in float32 and the arguments to call it with."""


class Known(NamedTuple):
    """Classes (family.Name) that compute the same, the replacement of their `forward`, and how to make a sample to
    compare both."""

    kind: str
    classes: tuple[str, ...]
    forward: Callable[..., Any]
    sample: Callable[[Any, torch.Generator], Sample]


def random_linear(like: nn.Linear, inputs: int, outputs: int, seed: torch.Generator) -> nn.Module:
    """Returns a linear layer with random weights on the CPU, with a bias if `like` has one."""
    layer: nn.Module = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=like.bias is not None)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=seed) / inputs**0.5)
    put(layer, linear_forward)
    return layer


def shrunk(module: nn.Module, sizes: Mapping[int, int], seed: torch.Generator, **others: Any) -> nn.Module:
    """Returns a copy of a module whose linear layers have random weights and other sizes, old size -> new size in
    `sizes`, and whose attributes `others` are set."""
    layers: dict[str, nn.Module] = {}
    for name, layer in dict[str, Any](module.named_children()).items():
        if hasattr(layer, "out_features"):
            inputs, outputs = (sizes.get(n, n) for n in (layer.in_features, layer.out_features))
            layers[name] = random_linear(layer, inputs, outputs, seed)
    small = copy.copy(module)
    small.__dict__ = {**module.__dict__, "_modules": {**module._modules, **layers}, **others}
    return small


# -- replacements of forward, with the argument names of the originals -------------------------------------------


def llama_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * g, rounded to the dtype of x before the gain. [..., M] -> [..., M]."""
    return fused.normed("rms", hidden_states, self.weight, None, self.variance_epsilon)


def gemma_norm(self: Any, x: Tensor) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * (1 + g), rounded once. [..., M] -> [..., M]."""
    return fused.normed("rms", x.float(), 1.0 + self.weight.float(), None, self.eps).type_as(x)


def gated(gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns act(gate) * up."""
    name = ACTIVATIONS.get(type(act).__name__)
    return act(gate) * up if name is None else fused.gated(gate, up, name)


def gated_mlp(self: Any, x: Tensor) -> Tensor:
    gate, up = side_by_side(x, (self.gate_proj, self.up_proj))
    return self.down_proj(gated(gate, up, self.act_fn))  # type: ignore[no-any-return]


def fused_mlp(self: Any, hidden_states: Tensor) -> Tensor:
    gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
    return self.down_proj(gated(gate, up, self.activation_fn))  # type: ignore[no-any-return]


# -- samples for the comparison ------------------------------------------------------------------------------------


def norm_sample(module: Any, seed: torch.Generator) -> Sample:
    norm = copy.deepcopy(module).to("cpu", torch.float32)
    return norm, (torch.randn(ROWS, len(norm.weight), generator=seed),)


def feedforward_sample(module: Any, seed: torch.Generator) -> Sample:
    """Returns a feed-forward of `SAMPLE` hidden units, with random weights."""
    width, hidden = module.down_proj.out_features, module.down_proj.in_features
    sizes = {hidden: SAMPLE, 2 * hidden: 2 * SAMPLE}
    return shrunk(module, {} if width in sizes else sizes, seed), (torch.randn(ROWS, width, generator=seed),)


def longformer_sample(module: Any, seed: torch.Generator) -> Sample:
    """Returns two heads with a window of 2 on either side; a row with two global tokens, and one with one that ends in
    padding."""
    width, tokens = 2 * module.head_dim, 12
    sizes = {"num_heads": 2, "embed_dim": width, "one_sided_attn_window_size": 2}
    small = shrunk(module, {module.embed_dim: width}, seed, **sizes)
    mask = torch.zeros(2, tokens)
    mask[0, [0, 7]], mask[1, 1], mask[1, -3:] = 1.0, 1.0, -1.0
    return small, (torch.randn(2, tokens, width, generator=seed), mask, mask < 0, mask > 0, True)


def linear_sample(module: nn.Linear, seed: torch.Generator) -> Sample:
    """Returns a layer of some rows of the module's own weight."""
    rows = torch.randperm(module.out_features, generator=seed)[:SAMPLE].to(module.weight.device)
    layer = nn.utils.skip_init(nn.Linear, module.in_features, len(rows), bias=module.bias is not None)
    with torch.no_grad():
        for ours, theirs in zip(layer.parameters(), module.parameters(), strict=True):
            ours.copy_(theirs[rows])
    return layer, (torch.randn(ROWS, module.in_features, generator=seed),)


TABLE = (
    Known("product", ("torch.Linear",), linear_forward, linear_sample),
    Known("RMS norm", ("llama.LlamaRMSNorm",), llama_norm, norm_sample),
    Known("RMS norm", ("gemma2.Gemma2RMSNorm",), gemma_norm, norm_sample),
    Known("gated feed-forward", ("llama.LlamaMLP",), gated_mlp, feedforward_sample),
    Known("gated feed-forward", ("phi3.Phi3MLP",), fused_mlp, feedforward_sample),
    Known(
        "windowed attention", ("longformer.LongformerSelfAttention",), longformer_forward, longformer_sample
    ),
)

UNCHANGED = (
    "torch.Embedding",
    "torch.LayerNorm",
    "torch.Dropout",
    "torch.Tanh",
    "torch.Identity",
    "llama.LlamaRotaryEmbedding",
)
"""Classes that are left and not listed in a report: a single operator of torch, or computed once for all layers."""


def reference(name: str) -> type[nn.Module]:
    """Returns the class of `family.Name` in transformers, or `torch.Name`."""
    family, _, cls = name.partition(".")
    module = "torch.nn" if family == "torch" else f"transformers.models.{family}.modeling_{family}"
    result: type[nn.Module] = getattr(importlib.import_module(module), cls)
    return result


Code = tuple[Any, ...]


def is_unchanged(module: nn.Module) -> bool:
    """Returns whether a module is in `UNCHANGED`, or an activation, which is part of its caller."""
    if type(module).__module__ == "transformers.activations":
        return True
    return code(unwrap(type(module).forward)) in {code(unwrap(reference(name).forward)) for name in UNCHANGED}


def code(function: Any) -> Code | None:
    """Returns the bytecode of a plain function with its names and constants; None for anything else."""
    compiled = getattr(function, "__code__", None)
    if compiled is None or function.__closure__:
        return None
    constants = tuple(c for c in compiled.co_consts if c != function.__doc__ and not hasattr(c, "co_code"))
    return compiled.co_code, compiled.co_names, constants


@cache
def known() -> Mapping[Code, Known]:
    """Returns the table keyed by bytecode."""
    rows: dict[Code, Known] = {}
    for name, known_as in ((name, row) for row in TABLE for name in row.classes):
        instructions = code(reference(name).forward)
        assert instructions is not None, name
        rows[instructions] = known_as
    return rows


@cache
def rotary_codes() -> frozenset[Code | None]:
    """Returns the bytecode of the functions that rotate as ours does."""
    paths = (f"transformers.models.{family}.modeling_{family}" for family in ("llama", "phi3"))
    return frozenset(code(unwrap(importlib.import_module(path).apply_rotary_pos_emb)) for path in paths)


def difference(module: nn.Module, row: Known) -> float:
    """Returns the largest difference between a module and its replacement, relative to the largest number: over outputs
    with and without gradient, and the gradient of the input, in float32."""
    seed = torch.Generator().manual_seed(SEED)
    sample, (x, *arguments) = row.sample(module, seed)
    sample.eval()

    def run(forward: Callable[..., Any], x: Tensor) -> Any:
        return forward(sample, x, *arguments)

    ours, theirs = (partial(run, forward) for forward in (row.forward, type(module).forward))
    with torch.no_grad():
        worst = relative(ours(x), theirs(x))
    return max(worst, differentiated(ours, theirs, x))


def differentiated(ours: Callable[..., Any], theirs: Callable[..., Any], *inputs: Tensor) -> float:
    """Returns the largest difference between two functions of the same tensors, relative to the largest number: over
    their (first) outputs, and the gradients of their inputs."""
    sides = []
    for function in (ours, theirs):
        leaves = [t.clone().requires_grad_() for t in inputs]
        with torch.enable_grad():
            out = first(function(*leaves))
            back = torch.randn(out.shape, generator=torch.Generator().manual_seed(SEED + 1))
            sides.append((out.detach(), *torch.autograd.grad(out, leaves, back)))
    return max(relative(a, b) for a, b in zip(*sides, strict=True))


def first(out: Any) -> Tensor:
    """Returns the output, or the first of several."""
    output: Tensor = out[0] if isinstance(out, tuple) else out
    return output


def relative(a: Any, b: Any) -> float:
    """Returns max |a - b| / max |b|; infinity if shapes or dtypes differ, or if a has a number that is not finite."""
    a, b = first(a), first(b)
    if a.shape != b.shape or a.dtype != b.dtype or not bool(torch.isfinite(a).all()):
        return float("inf")
    if not b.numel():
        return 0.0
    return float((a - b).abs().max() / b.abs().max().clamp_min(torch.finfo(b.dtype).tiny))


@cache
def calls(function: Callable[..., Any], name: str) -> tuple[ast.Call, ...]:
    """Returns the calls of `name` in the source of a function; empty if it has no source."""
    try:
        tree = ast.parse(dedent(getsource(unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return ()
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return tuple(call for call in nodes if isinstance(call.func, ast.Name) and call.func.id == name)


def names_of(call: ast.Call) -> frozenset[str]:
    """Returns the names of its keyword arguments."""
    return frozenset(word.arg for word in call.keywords if word.arg)


def passed(forward: Callable[..., Any]) -> frozenset[str]:
    """Returns the names of the keyword arguments that a layer's own code passes to its attention function."""
    return frozenset[str]().union(*map(names_of, calls(forward, ATTENTION)))
