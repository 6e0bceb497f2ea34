"""The rows of `headway bench attention`: the same work done by headway and by each peer, case by case.

Legend: H query heads, K KV heads, S cached keys, D per head.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.attention import KeyValues, attend
from headway.attention.select import AUTO, named
from headway.cores import cores
from headway.patterns import Causal
from headway.quantization import dequantize
from headway.tokens import Tokens
from headway_lab.bench.cases import BOTH, CASES, FORWARD, TRAIN, Case
from headway_lab.bench.inputs import OURS, Call, Inputs, Problem, Side, fastest, make, without_gradient
from headway_lab.bench.measure import THOROUGH, Effort, measured
from headway_lab.bench.peers import PEERS
from headway_lab.bench.rows import Row
from headway_lab.profiling import doublings

COLD_BYTES = 256 << 20
"""Total bytes of the KV caches that take turns in decoding, so that none is still in the processor's cache."""
MOST_CACHES = 32

Say = Callable[[str], None]
Step = Callable[[KeyValues], Tensor]


def scaling() -> tuple[int, ...]:
    """Returns 1, 2, 4, ... threads, and the number of cores."""
    return tuple(dict.fromkeys([*doublings(1, cores()), cores()]))


def attention(
    cases: Sequence[Case],
    *,
    dtypes: Sequence[str] = BOTH,
    passes: Sequence[str] = (FORWARD, TRAIN),
    backend: str = AUTO,
    threads: Sequence[int] = (),
    effort: Effort = THOROUGH,
    say: Say,
) -> Iterator[Row]:
    """Yields the rows as they are measured: every case in those of its dtypes and passes that are named, at each number
    of `threads`; `say` is called with progress messages.

    Raises BackendError for an unknown backend."""
    if backend != AUTO:
        named(backend)
    threads_before = torch.get_num_threads()
    try:
        for count, case in itertools.product(threads or (threads_before,), cases):
            torch.set_num_threads(count)
            for dtype, direction in itertools.product(case.dtypes, case.passes):
                if dtype in dtypes and direction in passes:
                    label = f"{case.label(direction)} {dtype}"
                    say(f"{label}, {count} {'thread' if count == 1 else 'threads'}")
                    yield measure(case, dtype, direction, backend, effort)
    finally:
        torch.set_num_threads(threads_before)


def measure(case: Case, dtype: str, direction: str, backend: str, effort: Effort) -> Row:
    """Measures one row in this process."""
    problem = partial(build, case, dtype, direction, backend)
    return measured("attention", case.label(direction), dtype, problem, effort, backend)


def build(case: Case, dtype: str, direction: str, backend: str = "auto") -> Problem:
    """Returns headway and the case's peers on the same q, k, v, and the case that it is compared with.

    Raises BackendError if `backend` cannot run it."""
    if case.kind == "decode":
        return decode(case, dtype, backend)
    at = make(case, dtype, direction)
    problem = Problem({OURS: at.run(headway(at, backend))}, at.flops)
    problem.add_peers({name: partial(peer_side, name, at) for name in case.peers})
    if case.against is not None:
        other_inputs = make(CASES[case.against].at(case.tokens), dtype, direction)
        scale = at.flops / other_inputs.flops if case.per_pair else 1.0
        problem.set_beside(f"{OURS} {case.against}", other_inputs.run(headway(other_inputs, backend)), scale)
    return problem


def peer_side(name: str, at: Inputs) -> Side:
    """Returns a peer on these inputs. Raises UnsupportedCase if it cannot run them."""
    return at.run(PEERS[name](at))


def headway(at: Inputs, backend: str) -> Call:
    """Returns a call of `attend` as a user writes it."""
    pattern, tokens = at.case.pattern, None if at.plain else at.tokens
    return lambda: attend(at.q, at.k, at.v, pattern, q_tokens=tokens, k_tokens=tokens, backend=backend)


