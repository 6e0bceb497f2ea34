"""All forms of the gated delta rule compute its definition, given here by loops over tokens."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.attention.delta import delta_attend, delta_transition, forms
from headway.errors import HeadwayError
from headway.tokens import Tokens
from tests.delta.cases import Inputs, draw, results

N = 9
LAYOUTS = {
    "range": Tokens.range(N),
    "left": Tokens.from_lengths([5, 9], N, "left"),
    "right": Tokens.from_lengths([0, 3], N),
    "packed": Tokens.packed([[3, 4], [2, 1, 6]], N),
    "packed alike": Tokens.packed([[3, 4, 2]], N),
    "holes": Tokens.from_attention_mask(torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 0], [0] * 9])),
    "shuffled": Tokens(torch.tensor([[4, -1, 0, 2, 1, 3, -1, 6, 5]])),
}


def by_loops(inputs: Inputs, tokens: Tokens, erases: bool) -> tuple[Tensor, Tensor]:
    """Computes the definition by loops over rows, heads, and tokens in the order of their indices."""
    rows, heads, count, wide = inputs.v.shape
    out, states = torch.zeros(rows, heads, count, wide, dtype=torch.float64), inputs.past.detach().clone()
    index, documents = (t.expand(rows, -1) for t in (tokens.index, tokens.documents))
    for b in range(rows):
        slots = [(int(documents[b, t]), int(index[b, t]), t) for t in range(count) if index[b, t] >= 0]
        for h in range(heads):
            state, document_before = states[b, h], slots[0][0] if slots else 0
            for document, _, t in sorted(slots):
                if document != document_before:
                    state, document_before = torch.zeros_like(state), document
                q, k = (x[b, h // (heads // inputs.k.shape[1]), t].detach() for x in (inputs.q, inputs.k))
                state = torch.diag(inputs.log_decay[b, h, t].detach().exp().expand(len(k))) @ state
                value = inputs.v[b, h, t].detach() - erases * (state.T @ k)
                state = state + inputs.beta[b, h, t].detach() * torch.outer(k, value)
                out[b, h, t] = len(k) ** -0.5 * (state.T @ q)
            states[b, h] = state
    return out, states


@pytest.mark.parametrize("erases", [True, False])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["recurrent", "chunked", "parallel"])
def test_every_form_is_the_definition(form: str, layout: str, channels: bool, erases: bool) -> None:
    inputs = draw(N, channels=channels)
    expected = by_loops(inputs, LAYOUTS[layout], erases)
    for a, b in zip(results(inputs, form, LAYOUTS[layout], None, erases), expected, strict=False):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


@given(
    st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([0.01, 1.0, 30.0]),
    st.booleans(),
)
def test_blocks_of_any_size_and_documents_of_any_length(
    lengths: list[list[int]], size: int, channels: bool, strength: float, erases: bool
) -> None:
    """With gradients, for weak and strong decay."""
    total = max(map(sum, lengths))
    tokens = Tokens.packed(lengths, total)
    inputs = draw(total, batch=len(lengths), channels=channels, strength=strength, seed=size)
    expected = results(inputs, "recurrent", tokens, erases=erases)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms, "SIZE", {True: size, False: size})
        chunked = results(inputs, "chunked", tokens, erases=erases)
    for actual in (chunked, results(inputs, "parallel", tokens, erases=erases)):
        for a, b in zip(actual, expected, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("erases", [True, False])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("form", ["recurrent", "chunked"])
def test_derivatives(form: str, channels: bool, erases: bool) -> None:
    inputs, tokens = draw(4, batch=1, heads=1, d=2, e=1, channels=channels), Tokens.packed([[1, 3]])

    def run(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"tokens": tokens, "unit_eps": 1e-3, "erases": erases, "form": form}
        return delta_attend(*arguments[:5], past=arguments[5], **options)

    assert torch.autograd.gradcheck(run, tuple(inputs))
    assert torch.autograd.gradgradcheck(run, tuple(inputs))


@pytest.mark.parametrize("erases", [True, False])
@pytest.mark.parametrize("channels", [False, True])
@given(st.lists(st.integers(0, 7), min_size=1, max_size=4))
def test_states_pass_over_splits(channels: bool, erases: bool, lengths: list[int]) -> None:
    """A row in parts: each continues from the state of the previous one, and the parts' transitions compose."""
    inputs = draw(sum(lengths), channels=channels)
    whole = delta_attend(*inputs[:5], past=inputs.past, erases=erases)
    state, outs, composed = inputs.past, [], None
    parts = zip(*(t.split(lengths, 2) for t in inputs[:5]), strict=True)
    for q, k, v, log_decay, beta in parts:
        out, state = delta_attend(q, k, v, log_decay, beta, past=state, erases=erases)
        transition = delta_transition(k, v, log_decay, beta, erases=erases)
        composed = transition if composed is None else composed.then(transition)
        outs.append(out)
    assert composed is not None
    assert torch.allclose(torch.cat(outs, 2), whole.out, rtol=0, atol=1e-11)
    for end in (state, composed.apply(inputs.past)):
        assert torch.allclose(end, whole.state, rtol=0, atol=1e-11)


