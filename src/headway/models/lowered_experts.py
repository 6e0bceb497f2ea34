"""A mixture of experts as operations of the native kernels.

Legend: R rows, M width, E experts.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from headway.models.lowered_layers import LayerOperations
from headway.models.operations import NotLowered, address
from headway.native import interface as c
from headway.nn.experts import MixtureOfExperts
from headway.nn.feedforward import FeedForward
from headway.nn.linear import Linear


def experts_of(
    lowered: LayerOperations, x: Tensor, layer: MixtureOfExperts, norm: nn.Module | None
) -> tuple[list[c.OpStruct], Tensor]:
    """The operations of a mixture of norm(x), rows x, and the rows that they leave.

    The router is read in float32. Raises NotLowered where the kernels do not compute what the layer does."""
    if layer.ranks is not None:
        raise NotLowered("the kernels know no experts that processes share")
    how, like = layer.gate.how, layer.experts[0]
    assert isinstance(like, FeedForward)
    if like.act not in c.ACTIVATIONS:
        raise NotLowered(f"the kernels do not know the activation {like.act!r}")
    y, ops, shared, open_ = lowered.room("mixture", x.shape[1]), [], None, None
    if layer.shared_expert is not None:
        shared = lowered.room("shared", x.shape[1])
        into, rows, act = lowered.feed_forward(x, layer.shared_expert, norm)
        ops += [*into, *lowered.products(rows, [(layer.shared_expert.down_proj, shared)], **act)]
    if layer.shared_expert_gate is not None:
        open_ = lowered.room("shared gate", 1)
        weight = layer.shared_expert_gate.weight.detach()
        ops.append(lowered.product(x, [lowered.matrix(weight, open_)], norm=norm))
    gates, ups, downs = (
        _matrices(lowered, [getattr(expert, name) for expert in layer.experts])
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    router = layer.gate
    struct = c.ExpertsStruct(
        0, how.count, how.top, how.groups, how.top_groups, int(how.score == "sigmoid"), int(how.normalized),
        how.scale, how.sum_eps, lowered.reads(x, norm),
        *(address(lowered.floats(t)) for t in (router.weight, router.bias, router.e_score_correction_bias)),
        like.up_proj.out_features, c.ACTIVATIONS[like.act], gates, ups, downs,
        address(shared), address(open_), y.data_ptr(),
    )  # fmt: skip
    lowered.counted.append(struct)
    return [*ops, lowered.op(c.EXPERTS, struct)], y


def _matrices(lowered: LayerOperations, layers: Sequence[Linear | None]) -> Any:
    """The weights of one product of each expert, or None where they have none."""
    structs = []
    for layer in layers:
        if layer is None:
            return None
        if layer.beside:
            raise NotLowered("the kernels know no adapters of experts")
        nowhere = lowered.room("experts write where they are told", layer.out_features)
        structs.append(lowered.matrix(lowered.weight(layer), nowhere, layer.bias))
    matrices = (c.MatrixStruct * len(structs))(*structs)
    lowered.kept.append(matrices)
    return matrices
