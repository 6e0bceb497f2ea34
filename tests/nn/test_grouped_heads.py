"""One setting selects multi-head, grouped-query or multi-query attention (rows 8 and 9)."""

import pytest
import torch

from headway.attention import attend
from headway.errors import HeadwayError
from headway.nn import Attention
from headway.patterns import Causal, Pattern, Window

HEADS, DIM, TOKENS = 6, 4, 11
BACKENDS = ("dense", "sdpa", "banded", "diagonal", "native")


def multi_head(layer: Attention, x: torch.Tensor) -> torch.Tensor:
    """Computes multi-head attention without any notion of groups: a head is a slice of each matrix."""
    heads = []
    for h in range(HEADS):
        head_rows = slice(h * DIM, (h + 1) * DIM)
        q, k, v = (x @ p.weight[head_rows].T for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        heads.append(attend(q[:, None], k[:, None], v[:, None], Causal(), backend="dense")[:, 0])
    joined = torch.cat(heads, -1)
    return torch.as_tensor(joined @ layer.o_proj.weight.T)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", [Causal(), Window.last(3)], ids=str)
def test_row_8_as_many_kv_heads_as_heads_are_each_head_alone_bit_for_bit(
    backend: str, pattern: Pattern
) -> None:
    """Row 8, g = h: every head gives what it gives without the others."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, HEADS, TOKENS, 8, generator=generator)
    together = attend(q, k, v, pattern, backend=backend)
    alone = [attend(q[:, [h]], k[:, [h]], v[:, [h]], pattern, backend=backend) for h in range(HEADS)]
    assert torch.equal(together, torch.cat(alone, 1))


def test_row_8_the_layer_with_as_many_kv_heads_is_the_layer_without_groups() -> None:
    """Row 8, g = h: the same state dict, the same bits, and the same as multi-head attention written out by slices."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, TOKENS, HEADS * DIM, generator=generator, dtype=torch.float64)
    grouped, plain = (Attention(HEADS * DIM, HEADS, *kv).double() for kv in ((HEADS,), ()))
    plain.load_state_dict(grouped.state_dict())
    assert torch.equal(grouped(x), plain(x))
    torch.testing.assert_close(grouped(x), multi_head(grouped, x), rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_8_one_kv_head_is_read_by_all(backend: str) -> None:
    """Row 8, g = 1: multi-query attention, with one key head for all queries."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, HEADS, TOKENS, 8, generator=generator)
    k, v = torch.randn(2, 2, 1, TOKENS, 8, generator=generator)
    shared = attend(q, k, v, Causal(), backend=backend)
    alone = torch.cat([attend(q[:, [h]], k, v, Causal(), backend=backend) for h in range(HEADS)], 1)
    torch.testing.assert_close(shared, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [4, 5, 7, 12])
def test_row_8_heads_that_do_not_divide_are_refused(kv_heads: int) -> None:
    message = rf"6 query heads cannot share {kv_heads} key/value heads evenly; kv_heads must be one of \[1, 2, 3, 6\]"
    with pytest.raises(HeadwayError, match=message):
        Attention(HEADS * DIM, HEADS, kv_heads)
    q, k = torch.zeros(1, HEADS, 2, 8), torch.zeros(1, kv_heads, 2, 8)
    with pytest.raises(
        HeadwayError, match=rf"6 query heads cannot share {kv_heads} .* one of \[1, 2, 3, 6\]"
    ):
        attend(q, k, k, Causal())


@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
def test_row_9_scores_summed_over_a_group_are_another_attention(kv_heads: int) -> None:
    """Row 9, E5: softmax(sum_j q_(i,j) k_i) v_i, as printed, gives all heads of a group one result. Each head by itself
    gives its own; they only agree for groups of one."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, HEADS, TOKENS, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 1, kv_heads, TOKENS, 8, generator=generator, dtype=torch.float64)
    group = HEADS // kv_heads
    actual = attend(q, k, v, Causal())
    future = torch.ones(TOKENS, TOKENS).triu(1).bool()
    by_head, printed = torch.zeros_like(actual), torch.zeros_like(actual)
    for h in range(HEADS):
        i = h // group
        head_query, group_query = q[:, h], q[:, i * group : (i + 1) * group].sum(1)
        for out, query in ((by_head, head_query), (printed, group_query)):
            scores = (query @ k[:, i].mT / 8**0.5).masked_fill(future, -torch.inf)
            out[:, h] = scores.softmax(-1) @ v[:, i]
    torch.testing.assert_close(actual, by_head, rtol=0, atol=1e-13)
    difference = float((printed - actual).abs().max())
    assert difference < 1e-13 if group == 1 else difference > 0.1