@pytest.mark.parametrize("form", ["recurrent", "chunked", "parallel"])
@pytest.mark.parametrize("layout", ["left", "holes", "shuffled"])
def test_empty_slots_change_nothing_whatever_they_hold(form: str, layout: str) -> None:
    tokens, inputs = LAYOUTS[layout], draw(N)
    empty = ~tokens.valid.expand(2, -1)[:, None, :, None]
    spoiled = Inputs(
        *(
            t.detach().masked_fill(empty if t.dim() == 4 else empty[..., 0], float("nan")).requires_grad_()
            for t in inputs[:5]
        ),
        inputs.past,
    )
    for actual, expected in zip(results(spoiled, form, tokens), results(inputs, form, tokens), strict=True):
        assert torch.equal(actual, expected)
    assert not results(spoiled, form, tokens)[0].masked_select(empty).any()


@pytest.mark.parametrize("channels", [False, True])
def test_transformers_computes_the_same(channels: bool) -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    inputs = draw(70, channels=channels, key_heads=2, dtype=torch.float32).to(torch.float32)
    q, k, v, log_decay, beta = (t.transpose(1, 2) for t in inputs[:5])
    theirs = chunk_kimi_delta_attention if channels else torch_chunk_gated_delta_rule
    out, state = theirs(
        q, k, v, g=log_decay, beta=beta, initial_state=inputs.past, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    ours = delta_attend(*inputs[:5], past=inputs.past, unit_eps=1e-6)
    assert torch.allclose(ours.out, out.transpose(1, 2), rtol=1e-4, atol=1e-5)
    assert torch.allclose(ours.state, state, rtol=1e-4, atol=1e-5)


def test_transformers_computes_the_same_of_state_space_duality() -> None:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    inputs = draw(70, heads=4, key_heads=2, dtype=torch.float32).to(torch.float32)
    q, k, v, _, steps = (t.transpose(1, 2) for t in inputs[:5])
    rate = torch.tensor([0.1, 1.0, 3.0, 0.5])
    out, state = mamba2_chunk_scan(
        v, steps, -rate, k, q, 32, initial_states=inputs.past.mT, return_final_states=True
    )
    log_decay = -rate[:, None] * inputs.beta
    ours = delta_attend(*inputs[:3], log_decay, inputs.beta, past=inputs.past, scale=1.0, erases=False)
    assert torch.allclose(ours.out, out.transpose(1, 2), rtol=1e-4, atol=1e-5)
    assert torch.allclose(ours.state, state.mT, rtol=1e-4, atol=1e-5)


def test_rows_without_tokens_keep_their_state() -> None:
    inputs = draw(0)
    for form in ("auto", "recurrent", "chunked", "parallel"):
        out, state = delta_attend(*inputs[:5], past=inputs.past, form=form)
        assert out.shape == (2, 2, 0, 3)
        assert torch.equal(state, inputs.past)


def test_what_does_not_fit_is_said() -> None:
    q, k, v, log_decay, beta, past = draw(5)
    calls: list[tuple[tuple[Tensor, ...], dict[str, object], str]] = [
        ((q[..., :2], k, v, log_decay, beta), {}, r"q must be \[2, 1, 5, 4\] for v"),
        ((q, k, v[:, :, 1:], log_decay, beta), {}, "k must be"),
        ((q, k, v, log_decay[..., None], beta), {}, r"log_decay must be \[2, 2, 5\] or \[2, 2, 5, 4\]"),
        ((q, k, v, log_decay, beta[:1]), {}, "beta must be"),
        ((q, k, v, log_decay, beta), {"past": past[..., :2]}, "past must be"),
        ((q, k, v, log_decay, beta), {"past": past.float()}, r"past must be torch\.float64"),
        ((q, k, v.float(), log_decay, beta), {}, "share a dtype"),
        ((q, k, v, log_decay.long(), beta), {}, "log_decay must be floating point"),
        ((q, k, v, log_decay, beta), {"tokens": Tokens.range(4)}, "1 rows of 4 slots"),
        ((q, k, v, log_decay, beta), {"form": "chunk"}, r'no form .chunk. .did you mean "chunked"'),
        ((q, k, v, log_decay, beta), {"form": "kernel"}, "cannot run: the kernels take float32 and bf16"),
        ((q[0], k, v, log_decay, beta), {}, "must be .batch, heads, slots, width."),
        ((q, k, v[:, :1].repeat(1, 3, 1, 1), log_decay, beta), {}, "must be"),
    ]
    for arguments, options, message in calls:
        with pytest.raises(HeadwayError, match=message):
            delta_attend(*arguments, **options)  # type: ignore[arg-type]
    with pytest.raises(HeadwayError, match="rows must hold one document each"):
        delta_transition(k, v, log_decay, beta, tokens=Tokens.packed([[2, 3]]))
    first = delta_transition(k, v, log_decay, beta)
    with pytest.raises(HeadwayError, match="do not compose"):
        first.then(delta_transition(k[:1], v[:1], log_decay[:1], beta[:1]))
