"""The choice of the backend of a call, with its reasons: the registry, and the policy of "auto"."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from headway.attention import autograd, call_cache
from headway.attention.backends.banded import BANDED
from headway.attention.backends.base import BOTH, CPU, CUDA, Backend
from headway.attention.backends.chunks import CHUNKS
from headway.attention.backends.dense import DENSE
from headway.attention.backends.diagonal import DIAGONAL
from headway.attention.backends.flex.backend import FLEX
from headway.attention.backends.native.backend import NATIVE
from headway.attention.backends.sdpa import SDPA, form
from headway.attention.backends.triton.backend import TRITON
from headway.attention.call import Call
from headway.attention.key_values import KeyValues
from headway.choice import Choice
from headway.errors import BackendError, check_known
from headway.heads import Heads
from headway.partial import Partial
from headway.patterns import Pattern
from headway.patterns.program import opaque
from headway.scores import Score
from headway.tokens import Tokens

AUTO = "auto"
BACKENDS = {b.name: b for b in (DENSE, SDPA, NATIVE, BANDED, DIAGONAL, CHUNKS, FLEX, TRITON)}
"""Every backend, by its name."""


def register(backend: Backend, rule: "Rule | None" = None) -> None:
    """Registers a backend under its name; with a rule, "auto" tries it before all others. Raises BackendError if the
    name is taken."""
    if backend.name in (AUTO, *BACKENDS):
        raise BackendError(f"register: there is a backend {backend.name!r} already; give yours another name")
    BACKENDS[backend.name] = backend
    POLICY[:0] = [] if rule is None else [rule]
    call_cache.forget()


def named(name: str) -> Backend:
    """Returns the backend of this name. Raises BackendError if there is none."""
    check_known(name, BACKENDS, "unknown backend", are=f"known: {AUTO},", error=BackendError)
    return BACKENDS[name]


# -- the policy ----------------------------------------------------------------------------------------------

FEW_PRODUCTS = 2**18
"""Number of products of q and k (B H T S D) up to which torch's kernel is taken: an estimate, not a measured
crossing (docs/log.md)."""

MASK_PAIRS = 2**16
"""Number of query-key pairs of a row up to which torch's kernel with a mask is faster than planning blocks
(docs/log.md)."""

DENSE_SCORES = 2**20
"""Number of scores up to which computing the whole matrix at once is faster than planning blocks."""


class Situation:
    """The input of the policy: a call, whether its logsumexp is needed, the device it would run on, and its size.

    pairs       query-key pairs of a row, T S
    scores      elements of the whole score matrix, B H T S
    products    multiplications in q k^T, B H T S D
    """

    def __init__(self, call: Call, lse: bool, device: str | None = None) -> None:
        kind = call.q.device.type
        self.call, self.lse, self.device = call, lse, device or ("cpu" if kind == "meta" else kind)
        rows, heads, queries, width = call.q.shape
        self.pairs = queries * sum(part.count for part in call.keys)
        self.scores = rows * heads * self.pairs
        self.products = self.scores * width

    @property
    def forms(self) -> str:
        """The form in which torch's kernel would take each key set (`sdpa.form`)."""
        return " + ".join(form(self.call, part) for part in self.call.keys)

    def unsupported_reason(self, backend: Backend) -> str | None:
        """Returns why a backend cannot run the call here, or None if it can."""
        return backend.unsupported_reason(self.call, self.lse, self.device)


def _few_products(at: Situation) -> str | None:
    few = not torch.compiler.is_compiling() and at.products <= FEW_PRODUCTS
    if any(part.slots is not None for part in at.call.keys):
        return None  # a store of many requests; torch's kernel would carry NaN from one to the others, as 0 * NaN
    return f"torch's kernel is faster for {at.products} products" if few else None


def _in_vain(at: Situation) -> str | None:
    plain = {"full", "causal"} | ({"chunk"} if at.device == "cpu" and not at.call.needs_grad else set())
    small = at.pairs <= MASK_PAIRS and not at.lse and len(at.call.keys) == 1
    if {*at.forms.split(" + ")} <= plain or (small and at.unsupported_reason(TRITON) is not None):
        return None
    return "it would build a mask of queries x keys"


def _few_scores(at: Situation) -> str | None:
    return f"the whole score matrix is small ({at.scores} elements)" if at.scores <= DENSE_SCORES else None


def _many_scores(at: Situation) -> str | None:
    return None if _few_scores(at) else f"its score matrix has {at.scores} elements"


