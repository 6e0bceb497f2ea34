"""A trained sink logit in the softmax with those of the keys. (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card",
section 2.2.)"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from headway.attention import KeyValues, attend, attend_keys, attention_weights
from headway.partial import Partial, merge_all
from headway.patterns import Full
from headway.tokens import Tokens
from headway_lab.explain.figures import curves, panels
from headway_lab.explain.report import Report, Row, Rows
from headway_lab.profiling import normal

HEADS, QUERIES, KEYS, WIDTH, SEEDS = 2, 8, 24, 16, (0, 1, 2)
LOGITS = (-6.0, -3.0, 0.0, 3.0, 6.0)
MATCH, EQUAL, GRADIENT, APART = 4.0, 1e-12, 1e-10, 1e-3


def run(*, seeds: Sequence[int] = SEEDS) -> Iterator[Row]:
    """Yields, for each logit, the sum of weights, the merge of halves of the keys, and the gradients compared with
    those of the formula."""
    for logit in LOGITS:
        results = [measure(logit, seed) for seed in seeds]
        yield {"s": logit, **{name: WORST.get(name, max)(r[name] for r in results) for name in results[0]}}


def measure(logit: float, seed: int) -> dict[str, float]:
    """Returns the columns of one logit for one seed, in float64. The matching query is MATCH sqrt(D) times the first
    key k, so that its score with it is MATCH |k|^2; the other query is 0, and so are its scores with every key."""
    q, k, v = (normal(1, HEADS, n, WIDTH, seed=seed + 10 * i) for i, n in enumerate((QUERIES, KEYS, KEYS)))
    sink = torch.full((HEADS,), logit, dtype=q.dtype)
    halves = [
        part(q, k[:, :, keys], v[:, :, keys]) for keys in (slice(None, KEYS // 2), slice(KEYS // 2, None))
    ]
    whole, merged = part(q, k, v), merge_all(halves)
    out, total = attend(q, k, v, sink_logit=sink), attention_weights(q, k, sink_logit=sink).sum(-1)
    twice = merge_all([half.with_sink(sink[:, None]) for half in halves])
    queries = torch.stack((MATCH * WIDTH**0.5 * k[:, :, 0], torch.zeros_like(k[:, :, 0])), 2)
    matched, blank = attention_weights(queries, k, sink_logit=sink).sum(-1).unbind(-1)
    return {
        "sum, a key matches": float(matched.min()),
        "sum, none matches": float(blank.max()),
        "from n / (n + e^s)": apart(blank, KEYS / (KEYS + sink.exp())),
        "from sigmoid(lse - s)": apart(total, torch.sigmoid(whole.lse - logit)),
        "from dense": apart(out, dense(q, k, v, sink)),
        "merged from whole": apart(merged.with_sink(sink[:, None]).out, out),
        "a sink each": apart(twice.out, out),
        **gradients(q, k, v, sink, seed),
    }


def part(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Returns attention over these keys, without a sink, with its logsumexp."""
    q_tokens, k_tokens = (Tokens.range(x.shape[2]) for x in (q, k))
    return attend_keys(q, q_tokens, [KeyValues(k, v, k_tokens)], Full())


def dense(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """Returns the formula, written out: a softmax over one more column, which is then dropped."""
    scores = q @ k.mT * WIDTH**-0.5
    column = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v


def gradients(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, seed: int) -> dict[str, float]:
    """Returns the largest difference of each gradient from that of the formula, relative to the formula's largest
    entry."""

    def of(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        inputs = [x.clone().requires_grad_() for x in (q, k, v, sink)]
        loss = (function(*inputs) * normal(*q.shape, seed=seed + 50)).sum()
        return torch.autograd.grad(loss, inputs)

    ours, formula = of(lambda q, k, v, s: attend(q, k, v, sink_logit=s)), of(dense)
    pairs = zip(("q", "k", "v", "s"), ours, formula, strict=True)
    return {f"gradient of {name}": apart(a, b) / float(b.abs().max()) for name, a, b in pairs}


def apart(a: Tensor, b: Tensor) -> float:
    """Returns the largest difference."""
    return float((a - b).abs().max())


WORST: dict[str, Callable[..., float]] = {"sum, a key matches": min, "a sink each": min}


def judge(rows: Rows) -> Report:
    """Returns the verdict: sums, merges and gradients are those of the formula; a sink in each half counts twice."""
    gradient = max(row[f"gradient of {name}"] for row in rows for name in "qkvs")
    errors = {name: max(row[name] for row in rows) for name in rows[0] if "from" in name}
    high = rows[-1]
    blank = [row["sum, none matches"] for row in rows]
    return Report(
        rows=tuple(rows),
        claims={
            "sum": max(errors["from sigmoid(lse - s)"], errors["from n / (n + e^s)"]) < EQUAL,
            "dense": errors["from dense"] < EQUAL,
            "merged": errors["merged from whole"] < EQUAL,
            "once": min(row["a sink each"] for row in rows if row["s"] >= 0) > APART,
            "gradients": gradient < GRADIENT,
            "nothing": high["sum, none matches"] < 0.1 and high["sum, a key matches"] > 0.9,
        },
        values={"off": max(errors.values()), "gradient": gradient, "high": high, "blank": blank[0]},
    )


SUMS = {"sum, a key matches": "o- blue", "sum, none matches": "o- orange"}
TWICE = {"merged from whole": "o- green", "a sink each": "o- red"}
draw = panels(
    curves("s", SUMS, "what the weights of the keys add up to", "sum", ylim=(0, 1.05)),
    curves(
        "s", TWICE, "halves of the keys, merged", "|difference from the whole|", log="y", ylim=(1e-17, 10)
    ),
)
