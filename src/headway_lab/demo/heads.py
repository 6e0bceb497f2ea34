"""Where the heads of a trained model look: heads are to attention what channels are to a convolution.

Legend: H query heads, T tokens.
"""

from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from headway.report import table
from headway_lab.draw import GREY, saved_figure

LABELLED = 24  # largest number of tokens whose labels are legible


def looks(maps: list[Tensor]) -> list[dict[str, float]]:
    """Returns where each head looks, by the attention weights [H, T, T] of every layer: the shares of its weight on the
    token itself, the previous and the first token, and the mean distance back. They are averaged over the queries from
    position 2 on, for which these three tokens differ."""
    rows = []
    for layer, weights in enumerate(maps):
        count = weights.shape[-1]
        distance = torch.arange(2, count)[:, None] - torch.arange(count)
        for head, later in enumerate(weights[:, 2:].double()):
            shares = {
                "itself": later[distance == 0],
                "previous": later[distance == 1],
                "first": later[:, 0],
                "back": (later * distance).sum(-1),
            }
            means = {name: float(values.mean()) for name, values in shares.items()}
            rows.append({"layer": layer, "head": head, **means})
    return rows


def striking(heads: list[dict[str, float]]) -> str:
    """Returns a table with the most extreme head for each way of looking."""
    rows = []
    for description, name, form in (
        ("looks most at the token itself", "itself", "{:.0%} of its weight"),
        ("looks most at the token before", "previous", "{:.0%} of its weight"),
        ("looks most at the first token", "first", "{:.0%} of its weight"),
        ("looks furthest back", "back", "{:.1f} tokens on average"),
    ):
        head = max(heads, key=itemgetter(name))
        rows.append((description, f"layer {head['layer']}, head {head['head']}", form.format(head[name])))
    return table(("", "which", "how much"), rows)


def draw_heads(maps: list[Tensor], names: list[str], path: Path) -> None:
    """Draws a panel for every head of every layer: queries down, keys to the right, darker for more weight."""
    heads, count = maps[0].shape[0], maps[0].shape[-1]
    with saved_figure(path, 2.1 * heads + 1.0, 2.25 * len(maps) + 0.5) as figure:
        grid = figure.subplots(len(maps), heads, squeeze=False)
        for layer, weights in enumerate(maps):
            for head in range(heads):
                axes, root = grid[layer][head], weights[head].float().sqrt().numpy()
                axes.imshow(root, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
                axes.grid(visible=False)
                axes.set(xticks=[], yticks=[])
                axes.set_title(f"layer {layer}, head {head}", fontsize=8)
                axes.spines[:].set_color(GREY)
            if count <= LABELLED:
                first = grid[layer][0]
                first.set_yticks(range(count), names, parse_math=False)
                first.tick_params(axis="y", labelsize=5.5, length=0)
        figure.suptitle(
            "who looks at what: square root of the weight; queries down, keys to the right", fontsize=9
        )
