"""How query heads share keys and values."""

from dataclasses import dataclass

from headway.errors import HeadwayError


@dataclass(frozen=True)
class Heads:
    """`kv_heads` key/value heads, each shared by `group` query heads: H = K * G.

    Query head h reads kv head h // group. MHA is group = 1, MQA is kv_heads = 1, GQA lies between (Ainslie et al. 2023,
    section 2.2; their G, the number of groups, is `kv_heads` here). Since H is written as a product, every layout
    divides evenly.
    """

    kv_heads: int
    group: int = 1

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.group < 1:
            raise HeadwayError(
                f"heads: kv_heads and group must be at least 1, got {self.kv_heads} and {self.group}"
            )

    @staticmethod
    def of(query_heads: int, kv_heads: int | None = None) -> "Heads":
        """Returns the layout of `query_heads` query heads over `kv_heads` (by default as many)."""
        kv_heads = query_heads if kv_heads is None else kv_heads
        if query_heads < 1 or kv_heads < 1 or query_heads % kv_heads:
            divisors = [d for d in range(1, query_heads + 1) if query_heads % d == 0]
            raise HeadwayError(
                f"heads: {query_heads} query heads cannot share {kv_heads} key/value heads evenly; "
                f"{f'kv_heads must be one of {divisors}' if divisors else 'heads must be at least 1'}"
            )
        return Heads(kv_heads, query_heads // kv_heads)

    @property
    def query_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def kind(self) -> str:
        """The kind of attention: "MHA", "GQA" or "MQA"."""
        if self.group == 1:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"
