"""Gates on what attention gives. (Qiu et al. 2025, "Gated Attention for Large Language Models".)"""

from collections.abc import Iterator, Sequence
from itertools import product

from torch import Tensor

from headway.nn import Attention
from headway.nn.gates import GATE_ACTS, Gate
from headway.patterns import Causal
from headway_lab.explain.figures import bars, panels
from headway_lab.explain.report import Report, Row, Rows
from headway_lab.profiling import normal

WIDTH, HEADS, TOKENS, SEEDS = 32, 4, 12, (0, 1, 2)
KINDS: tuple[Gate, ...] = ("head", "channel")
SHUT, EQUAL, APART = -40.0, 1e-12, 1e-2


def run(*, seeds: Sequence[int] = SEEDS) -> Iterator[Row]:
    """No gate, then each kind with each function: parameters, the formula, what gates of 0 and a shut one do, and
    whether a token alone is mapped linearly; the worst of the seeds."""
    kinds: list[tuple[Gate | None, str]] = [(None, "sigmoid"), *product(KINDS, GATE_ACTS)]
    for gate, act in kinds:
        results = [measure(gate, act, seed) for seed in seeds]
        worst = {name: max(result[name] for result in results) for name in results[0]}
        worst["off from linear"] = (max if gate is None else min)(
            result["off from linear"] for result in results
        )
        yield {"gate": "none" if gate is None else f"{gate}, {act}", **worst}


def measure(gate: Gate | None, act: str, seed: int) -> dict[str, float]:
    """The columns of one layer of random weights, in float64; the first feature of each token is 1, so that the first
    column of Wg is what a bias would be."""
    layer, plain = (layer_of(kind, act, seed) for kind in (gate, None))
    x, y = (normal(1, TOKENS, WIDTH, seed=seed + i) for i in (10, 20))
    x[..., 0] = 1
    columns = {
        "parameters": sum(p.numel() for p in layer.parameters()),
        "off from linear": additive(layer, x[:, :1], y[:, :1]),
    }
    if layer.g_proj is None:
        return columns
    heads, weight = outputs(plain, x), layer.g_proj.weight
    columns["from the formula"] = apart(outputs(layer, x), factors(layer, x) * heads)
    open_heads, wide = outputs(layer, x), WIDTH // len(weight)
    weight[0] = 0
    weight[0, 0] = SHUT
    shut = outputs(layer, x)
    columns["a shut gate leaves"] = float(shut[..., :wide].abs().max())
    columns["others move"] = apart(shut[..., wide:], open_heads[..., wide:])
    weight.zero_()
    columns["0 from the factor"] = apart(outputs(layer, x), AT_0[act] * heads)
    return columns


AT_0 = {"sigmoid": 0.5, "softplus": 0.6931471805599453}


def layer_of(gate: Gate | None, act: str, seed: int) -> Attention:
    """Random weights, of which a seed gives all layers the same but for the gate's."""
    layer = Attention(WIDTH, HEADS, pattern=Causal(), gate=gate, gate_act=act).double().requires_grad_(False)
    for i, (name, parameter) in enumerate(sorted(layer.named_parameters())):
        parameter_seed = seed + 100 if name.startswith("g_proj") else seed + 200 + i - (gate is not None)
        parameter.copy_(normal(*parameter.shape, seed=parameter_seed) * WIDTH**-0.5)
    return layer


def outputs(layer: Attention, x: Tensor) -> Tensor:
    """The outputs of the heads, side by side [1, T, H E]: the input of the output projection."""
    seen: list[Tensor] = []
    hook = layer.o_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].clone()))
    layer(x)
    hook.remove()
    return seen[0]


def factors(layer: Attention, x: Tensor) -> Tensor:
    """act(x Wg), for each of a head's channels [1, T, H E]."""
    assert layer.g_proj is not None
    gates = GATE_ACTS[layer.gate_act](x @ layer.g_proj.weight.T)
    return gates.repeat_interleave(WIDTH // gates.shape[-1], -1)


def additive(layer: Attention, x: Tensor, y: Tensor) -> float:
    """|f(x) + f(y) - f(x + y)| / |f(x + y)| of a row of one token, whose one weight is 1: 0 if f is linear."""
    apart = layer(x) + layer(y) - layer(x + y)
    return float(apart.norm() / layer(x + y).norm())


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference."""
    return float((a - b).abs().max())


def judge(rows: Rows) -> Report:
    """The verdict: gates are their formula, cost what it says, shut what they are of, and make values not linear."""
    plain, *gated = rows
    units = {"head": HEADS, "channel": WIDTH}
    extra = {row["gate"]: row["parameters"] - plain["parameters"] for row in gated}
    return Report(
        rows=tuple(rows),
        claims={
            "formula": max(row["from the formula"] for row in gated) < EQUAL,
            "sizes": all(extra[name] == WIDTH * units[name.partition(",")[0]] for name in extra),
            "zero": max(row["0 from the factor"] for row in gated) < EQUAL,
            "shut": max(row["a shut gate leaves"] for row in gated) < EQUAL,
            "alone": max(row["others move"] for row in gated) == 0,
            "linear": plain["off from linear"] < EQUAL
            and min(row["off from linear"] for row in gated) > APART,
        },
        values={
            "extra": {kind: WIDTH * units[kind] for kind in units},
            "shares": {kind: WIDTH * units[kind] / plain["parameters"] for kind in units},
            "leaves": max(row["a shut gate leaves"] for row in gated),
            "bent": min(row["off from linear"] for row in gated),
            "straight": plain["off from linear"],
        },
    )


draw = panels(
    bars(("gate",), "parameters", "parameters of a layer"),
    bars(
        ("gate",),
        "off from linear",
        "a token alone: is the layer linear?",
        "|f(x) + f(y) - f(x + y)| / |f(x + y)|",
        xscale="log",
        xlim=(1e-17, 10),
    ),
)
