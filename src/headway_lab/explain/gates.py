"""Gates on the output of attention. (Qiu et al. 2025, "Gated Attention for Large Language Models".)"""

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
    """Yields a row without a gate, then one for each kind with each function: parameters, the formula, the effect of
    gates of 0 and of a shut one, and whether the map of a single token is linear; the worst of the seeds."""
    kinds: list[tuple[Gate | None, str]] = [(None, "sigmoid"), *product(KINDS, GATE_ACTS)]
    for gate, act in kinds:
        results = [measure(gate, act, seed) for seed in seeds]
        worst = {name: max(result[name] for result in results) for name in results[0]}
        worst["off from linear"] = (max if gate is None else min)(
            result["off from linear"] for result in results
        )
        yield {"gate": "none" if gate is None else f"{gate}, {act}", **worst}


def measure(gate: Gate | None, act: str, seed: int) -> dict[str, float]:
    """Returns the columns of one layer with random weights, in float64; the first feature of each token is 1, so that
    the first column of Wg acts as a bias."""
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
    open_heads, width = outputs(layer, x), WIDTH // len(weight)
    weight[0] = 0
    weight[0, 0] = SHUT
    shut = outputs(layer, x)
    columns["a shut gate leaves"] = float(shut[..., :width].abs().max())
    columns["others move"] = apart(shut[..., width:], open_heads[..., width:])
    weight.zero_()
    columns["0 from the factor"] = apart(outputs(layer, x), AT_0[act] * heads)
    return columns


AT_0 = {"sigmoid": 0.5, "softplus": 0.6931471805599453}


def layer_of(gate: Gate | None, act: str, seed: int) -> Attention:
    """Returns a layer with random weights: a seed gives all layers the same weights, except those of the gate."""
    layer = Attention(WIDTH, HEADS, pattern=Causal(), gate=gate, gate_act=act).double().requires_grad_(False)
    for i, (name, parameter) in enumerate(sorted(layer.named_parameters())):
        parameter_seed = seed + 100 if name.startswith("g_proj") else seed + 200 + i - (gate is not None)
        parameter.copy_(normal(*parameter.shape, seed=parameter_seed) * WIDTH**-0.5)
    return layer


def outputs(layer: Attention, x: Tensor) -> Tensor:
    """Returns the outputs of the heads, concatenated [1, T, H E]: the input of the output projection."""
    captured: list[Tensor] = []
    hook = layer.o_proj.register_forward_pre_hook(lambda module, inputs: captured.append(inputs[0].clone()))
    layer(x)
    hook.remove()
    return captured[0]


def factors(layer: Attention, x: Tensor) -> Tensor:
    """Returns act(x Wg), for each of a head's channels [1, T, H E]."""
    assert layer.g_proj is not None
    gates = GATE_ACTS[layer.gate_act](x @ layer.g_proj.weight.T)
    return gates.repeat_interleave(WIDTH // gates.shape[-1], -1)


def additive(layer: Attention, x: Tensor, y: Tensor) -> float:
    """Returns |f(x) + f(y) - f(x + y)| / |f(x + y)| for a row of one token, whose only attention weight is 1: 0 if f is
    linear."""
    deviation = layer(x) + layer(y) - layer(x + y)
    return float(deviation.norm() / layer(x + y).norm())


def apart(a: Tensor, b: Tensor) -> float:
    """Returns the largest difference."""
    return float((a - b).abs().max())


def judge(rows: Rows) -> Report:
    """Returns the verdict: gates follow their formula, have the expected parameters, shut only their own outputs, and
    make the map of values nonlinear."""
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
