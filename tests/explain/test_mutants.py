"""Every topic has a mutant, a change of one function or number, that must change its verdict."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.patterns import Full
from headway.positions import Rotary
from headway_lab.explain import TOPICS, explain, masks, offset_task
from headway_lab.explain.report import Report
from headway_lab.explain.runs import Budget, Run
from tests.explain.toys import made, module_of


@dataclass(frozen=True)
class Mutant:
    """`name` in a topic's module, replaced by `change` of it, so that the claim with the words `lost` is lost. `given`:
    settings of a small run; `stubs`: stand-ins for training in both runs."""

    name: str
    change: Callable[[Any], Any]
    lost: str
    given: Mapping[str, Any] = field(default_factory=dict)
    stubs: Mapping[str, Any] = field(default_factory=dict)


def low_first(specs: Mapping[str, Any], budget: Budget) -> dict[str, tuple[Run, ...]]:
    """Returns losses that rise from contender to contender, by the same steps for every seed."""
    return {name: made(*(1 + 0.1 * i + 0.2 * seed for seed in budget.seeds)) for i, name in enumerate(specs)}


def low_last(specs: Mapping[str, Any], budget: Budget) -> dict[str, tuple[Run, ...]]:
    """Returns losses that fall from contender to contender."""
    return dict(zip(specs, list(low_first(specs, budget).values())[::-1], strict=True))


def equal(specs: Mapping[str, Any], budget: Budget) -> dict[str, tuple[Run, ...]]:
    """Returns runs that all have the same loss."""
    return {name: made(*(1.0 for _ in budget.seeds)) for name in specs}


def learned(right: float) -> SimpleNamespace:
    """Returns a trained layer that names that share of the tokens at every position."""
    return SimpleNamespace(accuracy=lambda start=0: right)


def by_angles(rotary: Rotary, offsets: tuple[int, ...], **rest: Any) -> SimpleNamespace:
    """Returns a layer that has learned its task if the angles differ."""
    return learned(0.9 if len(set(rotary.frequencies(offset_task.WIDTH).tolist())) > 1 else 0.2)


def by_values(rotary: Rotary, offsets: tuple[int, ...], back: bool = False, **rest: Any) -> SimpleNamespace:
    """Returns a layer that fails away from its trained positions if values are turned and not turned back."""
    return SimpleNamespace(accuracy=lambda start=0: 0.3 if start and rotary.values and not back else 0.9)


def by_heads(heads: int, seed: int, steps: int) -> SimpleNamespace:
    """Returns a layer that names more tokens the more heads it has."""
    weight = torch.nn.Linear(1, 1)
    return SimpleNamespace(accuracy=lambda: heads / 4.1, layer=weight, losses=(1.0,), heads=heads)


def merged_askew(merge: Callable[[torch.nn.Module], None]) -> Callable[[torch.nn.Module], None]:
    """Returns a merge that leaves one weight off by 1 %."""

    def merged(model: torch.nn.Module) -> None:
        merge(model)
        model.get_parameter("model.layers.0.self_attn.q_proj.weight").mul_(1.01)

    return merged


def even(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Returns embeddings of positions that are sqrt(2) times too long."""
    return torch.ones(len(positions), width)


