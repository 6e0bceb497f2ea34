"""The rows of `headway bench train`: a training step of a whole model, compared with transformers; for encoders also a
forward pass.

A step is forward, loss, backward, clipping and AdamW over the same rows of random ids, from the same weights; its
learning rate is so low that every step is the same step. A forward pass ends with the loss. The limit of both is the
register peak.

Legend: B rows, T tokens of a row.
"""

import importlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headway.checkpoints import save_folder
from headway.data import Batch
from headway.models import ModelSpec, build, catalog
from headway.models.cost import head_flops, parameter_count, prefill_flops
from headway.nn import IGNORE_INDEX
from headway.patterns import Window
from headway.train.microbatch_pool import DTYPES, MicrobatchPool, choose_workers
from headway.train.optimizer import Optimizer, parameter_groups
from headway.train.rows_config import TextConfig
from headway.train.tasks.base import Objective
from headway.train.trainer import Trainer
from headway_lab.bench.attention import Say
from headway_lab.bench.inputs import OURS, Problem, Side, UnsupportedCase
from headway_lab.bench.measure import Effort, measured
from headway_lab.bench.models import DECODERS, transformers
from headway_lab.bench.rows import Row
from headway_lab.bench.subprocess_runner import SubprocessRunner, peak_of

EAGER, COMPILED, ALL_BF16 = "transformers", "compiled", "transformers all bf16"
WITHIN = f"{OURS} attention in transformers"
PEERS = {"float32": (EAGER, COMPILED, WITHIN), "bfloat16": (EAGER, COMPILED, ALL_BF16, WITHIN)}
NAMES: Mapping[str, Literal["fp32", "bf16"]] = {"float32": "fp32", "bfloat16": "bf16"}
APART = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest relative difference of the loss and of the gradient norm, which are sums over the whole model."""

LR = 1e-9
FILLED = 0.15
"""The share of tokens that are targets of an encoder."""
FIRST_ID = 8
"""The lowest id that is drawn: lower ones may be special tokens."""
USUAL = Effort(repeats=7, least=3, seconds=90.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of a model for a training step, or for a forward pass only."""

    name: str
    spec: ModelSpec
    rows: int
    tokens: int
    trains: bool = True

    @property
    def targets(self) -> int:
        """Number of targets in each row."""
        return self.tokens - 1 if self.spec.causal else int(FILLED * self.tokens)

    @property
    def unread(self) -> int:
        """Number of tokens in each row that are not targets."""
        return self.tokens - self.targets

    @property
    def flops(self) -> float:
        """FLOPs of the products: a step takes three times those of the forward pass; the output head counts only for
        targets."""
        row_flops = prefill_flops(self.spec, self.tokens, self.tokens)
        return (3.0 if self.trains else 1.0) * self.rows * (row_flops - self.unread * head_flops(self.spec))

    def batch(self) -> tuple[Tensor, Tensor]:
        """Returns ids and targets [B, T]: the next ids for a decoder, a random choice of the ids for an encoder."""
        noise = torch.Generator().manual_seed(0)
        ids = torch.randint(FIRST_ID, self.spec.vocab, (self.rows, self.tokens), generator=noise)
        targets = torch.full_like(ids, IGNORE_INDEX)
        if self.spec.causal:
            targets[:, :-1] = ids[:, 1:]
        else:
            target_positions = torch.rand(ids.shape, generator=noise).topk(self.targets).indices
            targets.scatter_(1, target_positions, ids.gather(1, target_positions))
        return ids, targets


def _undropped(spec: ModelSpec) -> ModelSpec:
    return replace(spec, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)


BERT = _undropped(catalog.spec("bert-base-uncased"))
LONGFORMER = _undropped(
    ModelSpec.of("longformer", vocab=50265, width=768, layers=12, heads=12, kv_heads=12, hidden=3072)
)
MISTRAL = ModelSpec.of(
    "mistral",
    vocab=512,
    width=1024,
    layers=2,
    heads=16,
    kv_heads=4,
    hidden=2816,
    patterns=Window.last(512),
    trained_context=8192,
)
CASES = {
    case.name: case
    for case in (
        Case(name="tiny-2x64", spec=DECODERS["tiny"], rows=2, tokens=64),
        Case(name="32m-8x512", spec=DECODERS["32m"], rows=8, tokens=512),
        Case(name="32m-1x4096", spec=DECODERS["32m"], rows=1, tokens=4096),
        Case(name="mistral-1x8192", spec=MISTRAL, rows=1, tokens=8192),
        Case(name="bert-base-8x512", spec=BERT, rows=8, tokens=512),
        Case(name="bert-base-8x512-forward", spec=BERT, rows=8, tokens=512, trains=False),
        Case(name="longformer-base-1x4096", spec=LONGFORMER, rows=1, tokens=4096),
        Case(name="longformer-base-1x4096-forward", spec=LONGFORMER, rows=1, tokens=4096, trains=False),
    )
}


