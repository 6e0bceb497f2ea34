"""How far a stack of windows sees. (Beltagy et al. 2020, section 3.1: l layers of window w reach l w.)"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headway.attention import attend
from headway.patterns import Causal, Global, Pattern, Window, visible
from headway.patterns.count import span
from headway.tokens import Tokens
from headway_lab.explain.figures import Figure, bare, label_axes
from headway_lab.explain.report import Report, Row, Rows

COUNT, HEADS, WIDTH, SEED = 64, 2, 8, 0
GLOBAL = 3
TOKENS = Tokens.range(COUNT).with_global([GLOBAL])

STACKS: tuple[tuple[str, tuple[Pattern, ...]], ...] = (
    ("4 equal", (Window.last(4),) * 4),
    ("growing: 3, 5, 7 wide", (Window.around(1), Window.around(2), Window.around(3))),
    ("dilated: 1, 2, 4, 8", tuple(Window.last(3, step=step) for step in (1, 2, 4, 8))),
    ("one dilated layer", (Window.last(3, step=8),)),
    ("dilated only: 4, 4", (Window.last(3, step=4),) * 2),
    ("two-sided, then causal", (Window.around(3), Window.last(6))),
    ("with global tokens", (Window.around(2) | Global(), Window.around(2))),
    ("last layer full", (Window.last(3), Causal())),
)


def run() -> Iterator[Row]:
    """Yields, for each stack, the field predicted from its masks, and the field that gradients find in a random
    stack."""
    for name, patterns in STACKS:
        expected, observed = predicted(patterns), measured(patterns)
        query = query_of(patterns)
        inputs = observed[query].nonzero()[:, 0]
        yield {
            "stack": name,
            "layers": len(patterns),
            "patterns": ", ".join(str(pattern) for pattern in patterns),
            "span, predicted": span(patterns),
            "span, by gradient": int(inputs.max() - inputs.min()) + 1,
            "tokens, predicted": int(expected[query].sum()),
            "tokens, by gradient": len(inputs),
            "differing pairs": int((expected != observed).sum()),
        }


def query_of(patterns: Sequence[Pattern]) -> int:
    """Returns the token whose field is measured: the last one if no layer sees the future, else one in the middle."""
    return COUNT - 1 if all(pattern.is_causal for pattern in patterns) else COUNT // 2


def predicted(patterns: Sequence[Pattern]) -> Tensor:
    """Returns bool [N, N]: whether token j reaches output i through some path of allowed pairs and residuals."""
    field = torch.eye(COUNT)
    for pattern in patterns:
        step = visible(pattern, TOKENS, TOKENS)[0, 0].float() + torch.eye(COUNT)
        field = ((step @ field) > 0).float()
    return field > 0


def measured(patterns: Sequence[Pattern]) -> Tensor:
    """Returns bool [N, N]: whether d out_i / d x_j is not 0, in a stack x + attention(x) of random weights, in
    float64."""
    noise = torch.Generator().manual_seed(SEED)
    width = HEADS * WIDTH
    source = torch.randn(COUNT, width, generator=noise, dtype=torch.float64).requires_grad_()
    x = source
    for pattern in patterns:
        weights = torch.randn(3, width, width, generator=noise, dtype=torch.float64) * width**-0.5
        q, k, v = ((x @ w).view(1, COUNT, HEADS, WIDTH).transpose(1, 2) for w in weights)
        out = attend(q, k, v, pattern, q_tokens=TOKENS, k_tokens=TOKENS, backend="dense")
        x = x + out[0].transpose(0, 1).reshape(COUNT, width)
    y = (x * torch.randn(COUNT, width, generator=noise, dtype=torch.float64)).sum(-1)
    rows = [torch.autograd.grad(y[i], source, retain_graph=True)[0].abs().sum(-1) for i in range(COUNT)]
    return torch.stack(rows) > 0


def judge(rows: Rows) -> Report:
    """Returns the verdict: gradients find the predicted field of every token, and no more."""
    differing = sum(row["differing pairs"] for row in rows)
    return Report(
        rows=tuple(rows),
        claims={
            "predicted": differing == 0,
            "span": all(row["span, predicted"] in (None, row["span, by gradient"]) for row in rows),
        },
        values={"differing": differing, "pairs": len(rows) * COUNT**2, "dilated": rows[2], "sparse": rows[3]},
    )


def draw(figure: Figure, report: Report) -> None:
    """Draws, for each stack, which inputs reach one output, layer by layer from the output on, and by gradient."""
    figure.set_size_inches(11.5, 6.2)
    for axes, (name, patterns) in zip(figure.subplots(4, 2).flatten(), STACKS, strict=True):
        query = query_of(patterns)
        fields = [predicted(patterns[layer:])[query] for layer in range(len(patterns), -1, -1)]
        observed = measured(patterns)[query]
        axes.imshow(
            torch.stack([*fields, observed]).numpy(), cmap="Blues", aspect="auto", interpolation="nearest"
        )
        axes.set_yticks([0, len(fields)], ["output", "gradient"])
        label_axes(axes, f"{name}: {int(observed.sum())} tokens")
        bare(axes)