TWO = {"seeds": (0, 1)}
NO_NORM: dict[str, Any] = {
    "norm_times": lambda: {"LayerNorm": [2.0, 2.1], "RMSNorm": [1.0, 1.1]},
    "contend": low_last,
}
TABLE: dict[str, Mutant] = {
    "scale": Mutant("attention_weights", lambda f: lambda q, k, scale=None: f(q, k), "falls more than", TWO),
    "masks": Mutant(
        "attend", lambda f: lambda q, k, v, pattern, **rest: f(q, k, v, Full(), **rest), "gradients pass"
    ),
    "permutation": Mutant(
        "CASES", lambda cases: (("none", Rotary(pairing="halves"), Full()), *cases[1:]), "equivariant"
    ),
    "multi-head": Mutant(
        "fit",
        lambda f: lambda heads, seed, steps: f(1, seed, steps),
        "more heads name more tokens",
        stubs={"fit": by_heads, "looks": lambda trained: list(range(trained.heads))},
    ),
    "heads": Mutant(
        "attend",
        lambda f: lambda q, k, v, pattern: f(q, k.flip(1), v.flip(1), pattern),
        "query head h",
        {"context": 16},
    ),
    "complexity": Mutant(
        "attention", lambda f: lambda x, w, depth: f(x, w, depth) @ w[0], "operations are", {"n": 8, "d": 4}
    ),
    "receptive-field": Mutant(
        "attend", lambda f: lambda q, k, v, pattern, **rest: f(q, k, v, Full(), **rest), "gradients find"
    ),
    "sink-logit": Mutant(
        "attend",
        lambda f: lambda q, k, v, sink_logit: f(q, k, v, sink_logit=sink_logit - 1),
        "softmax over one more column",
        TWO,
    ),
    "gates": Mutant(
        "GATE_ACTS", lambda acts: dict(zip(acts, [*acts.values()][::-1], strict=True)), "act(x Wg)", TWO
    ),
    "delta": Mutant(
        "delta_attend",
        lambda f: lambda q, k, v, log_decay, beta, **rest: f(q, k, v, log_decay, beta / 2, **rest),
        "overwrites a key's value",
        TWO,
    ),
    "cache": Mutant(
        "attention_flops",
        lambda f: lambda whole, tokens: f(whole, tokens) + 1e5,
        "grow as T",
        {"context": 512},
    ),
    "memory": Mutant(
        "KINDS", lambda kinds: (*kinds[:2], (*kinds[2][:2], "dense")), "4-fold", {"context": 512}
    ),
    "packing": Mutant("best_fit", lambda f: lambda drawn, room: list(drawn), "packing fills", TWO),
    "adapters": Mutant("merge", merged_askew, "merged it computes the same"),
    "sinusoids": Mutant("shifted", lambda f: lambda table, k: f(table, k + 1), "one linear map"),
    "embedding": Mutant("Sinusoidal", lambda kind: lambda: SimpleNamespace(embedding=even), "sqrt(2) times"),
    "rotary-identity": Mutant(
        "turn", lambda f: lambda x, position: f(x, position.abs()), "<f(q, m), f(k, n)>"
    ),
    "rotary-forms": Mutant(
        "rotate_half", lambda f: lambda x: -f(x), "all forms are one", stubs={"REPEATS": 2}
    ),
    "rotary-expansion": Mutant("score", lambda f: lambda q, k, distance: f(q, k, -distance), "is the score"),
    "rotary-decay": Mutant(
        "decay", lambda f: lambda distance, theta: f(distance, torch.ones_like(theta)), "falls more than", TWO
    ),
    "rotary-frequencies": Mutant(
        "decay",
        lambda f: lambda distance, theta: f(distance, torch.ones_like(theta)),
        "every falling",
        TWO,
        {"train": by_angles},
    ),
    "rotary-values": Mutant(
        "attend",
        lambda f: lambda q, k, v, pattern, **rest: f(q, k, v.cumsum(2).sin(), pattern, **rest),
        "R_s times",
        TWO,
        {"train": by_values},
    ),
    "rotary-shift": Mutant(
        "product", lambda f: lambda a, b: f(a, b) + a.new_ones(()) * torch.rand(()), "rounding only", TWO
    ),
    "rotary-linear": Mutant(
        "turn", lambda f: lambda x, position: x, "some products", TWO, {"CONTEXTS": 2000}
    ),
    "norms": Mutant("NORMS", lambda norms: {**norms, "LayerNorm": norms["RMSNorm"]}, "mean 0", TWO),
    "residual-order": Mutant(
        "stack",
        lambda f: lambda depth, order, seed: f(depth, "post", seed),
        "norm before",
        stubs={"DEPTHS": (4, 8, 16)},
    ),
    "norm-orders": Mutant(
        "stack",
        lambda f: lambda depth, order, seed, qk_norm: f(depth, "pre", seed),
        "sqrt(1 + 2 L)",
        TWO,
        {"DEPTHS": (4, 8)},
    ),
    "experts": Mutant(
        "loop", lambda f: lambda layer, x: f(layer, x.flip(0)), "sorted rows", TWO, {"ROWS": 32}
    ),
    "swish": Mutant("swish", lambda f: lambda x, beta: x if beta == 0 else f(x, beta), "x / 2"),
    "positions": Mutant("contend", lambda f: low_last, "rotary ends", TWO, {"contend": low_first}),
    "rotary-layers": Mutant("contend", lambda f: equal, "first layer only", TWO, {"contend": low_first}),
    "rotary-switches": Mutant(
        "contend", lambda f: low_last, "equal frequencies", TWO, {"contend": low_first}
    ),
    "rotary-trained": Mutant(
        "drifts",
        lambda f: lambda run: torch.zeros(2, 8),
        "some frequency moves",
        TWO,
        {"contend": low_last, "drifts": lambda run: torch.ones(2, 8), "without_drift": lambda run: 5.0},
    ),
    "blocks": Mutant("contend", lambda f: low_first, "LLaMA's block", TWO, NO_NORM),
    "linear-training": Mutant(
        "contend",
        lambda f: low_last,
        "rotary lowers it",
        TWO,
        {
            "contend": low_first,
            "unigram": lambda: 3.0,
            "measure": lambda lengths: [
                {"attention": name, "tokens": n, "ms a step": n / 64, "MiB kept": float(n)}
                for name in ("softmax, dense", "softmax", "linear", "linear, cosine")
                for n in (64, 128)
            ],
        },
    ),
    "extrapolation": Mutant(
        "tail_loss",
        lambda f: lambda run, spec, times: 1.0 + times,
        "rotary reads rows",
        TWO,
        {"contend": low_first, "tail_loss": lambda run, spec, times: 1.0},
    ),
}


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """What topics cache for their pictures is of the code without a mutant, and must not be used with one."""
    forget()
    yield
    forget()


def forget() -> None:
    masks.measure.cache_clear()


def outcome(topic: str, settings: Mapping[str, Any]) -> Report:
    forget()
    return explain(topic, **settings)


def test_every_topic_has_a_mutant() -> None:
    assert set(TABLE) == set(TOPICS)


LONG = ("adapters", "cache", "memory", "residual-order", "rotary-forms", "rotary-shift")
"""Topics that take seconds, and are run twice."""


QUICK = [topic for topic in TABLE if topic not in LONG][::2]


@pytest.mark.parametrize(
    "topic", [pytest.param(t, marks=() if t in QUICK else pytest.mark.slow) for t in TABLE]
)
def test_a_mutant_changes_the_verdict(topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, module = TABLE[topic], module_of(topic)
    for name, stub in mutant.stubs.items():
        monkeypatch.setattr(module, name, stub)
    right = outcome(topic, mutant.given)
    monkeypatch.setattr(module, mutant.name, mutant.change(getattr(module, mutant.name)))
    wrong = outcome(topic, mutant.given)
    monkeypatch.undo()
    (claim,) = [claim for claim in right.claims if mutant.lost in claim]
    assert right.claims[claim], right.verdict
    assert not wrong.claims[claim], wrong.verdict
    assert wrong.verdict != right.verdict
