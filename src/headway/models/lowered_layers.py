"""Lowers linear layers with their adapters, feed-forwards, and mixtures of experts to operations of the native kernels.

Legend: R rows, I inputs, O outputs.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headway.models.operations import NotLowered, Operations, address
from headway.native import interface as c
from headway.native.linear import Matrix
from headway.nn.experts import MixtureOfExperts
from headway.nn.feedforward import FeedForward
from headway.nn.linear import Linear
from headway.nn.lora import LowRank


class LayerOperations(Operations):
    """Lowers layers to operations.

    Attributes:
        has_magnitudes: whether adapters scale outputs (DoRA), so that they cannot be applied to some rows only.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.has_magnitudes = False
        self._gates: dict[str, list[Tensor]] = {}

    def add_adapters(self, rows: Mapping[str, Tensor]) -> None:
        """Sets the rows that each adapter is applied to (`headway.nn.lora.only_rows`); all rows if it is not in
        `rows`."""
        for name, gates in self._gates.items():
            for gate in gates:
                if name in rows:
                    gate[: len(rows[name])] = rows[name]
                else:
                    gate.fill_(1)

    def feed_forward(
        self, x: Tensor, mlp: FeedForward, norm: nn.Module | None
    ) -> tuple[list[c.OpStruct], Tensor, dict[str, Any]]:
        """Returns the operations up to the hidden layer, the buffer of hidden units, and options of the down
        projection (`act`, `gate`)."""
        if mlp.act not in c.ACTIVATIONS:
            raise NotLowered(f"the kernels do not support the activation {mlp.act!r}")
        if (mlp.scale, mlp.gate_scale) != (1.0, 1.0):
            raise NotLowered("the kernels do not support mlp_scale and mlp_gate_scale")
        if mlp.sparsity:
            raise NotLowered("the kernels do not support mlp_sparsity")
        layers = [mlp.up_proj] if mlp.gate_proj is None else [mlp.gate_proj, mlp.up_proj]
        wide = [(layer, self.room(f"hidden {i}", layer.out_features)) for i, layer in enumerate(layers)]
        rows, gate = wide[0][1], wide[1][1] if len(wide) > 1 else None
        act = {"act": c.ACTIVATIONS[mlp.act], "gate": gate}
        return self.products(x, wide, norm=norm), rows, act

    def products(
        self,
        x: Tensor,
        layers: Sequence[tuple[Linear, Tensor]],
        add: bool = False,
        *,
        norm: nn.Module | None = None,
        act: int = 0,
        gate: Tensor | None = None,
        scale: float = 1.0,
    ) -> list[c.OpStruct]:
        """Returns the operations that compute x W^T (+ b) for several layers with one input x, and write the results
        to their outputs or add them to these; multiplied by `scale` for an output layer, which has no adapters.

        An adapter takes two operations more: x A^T is one more matrix beside W, and B times that, times 1 or 0 per row
        (`add_adapters`), is added to the output. DoRA magnitudes, which multiply an output by g, are folded into the
        rows of W and B:

            x W^T + sum of g (x W^T + s (x A^T) B^T) - x W^T  =  (1 + sum of g - 1) x W^T + sum of g s (x A^T) B^T
        """
        structs: list[c.MatrixStruct] = []
        behind: list[c.OpStruct] = []
        gains = {
            id(part): part.gain(layer.kept).float() for layer, _ in layers for part in _magnitudes(layer)
        }
        self.has_magnitudes |= bool(gains)
        for layer, out in layers:
            matrix = self.weight(layer)
            changes = [gains[id(part)] - 1 for part in _magnitudes(layer)]
            factor = 1 + sum(changes[1:], start=changes[0]) if changes else None
            if scale != 1.0:
                factor = scale * (torch.ones(layer.out_features) if factor is None else factor)
            structs.append(self.matrix(matrix, out, layer.bias, factor, add))
        for layer, out in layers:
            for name, part in layer.beside.items():
                low = self.room(f"low {len(structs)}", len(part.lora_A))
                structs.append(self.matrix(part.lora_A.detach().contiguous(), low))
                b = _scaled(part, gains.get(id(part)))
                rows = self._gate(name, len(part.lora_A))
                behind.append(self.product(low, [self.matrix(b, out, add=True)], gate=rows))
        return [self.product(x, structs, norm=norm, act=act, gate=gate), *behind]

    def mixture(
        self, x: Tensor, layer: MixtureOfExperts, norm: nn.Module | None
    ) -> tuple[list[c.OpStruct], Tensor]:
        """Returns the operations of a mixture of experts on norm(x), for rows x, and the buffer of rows that they
        write.

        The router's weights are read in float32. Raises NotLowered if the kernels do not support the layer.
        """
        if layer.ranks is not None:
            raise NotLowered("the kernels do not support expert parallel")
        how, first_expert = layer.gate.how, layer.experts[0]
        assert isinstance(first_expert, FeedForward)
        if first_expert.act not in c.ACTIVATIONS:
            raise NotLowered(f"the kernels do not support the activation {first_expert.act!r}")
        y, ops, shared, open_ = self.room("mixture", x.shape[1]), [], None, None
        if layer.shared_expert is not None:
            shared = self.room("shared", x.shape[1])
            into, rows, act = self.feed_forward(x, layer.shared_expert, norm)
            ops += [*into, *self.products(rows, [(layer.shared_expert.down_proj, shared)], **act)]
        if layer.shared_expert_gate is not None:
            open_ = self.room("shared gate", 1)
            weight = layer.shared_expert_gate.weight.detach()
            ops.append(self.product(x, [self.matrix(weight, open_)], norm=norm))
        gates, ups, downs = (
            self._matrices([getattr(expert, name) for expert in layer.experts])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        router = layer.gate
        struct = c.ExpertsStruct(
            0, how.count, how.top, how.groups, how.top_groups, int(how.score == "sigmoid"), int(how.normalized),
            how.scale, how.sum_eps, self.reads(x, norm),
            *(address(self.floats(t)) for t in (router.weight, router.bias, router.e_score_correction_bias)),
            first_expert.up_proj.out_features, c.ACTIVATIONS[first_expert.act], gates, ups, downs,
            address(shared), address(open_), y.data_ptr(),
        )  # fmt: skip
        return [*ops, self.op(c.EXPERTS, struct)], y

    def _matrices(self, layers: Sequence[Linear | None]) -> Any:
        """Returns the matrices of one projection of every expert, or None if experts do not have it."""
        structs = []
        for layer in layers:
            if layer is None:
                return None
            if layer.beside:
                raise NotLowered("the kernels do not support adapters of experts")
            # a matrix needs an output, but the kernel writes each expert's rows elsewhere
            unused = self.room("experts write where they are told", layer.out_features)
            structs.append(self.matrix(self.weight(layer), unused, layer.bias))
        matrices = (c.MatrixStruct * len(structs))(*structs)
        self.kept.append(matrices)
        return matrices

    def weight(self, layer: Linear) -> Matrix:
        """Returns the weights of a layer in the kernels' form. Raises NotLowered if they have none."""
        if layer.share is not None:
            raise NotLowered("the kernels do not support tensor parallel")
        matrix = layer.kept.native()
        if isinstance(matrix, str):
            raise NotLowered(matrix)
        return matrix

    def _gate(self, name: str, rank: int) -> Tensor:
        """Returns the buffer with 1 or 0 for each row: whether an adapter is applied to it."""
        gate, gates = self.room(f"rows of {name}", rank), self._gates.setdefault(name, [])
        if not any(known is gate for known in gates):
            gates.append(gate.fill_(1))
        return gate


def _magnitudes(layer: Linear) -> list[LowRank]:
    return [part for part in layer.beside.values() if part.lora.magnitude]


def _scaled(part: LowRank, gain: Tensor | None) -> Tensor:
    """Returns s B, or g s B, in float32, or in B's dtype if there is no g and s is a power of two, which is exact."""
    s = part.lora.scale
    b = s * part.lora_B.detach().float()
    if gain is not None:
        return gain[:, None] * b
    # frexp gives the mantissa, which is 0.5 for powers of two: 2.0 is 0.5 * 2^2, 1.5 is 0.75 * 2^1
    return b.to(part.lora_B.dtype) if math.frexp(s)[0] in (0.5, -0.5) else b
