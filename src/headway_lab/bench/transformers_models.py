"""Models of `transformers`, with its own attention and with ours: the same weights, the same inputs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.patterns import pairs
from headway_lab.bench.cases import Case
from headway_lab.bench.inputs import OURS, Problem, Side, UnsupportedCase


def transformers() -> Any:
    """The package. Raises UnsupportedCase where it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UnsupportedCase('transformers is not installed; pip install "headway[transformers]"') from error


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
