"""Logits of selected slots are those of all slots, though the last layer only computes the selected ones."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.attention.linear_attention import LinearAttentionSpec
from headway.errors import DataError
from headway.models import Decoder, ModelSpec, build
from headway.patterns import Causal, Pattern, PerHead, Sink, Window
from headway.positions import DynamicNTK, LinearBias, PositionScheme, Rotary
from headway.tokens import Tokens

LENGTH = 21
LAST: dict[str, Pattern] = {
    "causal": Causal(),
    "window": Window.last(5),
    "dilated": Window.last(4, step=3),
    "sink": Window.last(5) | (Causal() & Sink(2)),
    "by head": PerHead(Causal(), Causal(), Window.last(3), Window.last(4, step=2)),
}
SCHEMES: dict[str, PositionScheme] = {
    "rotary": Rotary(1000.0, pairing="halves"),
    "longer": Rotary(1000.0, pairing="halves", scaling=DynamicNTK(4.0, 8)),
    "alibi": LinearBias(),
}
ROWS = {
    "whole": None,
    "packed": Tokens.packed([[8, 13], [20]], LENGTH),
    "ragged": Tokens.from_lengths([LENGTH, 9], LENGTH, side="left"),
}


def model_of(backend: str = "auto", **fields: Any) -> Decoder:
    spec = ModelSpec.of(
        "llama",
        vocab=31,
        width=16,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        hidden=24,
        trained_context=64,
        init_std=0.3,
        **fields,
    )
    model = build(spec, seed=0, backend=backend).double().eval()
    assert isinstance(model, Decoder)
    return model


def ids_of(rows: int = 2) -> Tensor:
    return torch.randint(31, (rows, LENGTH), generator=torch.Generator().manual_seed(3))


def given_to_last(model: Decoder) -> list[int]:
    """Returns a list that gets the number of slots which the last feed-forward is given, call by call."""
    counts: list[int] = []
    model.model.blocks[-1].mlp.register_forward_pre_hook(lambda _, args: counts.append(args[0].shape[1]))
    return counts


@settings(max_examples=40)
@given(
    st.sampled_from([*LAST]),
    st.sampled_from([*SCHEMES]),
    st.sampled_from(["pre", "post", "parallel", "joint"]),
    st.sampled_from([*ROWS]),
    st.lists(st.integers(-LENGTH, LENGTH - 1), min_size=1, max_size=5),
)
def test_slots_are_those_of_all(last: str, scheme: str, order: str, rows: str, slots: list[int]) -> None:
    model = model_of(patterns=(Causal(), LAST[last]), positions=SCHEMES[scheme], order=order)
    counts = given_to_last(model)
    full, selected = model(ids_of(), tokens=ROWS[rows]), torch.tensor(slots)
    actual = model(ids_of(), tokens=ROWS[rows], logits_for=selected)
    torch.testing.assert_close(actual, full[:, selected], rtol=1e-10, atol=1e-10)
    assert counts == [LENGTH, len(slots)]


@pytest.mark.parametrize("last", LAST)
@torch.no_grad()
def test_a_chunk_behind_a_cache(last: str) -> None:
    model, ids = model_of(patterns=(Causal(), LAST[last])), ids_of()
    counts = given_to_last(model)
    full, cache = model(ids), model.make_cache(2)
    for begin, end in ((0, 6), (6, 17), (17, LENGTH)):
        last_logits = model(ids[:, begin:end], cache=cache, logits_for=slice(-1, None))
        torch.testing.assert_close(last_logits[:, 0], full[:, end - 1], rtol=1e-10, atol=1e-10)
    assert counts == [LENGTH, 2, 2, 2], "one of each row"


@pytest.mark.parametrize("backend", ["dense", "native", "banded", "diagonal", "chunks"])
def test_backends_that_know_no_other_queries_compute_all(backend: str) -> None:
    model = model_of(backend, patterns=(Window.last(5), Window.last(4)))
    model = model.float() if backend == "native" else model
    full = model(ids_of())
    actual = model(ids_of(), logits_for=torch.tensor([[20, 2], [3, 7]]))
    expected = torch.stack([full[0, [20, 2]], full[1, [3, 7]]])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 if backend == "native" else 1e-10)


def test_linear_attention_sums_over_all() -> None:
    model = model_of(patterns=(Causal(), Causal()), mixers=LinearAttentionSpec("relu"), attention_scale=None)
    full = model(ids_of())
    torch.testing.assert_close(model(ids_of(), logits_for=slice(3, 9)), full[:, 3:9], rtol=1e-10, atol=1e-10)


def test_dropout_of_weights_draws_what_it_draws_for_all() -> None:
    model = model_of(patterns=(Causal(), Causal()), attention_dropout=0.5).train()
    torch.manual_seed(0)
    full = model(ids_of())
    torch.manual_seed(0)
    actual = model(ids_of(), logits_for=slice(-2, None))
    torch.testing.assert_close(actual, full[:, -2:], rtol=1e-10, atol=1e-10)


def test_a_slice_that_goes_backwards_is_refused() -> None:
    with pytest.raises(DataError, match="a slice must go forward, got a step of -1"):
        model_of()(ids_of(), logits_for=slice(None, None, -1))
