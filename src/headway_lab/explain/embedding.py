"""Why embeddings are multiplied by the square root of the width. (Vaswani et al. 2017, section 3.4.)"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from headway.models import EncoderDecoder, ModelSpec, build
from headway.positions import Sinusoidal
from headway_lab.explain.figures import curves, panels
from headway_lab.explain.report import Report, Row, Rows

WIDTHS = (32, 64, 128, 256, 512, 1024)
VOCAB, POSITIONS, STATES, SEED = 2000, 512, 256, 0
CLOSE = 0.1


@torch.no_grad()
def run() -> Iterator[Row]:
    """Yields, for fresh encoder-decoders of growing width, the lengths of embeddings and positions, and the variance of
    logits."""
    for width in WIDTHS:
        sizes: dict[str, Any] = {"vocab": VOCAB, "width": width, "layers": 1, "heads": 4, "hidden": width}
        spec = ModelSpec.of_pair("transformer", **sizes, tied=True, init_std=width**-0.5)
        model = build(spec, seed=SEED)
        assert isinstance(model, EncoderDecoder)
        matrix = model.decoder.embedding
        token = float(matrix.norm(dim=-1).mean())
        position = float(Sinusoidal().embedding(torch.arange(POSITIONS), width).norm(dim=-1).mean())
        noise = torch.Generator().manual_seed(SEED)
        states = torch.nn.functional.layer_norm(torch.randn(STATES, width, generator=noise), (width,))
        scale = spec.embedding_scale
        yield {
            "M": width,
            "sqrt(M)": scale,
            "|e|": token,
            "|sqrt(M) e|": scale * token,
            "|PE|": position,
            "|e| / |PE|": token / position,
            "|sqrt(M) e| / |PE|": scale * token / position,
            "share of the token": _share(token, position),
            "share, scaled": _share(scale * token, position),
            "Var(logit)": float(model.logits(states).var()),
            "Var(logit), entries of variance 1": float((states @ (scale * matrix).T).var()),
            "matrices": len({p.data_ptr() for p in model.parameters() if p.shape == matrix.shape}),
        }


def _share(token: float, place: float) -> float:
    return token**2 / (token**2 + place**2)


def judge(rows: Rows) -> Report:
    """Returns the verdict: with the scale, token and position are of similar length at every width, without it tokens
    drown; the entries of the matrix must stay small for its other use, the output layer."""
    even = max(abs(row["|sqrt(M) e| / |PE|"] / math.sqrt(2) - 1) for row in rows)
    falls = max(abs(row["|e| / |PE|"] / math.sqrt(2 / row["M"]) - 1) for row in rows)
    calm = max(abs(row["Var(logit)"] - 1) for row in rows)
    wild = max(abs(row["Var(logit), entries of variance 1"] / row["M"] - 1) for row in rows)
    return Report(
        rows=tuple(rows),
        claims={
            "scaled": even < CLOSE,
            "unscaled": falls < CLOSE,
            "one": all(row["matrices"] == 1 for row in rows),
            "calm": calm < CLOSE,
            "wild": wild < CLOSE,
        },
        values={"at": next((row for row in rows if row["M"] == 512), rows[-1]), "even": even},
    )


LENGTHS = {"|PE|": "s-- grey", "|e|": "o- red", "|sqrt(M) e|": "o- green"}
SHARES = {"share of the token": "o- red", "share, scaled": "o- green"}
draw = panels(
    curves("M", LENGTHS, "lengths of what is added", log="xy"),
    curves("M", SHARES, "share of the token in the sum", log="x", ylim=(0, 1)),
)
