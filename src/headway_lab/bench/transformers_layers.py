"""Layers and models of `transformers`, with its own attention and with ours: the same weights, the same inputs.

Legend: N tokens, M model width, H heads, D per head, g global tokens (the first ones).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.attention import attend
from headway.patterns import GlobalKeys, Pattern, pairs
from headway.patterns.program import interval
from headway.tokens import Tokens
from headway_lab.bench.cases import Case
from headway_lab.bench.inputs import OURS, Problem, Side, UnsupportedCase, fastest, without_gradient

Linear = Callable[[Tensor, Tensor, Tensor], Tensor]


def transformers() -> Any:
    """The package. Raises UnsupportedCase where it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UnsupportedCase('transformers is not installed; pip install "headway[transformers]"') from error


# -- Longformer ------------------------------------------------------------------------------------------------


def longformer(case: Case, dtype: str, backend: str) -> Problem:
    """A self-attention layer of transformers' Longformer, or its attention alone ("longformer-core")."""
    window, side = case.pattern, case.pattern.reach[0]
    assert side is not None
    assert interval(window) == (side, side)
    n, width, model, kind = case.tokens, case.width, case.heads * case.width, getattr(torch, dtype)
    if n % (2 * side):
        raise UnsupportedCase(
            f"transformers' layer needs a multiple of its window, {2 * side}, not {n} tokens"
        )
    layer = _longformer_layer(model, case.heads, 2 * side, kind)
    x = torch.empty(1, n, model, dtype=kind).normal_(generator=torch.Generator().manual_seed(0))
    tokens = Tokens.range(n).with_global(list(range(case.globals))) if case.globals else Tokens.range(n)
    pattern: Pattern = window | GlobalKeys() if case.globals else window
    flops = 4.0 * width * (pairs(pattern, n, heads=case.heads, tokens=tokens) + case.heads * n * case.globals)
    if case.kind == "longformer-core":
        q, k, v = (_split(project(x), case.heads) for project in (layer.query, layer.key, layer.value))
        ours = without_gradient(lambda: attend(q, k, v, pattern, backend=backend).transpose(1, 2).flatten(2))
        layer.query, layer.key, layer.value = _Given(q, width**-0.5), _Given(k), _Given(v)
    else:
        flops += 3 * 2.0 * n * model * model
        forms: list[Linear] = [F.linear, _onednn_linear]
        linear = fastest(forms, lambda form: lambda: form(x, layer.query.weight, layer.query.bias))
        ours = without_gradient(lambda: _layer(x, layer, tokens, pattern, case.globals, linear, backend))
    mask = torch.zeros(1, n)
    mask[:, : case.globals] = 10000.0
    theirs = without_gradient(lambda: layer(x, mask, mask < 0, mask > 0, bool(case.globals))[0])
    return Problem({OURS: ours, "transformers": theirs}, flops)


def _longformer_layer(model: int, heads: int, window: int, dtype: torch.dtype) -> Any:
    config = transformers().LongformerConfig(
        hidden_size=model, num_attention_heads=heads, num_hidden_layers=1, attention_window=[window]
    )
    module = importlib.import_module("transformers.models.longformer.modeling_longformer")
    torch.manual_seed(0)
    return module.LongformerSelfAttention(config, 0).to(dtype).eval().requires_grad_(False)


def _layer(
    x: Tensor, layer: Any, tokens: Tokens, pattern: Pattern, count: int, linear: Linear, backend: str
) -> Tensor:
    """The whole layer with our attention: x [1, N, M] -> [1, N, M]."""
    projections = (layer.query, layer.key, layer.value)
    q, k, v = (_split(linear(x, p.weight, p.bias), layer.num_heads) for p in projections)
    marked = tokens if count else None
    out = attend(q, k, v, pattern, q_tokens=marked, k_tokens=marked, backend=backend)
    whole = out.transpose(1, 2).flatten(2)
    if count:
        whole[:, :count] = _global_rows(x[0], layer, count)
    return whole