def train(
    cases: Sequence[str],
    dtypes: Sequence[str],
    peers: Sequence[str],
    *,
    memory: bool = True,
    effort: Effort = USUAL,
    say: Say,
) -> Iterator[Row]:
    """Yields a row for each of these cases in each of these dtypes, compared with those of the peers that the dtype
    has."""
    for name in cases:
        with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
            save_folder(Path(folder) / "hf", build(CASES[name].spec, seed=0))
            for dtype in dtypes:
                say(f"train {name} {dtype}")
                problem = partial(_problem, CASES[name], dtype, peers, Path(folder) / "hf", memory)
                yield measured("train", name, dtype, problem, effort)


def _problem(case: Case, dtype: str, peers: Sequence[str], folder: Path, memory: bool) -> Problem:
    problem = Problem(
        {OURS: step(case, dtype, OURS, folder)},
        case.flops,
        tolerance=APART[dtype],
        tokens=case.rows * case.tokens,
        peak=(lambda side: _peak(case, dtype, side, folder)) if memory else None,
    )
    chosen = [peer for peer in PEERS[dtype] if peer in peers]
    problem.add_peers({peer: partial(step, case, dtype, peer, folder) for peer in chosen})
    return problem


def _peak(case: Case, dtype: str, side: str, folder: Path) -> int:
    """Returns the peak bytes of training, including the weights, measured in a process of its own."""
    with SubprocessRunner() as runner:
        return runner.call(peak_of, step, case, dtype, side, folder)


def step(case: Case, dtype: str, side: str, folder: Path) -> Side:
    """Returns a step of headway or of a peer, as a call that returns the loss and the gradient norm, [1, 1] each; for a
    forward pass, the loss only."""
    if side == OURS:
        return ours(case, dtype) if case.trains else our_forward(case, dtype)
    return of_transformers(case, dtype, side, folder)


class Same(Objective[Any]):
    """An objective with the same micro-batches in every step."""

    def __init__(self, case: Case, rows: int) -> None:
        ids, targets = case.batch()
        parts = zip(ids.split(rows), targets.split(rows), strict=True)
        self.parts = [Batch({"ids": ids_part}, target) for ids_part, target in parts]

    def batches(self, step: int) -> Sequence[Batch]:
        return self.parts


def ours(case: Case, dtype: str) -> Side:
    """Returns a step of `headway train`, with its defaults."""
    config = TextConfig(
        data="none",
        context=case.tokens,
        batch_tokens=case.rows * case.tokens,
        dtype=NAMES[dtype],
        lr=LR,
    )
    model, torch_dtype = build(case.spec, seed=0), DTYPES[NAMES[dtype]]
    workers = int(choose_workers(config, case.spec, parameter_count(case.spec) * torch_dtype.itemsize).what)
    pool = MicrobatchPool(workers)
    optimizer = Optimizer.of(parameter_groups(model), config, pool)
    objective = Same(case, -(-case.rows // workers))
    trainer = Trainer(objective, model, optimizer, clip=config.clip, dtype=torch_dtype, pool=pool)

    def side() -> Sequence[Tensor]:
        with pool:
            stats = trainer.step()
        assert stats.loss is not None
        return torch.tensor([[stats.loss]]), torch.tensor([[stats.grad_norm]])

    return side


def our_forward(case: Case, dtype: str) -> Side:
    """Returns a forward pass of a model in `dtype`, as `headway.load` returns it, with the mean loss of its targets."""
    model = build(case.spec, dtype=DTYPES[NAMES[dtype]], seed=0).eval()
    ids, targets = case.batch()

    @torch.no_grad()
    def side() -> Sequence[Tensor]:
        output = model(ids, targets=targets)
        return (output.total.float().view(1, 1) / output.tokens,)

    return side


def of_transformers(case: Case, dtype: str, side: str, folder: Path) -> Side:
    """Returns the step of a plain torch training loop around transformers' model: fp32 weights, in bf16 under autocast
    ("transformers", as Trainer does with bf16=True), the same compiled or with headway's attention, or all weights in
    bf16, without fp32 weights that accumulate the updates.

    Raises UnsupportedCase if transformers is not installed, or if headway's attention cannot replace the model's own.
    """
    hf = transformers()
    if side == WITHIN:
        if case.spec.family == "longformer":
            raise UnsupportedCase("transformers' Longformer has its own attention")
        importlib.import_module("headway.integrations.transformers")
    hf.utils.logging.disable_progress_bar()
    auto_class = hf.AutoModelForCausalLM if case.spec.causal else hf.AutoModelForMaskedLM
    weights = torch.bfloat16 if side == ALL_BF16 else torch.float32
    attention = "headway" if side == WITHIN else None
    model = auto_class.from_pretrained(folder, dtype=weights, attn_implementation=attention).train(
        case.trains
    )
    run = torch.compile(model) if side == COMPILED else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    ids, targets = case.batch()
    labels = ids if case.spec.causal else targets
    autocast = dtype == "bfloat16" and weights == torch.float32

    def step() -> Sequence[Tensor]:
        with (
            torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext(),
            torch.set_grad_enabled(case.trains),
        ):
            loss = run(input_ids=ids, labels=labels).loss
        if not case.trains:
            return (loss.float().view(1, 1),)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().float().view(1, 1), norm.float().view(1, 1)

    if side == COMPILED:
        try:
            step()
        except Exception as error:  # a compiler may raise anything
            raise UnsupportedCase(f"it does not compile here: {str(error).splitlines()[0]}") from error
    return step
