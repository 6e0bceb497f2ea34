"""The bytes that `headway plan` states are those that processes send in a step, counted at torch's collectives."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from headway.data import Batch
from headway.models import ModelSpec, build
from headway.models.cost.processes import process_shares
from headway.nn.block import Checkpointing
from headway.parallel import Mesh, Parallel, joined
from headway.patterns import Causal, Window
from headway.tokens import Tokens
from headway.train.optimizer import Optimizer
from headway.train.sharing import divide
from headway.train.trainer import Trainer
from tests.train.objectives import Given
from tests.train.processes import together

CONTEXT = 24


class Sent(TorchDispatchMode):
    """Counts the bytes that a ring sends to gather, scatter or sum tensors or to send them to one process, by axis."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__()
        groups = {"fsdp": ("fsdp",), "tp": ("tp",), "dp": ("dp", "cp")}
        self.axes = {parallel.group(*axes): name for name, axes in groups.items()}
        self.bytes = Counter[tuple[str, str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        match func.name():
            case "c10d::_allgather_base_":
                self._add("gathered", 1, args[:1], args[2])
            case "c10d::_reduce_scatter_base_":
                self._add("cut", 1, args[1:2], args[2])
            case "c10d::allreduce_":
                self._add("summed", 2, args[0], args[1])
            case "c10d::send":
                nbytes = sum(t.nbytes for t in args[0])
                self.bytes["sent", self.axes[dist.ProcessGroup.unbox(args[1])]] += nbytes
        return func(*args, **(kwargs or {}))

    def _add(self, kind: str, times: int, tensors: Sequence[torch.Tensor], group: Any) -> None:
        ring = dist.ProcessGroup.unbox(group)
        nbytes = sum(t.nbytes for t in tensors)
        self.bytes[kind, self.axes[ring]] += times * nbytes * (ring.size() - 1) // ring.size()


HOW: dict[str, Any] = {
    "width": 16,
    "heads": 4,
    "hidden": 24,
    "patterns": [Window.last(9), Causal(), Causal()],
}
DECODER = ModelSpec.of_depth(3, 32, context=CONTEXT, kv_heads=2, head_dim=4, **HOW)
PAIR = ModelSpec.of_pair(
    "transformer", vocab=32, width=16, layers=2, heads=4, hidden=24,
    dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
)  # fmt: skip
CASES: dict[str, tuple[ModelSpec, torch.dtype, Checkpointing]] = {
    "decoder": (DECODER, torch.float32, "none"),
    "in bf16": (DECODER, torch.bfloat16, "none"),
    "output layer of its own": (replace(DECODER, tied=not DECODER.tied), torch.float32, "none"),
    "blocks again": (DECODER, torch.float32, "block"),
    "encoder and decoder": (PAIR, torch.float32, "none"),
}


def sent_in_a_step(
    spec: ModelSpec, dtype: torch.dtype, checkpointing: Checkpointing, parallel: Parallel
) -> Counter[tuple[str, str]]:
    """Returns the bytes that this process sends in a step in which each process has one row."""
    net: Any = build(spec, seed=0)
    net.gradient_checkpointing = checkpointing
    divide(SimpleNamespace(model=net), parallel, dtype)  # type: ignore[arg-type]
    ids, tokens = torch.zeros(1, CONTEXT, dtype=torch.int64), Tokens.range(CONTEXT)
    inputs = {"ids": ids, "tokens": tokens} | ({} if spec.encoder is None else {"source": ids})
    optimizer = Optimizer.single(net, torch.optim.AdamW(net.parameters(), 0.1, fused=True))
    batches = [Batch(inputs, ids)] * parallel.mesh.batches
    trainer = Trainer(Given(batches), net, optimizer, clip=0.5, parallel=parallel)
    with Sent(parallel) as sent:
        trainer.step()
    return sent.bytes


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(fsdp=2),
        *(
            pytest.param(m, marks=pytest.mark.slow)
            for m in (Mesh(fsdp=4), Mesh(dp=2, fsdp=2), Mesh(fsdp=2, tp=2))
        ),
    ],
    ids=str,
)
def test_row_45_bytes_of_a_step_are_those_that_are_said(mesh: Mesh, tmp_path: Path) -> None:
    """Exactly, for weights, gradients and sums, if the shards of tensors need no padding."""

    def rank(number: int) -> None:
        with joined(str(mesh)) as parallel:
            for name, (spec, dtype, checkpointing) in CASES.items():
                sent = sent_in_a_step(spec, dtype, checkpointing, parallel)
                options: Any = {"gradient_checkpointing": checkpointing, "source": spec.encoder and CONTEXT}
                share = process_shares(spec, mesh, CONTEXT, mesh.batches, dtype, **options)[number]
                assert sent["gathered", "fsdp"] == share.weights_sent, name
                assert sent["cut", "fsdp"] + sent["summed", "dp"] == share.gradients_sent, name
                assert sent["summed", "tp"] + sent["sent", "tp"] == share.sums_sent, name

    together(mesh.ranks, rank, tmp_path)