def _global_rows(x: Tensor, layer: Any, count: int) -> Tensor:
    """What the global tokens see, with their own projections and without projecting every token for them.

    q . (W x + b) = (W^T q) . x + q . b, whose last term is the same for all keys and leaves the softmax; and the
    weights of a row sum to 1, so sum p (W x + b) = W (sum p x) + b. x [N, M] -> [g, M]."""
    heads, width = layer.num_heads, layer.head_dim
    q = layer.query_global(x[:count]).view(count, heads, width).transpose(0, 1) / math.sqrt(width)
    keys, values = (p.weight.view(heads, width, -1) for p in (layer.key_global, layer.value_global))
    weights = torch.softmax((q @ keys).flatten(0, 1) @ x.t(), -1)
    seen = (weights @ x).view(heads, count, -1)
    out: Tensor = (seen @ values.transpose(1, 2)).transpose(0, 1).flatten(1) + layer.value_global.bias
    return out


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b by oneDNN, which takes the full vector width on processors on which MKL does not."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _split(t: Tensor, heads: int) -> Tensor:
    """[1, N, M] as [1, H, N, D]."""
    return t.detach().view(1, t.shape[1], heads, -1).transpose(1, 2)


class _Given(nn.Module):
    """Stands in for a projection whose result is known: the layer's attention alone, with nothing copied."""

    def __init__(self, t: Tensor, scale: float = 1) -> None:
        super().__init__()
        given = t.transpose(1, 2).flatten(2).transpose(0, 1)
        self.given = given if scale == 1 else _Scaled(given * scale)

    def forward(self, x: Tensor) -> Any:
        return self.given


class _Scaled:
    """Queries that the layer is about to divide in place by sqrt(D): already divided."""

    def __init__(self, t: Tensor) -> None:
        self.t = t

    def __itruediv__(self, by: float) -> Tensor:
        return self.t


# -- Mistral -----------------------------------------------------------------------------------------------------


def mistral(case: Case, dtype: str, backend: str) -> Problem:
    """A training step (forward, loss, backward, AdamW) of transformers' Mistral, with our attention and with torch's.

    The learning rate is 0, so that every step is the same step. Results: the loss, a gradient."""
    kind, seen = getattr(torch, dtype), pairs(case.pattern, case.tokens, heads=case.heads)
    named = _mistral(case, kind, "sdpa").named_parameters()
    weights = sum(p.numel() for name, p in named if "embed_tokens" not in name)
    problem = Problem(
        {OURS: mistral_step(case, kind, "headway"), "transformers": mistral_step(case, kind, "sdpa")},
        work=6.0 * weights * case.tokens + 3.5 * 4 * case.width * seen * case.layers,
    )
    if backend != "auto":
        problem.notes.append(f"backend {backend!r} does not apply: models of transformers use auto")
    return problem


def mistral_step(case: Case, dtype: torch.dtype, attention: str) -> Side:
    """A training step of one model on one row of random tokens."""
    model = _mistral(case, dtype, attention)
    ids = torch.randint(model.config.vocab_size, (1, case.tokens), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=False)

    def step() -> Sequence[Tensor]:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        grad = model.model.layers[0].self_attn.q_proj.weight.grad
        return loss.detach().float().view(1, 1), grad.flatten().view(1, -1)

    return step


def _mistral(case: Case, dtype: torch.dtype, attention: str) -> Any:
    hf = transformers()
    importlib.import_module("headway.integrations.transformers")
    model, before = case.heads * case.width, case.pattern.reach[0]
    assert before is not None
    config = hf.MistralConfig(
        vocab_size=512,
        hidden_size=model,
        intermediate_size=model * 11 // 4,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        max_position_embeddings=case.tokens,
        sliding_window=before + 1,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return hf.MistralForCausalLM(config).to(dtype).train()
