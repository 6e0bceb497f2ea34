"""A small model under any position scheme, and one of each scheme."""

import torch
from torch import Tensor, nn

from headway.attention import attend
from headway.nn import PositionEmbedding, RotaryEmbedding
from headway.patterns import Full, Pattern
from headway.positions import (
    Learned,
    LinearBias,
    NoPositions,
    PerLayer,
    PositionScheme,
    Relative,
    Rotary,
    Sinusoidal,
    SpecialOrthogonal,
    T5Bias,
)
from headway.tokens import Tokens

FULL = Full()
HEADS, HEAD_DIM, WIDTH, LENGTH = 4, 8, 32, 12
ROTARY, NONE = Rotary(pairing="adjacent"), NoPositions()
EVERY = {
    "none": NONE,
    "sinusoidal": Sinusoidal(),
    "learned": Learned(2048),
    "rotary": ROTARY,
    "rotary in the first layer": PerLayer((ROTARY, NONE)),
    "rotary of values, too": Rotary(pairing="adjacent", values=True),
    "trained frequencies": Rotary(pairing="adjacent", trainable=True),
    "SO(d)": SpecialOrthogonal(ROTARY),
    "relative": Relative(5),
    "relative, fixed": Relative(5, sinusoidal=True),
    "T5": T5Bias(8, 16),
    "ALiBi": LinearBias(),
}


class Small(nn.Module):
    """Attention layers under one scheme, using only the protocol of schemes: no code depends on a kind of scheme."""

    def __init__(self, scheme: PositionScheme, layers: int = 2, pattern: Pattern = FULL) -> None:
        super().__init__()
        self.pattern, self.schemes = pattern, scheme.expand(layers)
        self.marks = PositionEmbedding(scheme, WIDTH)
        rotary = {s: RotaryEmbedding(s, HEAD_DIM) for s in self.schemes}
        self.rotary = nn.ModuleList(rotary[s] for s in self.schemes)
        all_steps = [s.scores(HEADS, HEAD_DIM, pattern == FULL) for s in self.schemes]
        shared = dict(zip(self.schemes, all_steps, strict=True))
        self.steps = [
            shared[s] if s.shared else steps for s, steps in zip(self.schemes, all_steps, strict=True)
        ]
        tables = [t for steps in self.steps for step in steps for t in step.parameters if t.requires_grad]
        self.tables = nn.ParameterList(tables)
        self.project = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        x = self.marks(x, tokens)
        for project, out, rotary, steps in zip(self.project, self.out, self.rotary, self.steps, strict=True):
            q, k, v = (y.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for y in project(x).chunk(3, -1))
            if (rotation := rotary(tokens, x.dtype)) is not None:
                q, k, v = (
                    rotation.apply(q),
                    rotation.apply(k),
                    rotation.apply(v) if rotation.rotates_values else v,
                )
            y = attend(q, k, v, self.pattern, q_tokens=tokens, k_tokens=tokens, score=steps, backend="dense")
            x = x + out(y.transpose(1, 2).flatten(2))
        return x


def small(scheme: PositionScheme, **options: object) -> Small:
    torch.manual_seed(0)
    model = Small(scheme, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.double()


def inputs() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def shifted(shift: int) -> Tokens:
    index = torch.arange(LENGTH)[None]
    return Tokens(index, position=index + shift)
