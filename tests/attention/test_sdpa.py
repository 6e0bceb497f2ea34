"""Which torch kernels backend `sdpa` calls for a chunk of queries, on a CPU and on other devices."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.attention import attend
from headway.patterns import Causal
from headway.tokens import Tokens


class Seen(TorchDispatchMode):
    """Records the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(f))
        return f(*args, **(kwargs or {}))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_chunk_takes_the_cpu_kernel_on_cpus_only(device: str, kv_heads: int) -> None:
    """`meta` stands for every other device: the operators called there are those called on CUDA."""
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, kv_heads, 8, 8)
    at = {"q_tokens": Tokens.range(3, start=5), "k_tokens": Tokens.range(8)}
    expected = attend(q, k, k, Causal(), **at, backend="dense")
    at = {side: Tokens.range(t.count, t.start, device=device) for side, t in at.items()}
    with Seen() as seen:
        out = attend(q.to(device), k.to(device), k.to(device), Causal(), **at, backend="sdpa")
    assert any("for_cpu" in name for name in seen.names) == (device == "cpu")
    assert (out.shape, out.device.type) == (expected.shape, device)
    if device == "cpu":
        torch.testing.assert_close(out, expected)


def test_a_chunk_as_a_mask_equals_the_chunk_in_two_parts() -> None:
    """Other devices run a chunk as a mask; so does a CPU if a gradient is needed, which this test compares."""
    q, k, v = (torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((4, 5), (2, 20), (2, 20)))
    at = {"q_tokens": Tokens.range(5, start=15), "k_tokens": Tokens.range(20)}
    parts = attend(q, k, v, Causal(), **at, backend="sdpa")
    masked = attend(q.requires_grad_(), k, v, Causal(), **at, backend="sdpa").detach()
    torch.testing.assert_close(masked, parts, rtol=1e-12, atol=1e-12)
