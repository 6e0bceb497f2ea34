"""The sums that replace a set of keys.

Legend: B rows, K kv heads, F features, E per value.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.errors import CacheError


@dataclass(frozen=True, eq=False)
class LinearState:
    """Everything that linear attention keeps of a set of keys, whatever its size. These are sums, so states of disjoint
    sets add.

        kv      sum_j phi(k_j) v_j^T, of the numerator's features          [B, K, F, E]
        k       sum_j phi(k_j), of the denominator's                        [B, K, F]
        count   number of keys                                       int64 [B]

    float32, or float64 for float64 keys. The empty set is all zeros. With "softmax over tokens" features depend on the
    whole set, and states do not add. (Katharopoulos et al. 2020, equations 18 and 19.)
    """

    kv: Tensor
    k: Tensor
    count: Tensor

    @staticmethod
    def empty(
        batch: int,
        kv_heads: int,
        features: int,
        value_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "LinearState":
        """Returns the state of no keys, which is neutral under `merge`."""
        return LinearState(
            torch.zeros(batch, kv_heads, features, value_dim, dtype=dtype, device=device),
            torch.zeros(batch, kv_heads, features, dtype=dtype, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
        )

    def merge(self, other: "LinearState") -> "LinearState":
        """Returns the state of both sets together, which must be disjoint. Raises CacheError if sizes, dtypes or
        devices differ."""
        if self.kv.shape != other.kv.shape or self.kv.dtype != other.kv.dtype or self.device != other.device:
            (b, k, f, e), (b2, k2, f2, e2) = self.kv.shape, other.kv.shape
            raise CacheError(
                f"LinearState: states of [batch, kv_heads, features, value_dim] = {[b, k, f, e]} in {self.kv.dtype} on "
                f"{self.device} and {[b2, k2, f2, e2]} in {other.kv.dtype} on {other.device} cannot be added; both "
                "must be of the same layer, rows, dtype and device"
            )
        return LinearState(self.kv + other.kv, self.k + other.k, self.count + other.count)

    @property
    def device(self) -> torch.device:
        return self.kv.device

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.kv, self.k, self.count

    @property
    def nbytes(self) -> int:
        """Bytes of B K F (E + 1) numbers and of the counts."""
        return sum(t.nbytes for t in self.tensors)