def decode(case: Case, dtype: str, backend: str) -> Problem:
    """Returns the problem of one query over a long KV cache, read from memory; work is the bytes of keys, values and
    scales that headway reads.

    Every call of a side takes the next of several caches. In an int8 case, headway and "dequantized" read int8; all
    others read the dequantized numbers, rounded to `dtype` beforehand."""
    torch_dtype, noise = getattr(torch, dtype), torch.Generator().manual_seed(0)
    past, width, int8 = case.tokens, case.width, case.kv_dtype == "int8"
    q = torch.empty(1, case.heads, 1, width, dtype=torch_dtype).normal_(generator=noise)
    last, all_keys = Tokens.range(1, start=past - 1), Tokens.range(past)

    def cache() -> KeyValues:
        k, v = (
            torch.empty(1, case.kv_heads, past, width, dtype=torch_dtype).normal_(generator=noise)
            for _ in "kv"
        )
        return KeyValues(k, v, all_keys).quantized() if int8 else KeyValues(k, v, all_keys)

    first = cache()
    read = sum(t.nbytes for t in first.tensors)
    caches = [first, *(cache() for _ in range(max(2, min(MOST_CACHES, -(-COLD_BYTES // read))) - 1))]
    plain = [part.dequantized(torch_dtype) for part in caches]
    rows = q.view(case.kv_heads, case.heads // case.kv_heads, width)
    scaled = rows * width**-0.5

    def ours(part: KeyValues) -> Tensor:
        return attend(
            q,
            part.k,
            part.v,
            Causal(),
            q_tokens=last,
            k_tokens=all_keys,
            backend=backend,
            k_scale=part.k_scale,
            v_scale=part.v_scale,
        )

    def gqa(part: KeyValues) -> Tensor:
        return F.scaled_dot_product_attention(q, part.k, part.v, enable_gqa=True)

    def rows_sdpa(part: KeyValues) -> Tensor:
        return F.scaled_dot_product_attention(rows.unsqueeze(0), part.k, part.v).view_as(q)

    def rows_first(part: KeyValues) -> Tensor:
        return weighted(scaled @ part.k[0].transpose(1, 2), part)

    def keys_first(part: KeyValues) -> Tensor:
        return weighted((part.k[0] @ scaled.transpose(1, 2)).transpose(1, 2), part)

    def weighted(scores: Tensor, part: KeyValues) -> Tensor:
        return (torch.softmax(scores, -1, dtype=torch.float32).to(torch_dtype) @ part.v[0]).view_as(q)

    def dequantized(convert: Callable[[Tensor, Tensor], Tensor]) -> Step:
        def step(part: KeyValues) -> Tensor:
            k, v, k_scale, v_scale = part.tensors
            return rows_sdpa(KeyValues(convert(k, k_scale), convert(v, v_scale), part.tokens))

        return step

    def turns(step: Step, over: Sequence[KeyValues]) -> Side:
        endless = itertools.cycle(over)
        return without_gradient(lambda: step(next(endless)))

    rounded_once = dequantized(lambda t, scale: dequantize(t, scale, torch_dtype))
    rounded_twice = dequantized(lambda t, scale: t.to(torch_dtype).mul_(scale.to(torch_dtype).unsqueeze(-1)))
    peers: dict[str, tuple[list[Step], list[KeyValues]]] = {
        "rows": ([rows_first, keys_first], plain),
        "rows-sdpa": ([rows_sdpa], plain),
        "gqa": ([gqa], plain),
        "dequantized": ([rounded_once, rounded_twice], caches),
    }
    problem = Problem({OURS: turns(ours, caches)}, float(read), "reads")
    for name in case.peers:
        steps, over = peers[name]
        problem.sides[name] = turns(fastest(steps, partial(turns, over=over)), over)
    if case.against is not None:
        problem.sides[f"{OURS} {case.against}"] = turns(ours, plain)
    return problem