@dataclass(frozen=True)
class Rule:
    """A row of the policy: on these devices "auto" takes the backend, because of `why`, unless the backend cannot
    run the call or there is an objection to it."""

    backend: Backend
    why: str
    objection: Callable[[Situation], str | None] = lambda at: None
    devices: tuple[str, ...] = BOTH


POLICY = [
    Rule(NATIVE, "compiled for this CPU, blocks outside the pattern are skipped", _few_products, CPU),
    Rule(SDPA, "torch's fused kernel takes it as {at.forms}", _in_vain),
    Rule(
        NATIVE,
        "compiled for this CPU; it has few products ({at.products}), but torch's kernel cannot do them",
        devices=CPU,
    ),
    Rule(TRITON, "few queries: the keys are split over the device, each is read once", devices=CUDA),
    Rule(FLEX, "one compiled kernel, tiles outside the pattern are skipped", _few_scores, CUDA),
    Rule(DENSE, "the whole score matrix is small ({at.scores} elements)", _many_scores),
    Rule(BANDED, "blocks outside the pattern are skipped, memory is linear"),
    Rule(DENSE, "only the full score matrix can do it"),
]
"""The policy of "auto", in order: the first rule whose backend can run the call, without an objection, decides."""


def pick(call: Call, lse: bool) -> Backend:
    """Returns the backend that "auto" takes for a call whose heads share one pattern; `choose` says why."""
    at = Situation(call, lse)
    rules = (rule for rule in POLICY if at.device in rule.devices and rule.objection(at) is None)
    return next(rule.backend for rule in rules if at.unsupported_reason(rule.backend) is None)


def select(call: Call, backend: str, lse: bool) -> Backend:
    """Returns the backend of a call: the named one, or for "auto" the one that `pick` chooses. Raises BackendError
    if the named one cannot run it."""
    if backend == AUTO:
        return pick(call, lse)
    chosen = named(backend)
    reason = Situation(call, lse).unsupported_reason(chosen)
    if reason is not None:
        raise BackendError(
            f'backend="{backend}" cannot run this call: {reason}; backend="auto" would take {pick(call, lse).name}'
        )
    return chosen


def run(call: Call, backend: str, lse: bool, key: Hashable | None = None) -> Partial:
    """Runs one call on `backend`, or on the chosen one for "auto"; never falls back to another backend. Later calls
    of the same `key` are repeated without further checks."""
    chosen = select(call, backend, lse)
    repeated = None if key is None else call_cache.remember(key, chosen, call, lse)
    return autograd.run(chosen, call, lse) if repeated is None else repeated(call.q, call.keys[0])


def choose(
    pattern: Pattern,
    *,
    queries: int,
    keys: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int = 64,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    start: int | None = None,
    score: tuple[Score, ...] = (),
    dropout: float = 0.0,
    gradient: bool = False,
    paged: bool = False,
    device: str = "cpu",
) -> Choice:
    """Returns which backend "auto" takes for calls of these shapes, and why; nothing is computed.

    `queries` are the last of the `keys` tokens, unless `start` says where they begin. `paged` says that the keys are in
    pages of a cache. `device` is "cpu" or "cuda". The patterns of a `PerHead` run one by one; the choice is for the
    first of them.
    """
    check_known(device, BOTH, "choose: there is no device", error=BackendError)
    layout = Heads.of(heads, kv_heads)
    start = keys - queries if start is None else start
    q = torch.empty(batch, heads, queries, head_dim, dtype=dtype, device="meta", requires_grad=gradient)
    k = torch.empty(batch, layout.kv_heads, keys, head_dim, dtype=dtype, device="meta")
    # On the meta device no token is looked at, however many there are.
    stand_in = "meta" if opaque(pattern) is None else None
    slots = torch.empty(1, keys, dtype=torch.int32, device="meta") if paged else None
    part = KeyValues(k, k, Tokens.range(keys, device=stand_in), slots=slots)
    q_tokens = Tokens.range(queries, start, stand_in)
    at = Situation(
        Call(q, q_tokens, (part,), pattern.heads[0], layout, 1.0, score, dropout=dropout), False, device
    )
    rejected: dict[str, str] = {}
    for rule in POLICY:
        if device not in rule.devices:
            continue
        name, reason = rule.backend.name, at.unsupported_reason(rule.backend) or rule.objection(at)
        if reason is not None:
            rejected.setdefault(name, reason)
            continue
        rejected.pop(name, None)
        stored = 4.0 * at.scores if rule.backend.capabilities.stores_scores else None
        return Choice(name, rule.why.format(at=at), bytes=stored, rejected=tuple(rejected.items()))
    raise AssertionError("the last rule takes every call")
