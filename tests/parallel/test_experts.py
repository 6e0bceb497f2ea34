"""A model whose experts are divided among ranks has the loss, gradients and generated text of one process."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.data import Batch
from headway.errors import ConfigError
from headway.generate import GenerationConfig, Sampling, generate
from headway.generate.ranks import led, reader_of
from headway.models import Decoder, ModelSpec, build, cost
from headway.models.cost.processes import process_shares
from headway.models.expert_parallel import shard_experts
from headway.nn import IGNORE_INDEX, Experts, Lora, MixtureOfExperts
from headway.nn.adapters import Adapter, attach
from headway.parallel import Exchange, ExpertParallel, Mesh, Parallel, joined
from headway.parallel.processes import ALONE
from headway.tokens import Tokens
from headway.train.optimizer import Optimizer
from headway.train.sharing import divide
from headway.train.trainer import Trainer
from tests.parallel.simulation import Counted, simulate
from tests.parallel.steps import SUM
from tests.saved import saved_tensors, storage_sizes
from tests.train.objectives import Given
from tests.train.processes import together

EXPERTS = Experts(count=8, top=2, hidden=12, shared=10, shared_gate=True, aux_loss_coef=0.3, z_loss_coef=0.1)


def layer_of() -> MixtureOfExperts:
    torch.manual_seed(0)
    return MixtureOfExperts(EXPERTS, 10, gated=True).double()


def rows_of(sizes: Sequence[int]) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(size, 10, generator=g, dtype=torch.float64) for size in sizes]


@pytest.mark.parametrize("sizes", [(7, 12), (0, 5), (1, 0, 9, 4)], ids=str)
@pytest.mark.parametrize("crowded", [False, True], ids=["", "all choose the experts of one rank"])
def test_rows_go_to_their_experts_and_back(sizes: Sequence[int], crowded: bool) -> None:
    """Outputs and every gradient; some ranks have no rows, or no rows for their experts."""
    whole, rows = layer_of(), rows_of(sizes)
    if crowded:
        with torch.no_grad():
            whole.gate.weight[2:] = 0
            whole.gate.weight[:2] = 9
        rows = [part.abs() for part in rows]
    x = [part.clone().requires_grad_() for part in rows]
    output = whole(torch.cat(x))
    names, parameters = zip(*whole.named_parameters(), strict=True)
    all_gradients = torch.autograd.grad(output.square().sum(), [*x, *parameters])
    expected = dict(zip(names, all_gradients[len(x) :], strict=True))

    def rank(exchange: Exchange) -> Any:
        local = copy.deepcopy(whole)
        local.divide(ExpertParallel(exchange))
        x_local = rows[exchange.rank].clone().requires_grad_()
        y = local(x_local)
        named = dict(local.named_parameters())
        dx, *grads = torch.autograd.grad(y.square().sum(), [x_local, *named.values()])
        return y.detach(), dx, dict(zip(named, grads, strict=True))

    results = simulate(len(sizes), rank)
    torch.testing.assert_close(torch.cat([y for y, _, _ in results]), output.detach(), **SUM)
    for (_, dx, _), want in zip(results, all_gradients, strict=False):
        torch.testing.assert_close(dx, want, **SUM)
    for name, want in expected.items():
        assert sum(name in grads for _, _, grads in results) == (
            1 if name.startswith("experts.") else len(sizes)
        )
        torch.testing.assert_close(sum(grads[name] for _, _, grads in results if name in grads), want, **SUM)


@torch.no_grad()
def test_of_the_same_rows_each_rank_sends_out_its_part() -> None:
    """Also with fewer rows than ranks; all ranks get the same bits."""
    whole, rows = layer_of(), rows_of([9])[0]
    for x in (rows, rows[:1], rows[:0]):

        def rank(exchange: Exchange, x: Tensor = x) -> Tensor:
            local = copy.deepcopy(whole)
            local.divide(ExpertParallel(exchange, same_rows=True))
            with torch.no_grad():
                y: Tensor = local(x)
            return y

        first, second = simulate(2, rank)
        assert torch.equal(first, second)
        torch.testing.assert_close(first, whole(x), **SUM)


def model_of(**fields: Any) -> Decoder:
    sizes: dict[str, Any] = {"vocab": 31, "width": 16, "layers": 4, "heads": 4, "hidden": 24, "init_std": 0.3}
    experts = [None, replace(EXPERTS, shared=0, shared_gate=False)]
    model = build(ModelSpec.of("qwen3_moe", **{**sizes, "experts": experts, **fields}), seed=0).double()
    assert isinstance(model, Decoder)
    return model


def batches(count: int) -> list[Batch]:
    """Returns batches of different lengths, some of whose targets are ignored."""
    g = torch.Generator().manual_seed(3)
    made = []
    for i in range(count):
        ids = torch.randint(31, (2, 12 + i), generator=g)
        targets = torch.randint(31, ids.shape, generator=g)
        targets[torch.rand(ids.shape, generator=g) < 0.3] = IGNORE_INDEX
        made.append(Batch({"ids": ids, "tokens": Tokens.from_lengths([12 + i, 9])}, targets))
    return made


def stepped(count: int, parallel: Parallel = ALONE, *, muon: bool = False, crowded: bool = False) -> Any:
    """Returns losses, norms, sums and weights after three clipped steps in float64, of `count` micro-batches each."""
    net: Any = model_of()
    net.gradient_checkpointing = "block" if crowded else "none"
    if crowded:
        with torch.no_grad():
            for layer in net.modules():
                if isinstance(layer, MixtureOfExperts):
                    layer.gate.weight[4:] *= 1e-3
                    layer.gate.weight[:4] *= 30
    divided = divide(SimpleNamespace(model=net), parallel, torch.float32)  # type: ignore[arg-type]
    for p in net.parameters():
        p.requires_grad_(p.dim() == 2 or not muon)
    trained = [p for p in net.parameters() if p.requires_grad]
    inner = torch.optim.Muon(trained, 0.05) if muon else torch.optim.SGD(trained, 0.1)
    optimizer = Optimizer.single(net, inner)
    trainer = Trainer(Given(batches(count)), net, optimizer, clip=0.5, seed=0, parallel=parallel)
    trainer.optimizer.own(parallel, net.shards)
    reports = [trainer.step() for _ in range(3)]
    whole: Any = net if divided is None else divided.whole()
    stats = [(report.loss, report.grad_norm, dict(report.extra)) for report in reports]
    return stats, dict(whole.state_dict())


SLOW = [
    pytest.param(mesh, 5, crowded, marks=pytest.mark.slow)
    for mesh in ("expert=4", "dp=2,expert=2")
    for crowded in (False, True)
]


@pytest.mark.parametrize(("mesh", "count", "crowded"), [("expert=2", 3, False), ("expert=2", 2, True), *SLOW])
def test_row_45_steps_of_shared_experts_are_those_of_one_process(
    mesh: str, count: int, crowded: bool, tmp_path: Path
) -> None:
    """Processes over gloo; with an odd number of micro-batches one process runs a dummy. Also greedy text, by `led`."""
    expected = stepped(count, crowded=crowded)
    prompts, config = [[1, 2, 3], [7]], GenerationConfig(max_new_tokens=8, sampling=Sampling(temperature=0.0))
    texts = [text.ids for text in generate(model_of().eval(), prompts, config)]

    def rank(number: int) -> None:
        with joined(mesh) as parallel:
            stats, weights = stepped(count, parallel, crowded=crowded)
            torch.testing.assert_close(stats, expected[0], **SUM)
            torch.testing.assert_close(weights, expected[1], **SUM)
            if mesh == "expert=2":
                local = model_of().eval()
                assert parallel.experts is not None
                shard_experts(local, replace(parallel.experts, same_rows=True))
                actual = led(local, lambda: [text.ids for text in generate(local, prompts, config)])
                assert actual == (None if number else texts)

    together(Mesh.read(mesh).ranks, rank, tmp_path)


def test_muon_steps_each_process_by_itself(tmp_path: Path) -> None:
    expected = stepped(2, muon=True)

    def rank(number: int) -> None:
        with joined("expert=2") as parallel:
            stats, weights = stepped(2, parallel, muon=True)
            torch.testing.assert_close(stats[0], expected[0][0], **SUM)
            # Muon orthogonalises in bfloat16
            torch.testing.assert_close(weights, expected[1], rtol=0.02, atol=0.02)

    together(2, rank, tmp_path)


def test_text_of_ranks_as_threads_and_what_they_keep() -> None:
    whole = model_of().eval()
    prompts, config = [[1, 2, 3], [7], [4] * 30], GenerationConfig(max_new_tokens=6)
    expected = [text.ids for text in generate(whole, prompts, config)]

    def rank(exchange: Exchange) -> Any:
        local = copy.deepcopy(whole)
        shards = shard_experts(local, ExpertParallel(exchange, same_rows=True))
        numbers = sum(p.numel() for p in local.parameters())

        def body() -> Any:
            with pytest.raises(ConfigError, match="exact"):
                reader_of(local, exact=True)
            return [text.ids for text in generate(local, prompts, config)]

        return numbers, led(local, body), {*local.state_dict()} | shards.elsewhere

    results = simulate(2, rank)
    assert [texts for _, texts, _ in results] == [expected, None]
    assert all(names == {*whole.state_dict()} for _, _, names in results)
    half = cost.parameters(whole.spec)["experts"] // 2
    assert [numbers for numbers, _, _ in results] == [cost.parameter_count(whole.spec) - half] * 2


@pytest.mark.parametrize("redo", ["none", "attention", "feed_forward", "block"])
def test_bytes_of_rows_are_those_of_the_plan(redo: Any) -> None:
    """If tokens choose experts evenly: here token i of every rank chooses the experts i % 4 and i % 4 + 4 of 8."""
    spec, ids = model_of().spec, torch.arange(8)[None]
    planned = process_shares(spec, Mesh(expert=2), 8, 2, torch.float64, gradient_checkpointing=redo)

    def rank(exchange: Exchange) -> int:
        local: Any = build(spec, seed=0).double()
        local.gradient_checkpointing = redo
        counted = Counted(exchange)
        shard_experts(local, ExpertParallel(counted))
        for layer in local.modules():
            if isinstance(layer, MixtureOfExperts):
                layer.gate.register_forward_hook(lambda gate, rows, routing: (even(len(rows[0])), routing[1]))
        local(ids, targets=ids).total.backward()
        return counted.sent[torch.float64]  # rows, not indices

    def even(rows: int) -> Tensor:
        return torch.stack([torch.arange(rows) % 4, torch.arange(rows) % 4 + 4], 1)

    assert simulate(2, rank) == [share.rows_sent for share in planned]


def test_a_rank_keeps_the_rows_of_its_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32; one process computes all experts in one pass and keeps less. Rows of zeros, which are added on some
    CPUs, are not predicted."""
    monkeypatch.setattr("headway.nn.products._slow_mkl", lambda: False)
    spec = model_of().spec
    ids = torch.randint(0, spec.vocab, (4, 64), generator=torch.Generator().manual_seed(0))

    def rank(exchange: Exchange) -> int:
        model: Any = build(spec, seed=0)
        shard_experts(model, ExpertParallel(exchange))
        local_ids = ids[2 * exchange.rank : 2 * exchange.rank + 2]
        with saved_tensors() as saved:
            model(local_ids, targets=local_ids)
        return sum(storage_sizes(saved, model.parameters()))

    predicted = sum(cost.activation_bytes(spec, 64, 2, expert_rows="sorted").values())
    assert sum(simulate(2, rank)) == pytest.approx(2 * predicted, rel=0.03)


def test_what_a_process_holds_and_adds_up() -> None:
    spec = model_of().spec
    two = process_shares(spec, Mesh(expert=2), 64, 4)[0]
    experts, every = cost.parameters(spec)["experts"], cost.parameter_count(spec)
    plain, divided = (
        cost.training_bytes(spec, 64, 2, elsewhere=numbers, expert_rows="sorted")
        for numbers in (0, experts // 2)
    )
    assert plain["parameters"] - divided["parameters"] == 4 * experts // 2
    assert plain["optimizer"] - divided["optimizer"] == 8 * experts // 2
    assert two.memory == sum(divided.values()) < sum(plain.values())
    assert two.rows == 2
    assert two.gradients_sent == 4 * (every - experts)
    four = process_shares(spec, Mesh(dp=2, expert=2), 64, 4)[0]
    assert four.gradients_sent == 4 * experts // 2 + 6 * (every - experts)


def test_what_cannot_be_shared_is_refused_by_name() -> None:
    for text in ("fsdp=2,expert=2", "expert=2,tp=2"):
        with pytest.raises(ConfigError, match=r"expert cannot be combined with (fsdp|tp) yet"):
            Mesh.read(text)

    def rank(exchange: Exchange) -> None:
        ranks = ExpertParallel(exchange)
        with pytest.raises(ConfigError, match="parallel: 8 experts cannot be shared evenly by 3 processes"):
            shard_experts(model_of(), ranks)
        with pytest.raises(ConfigError, match="this model has no experts"):
            shard_experts(model_of(experts=None), ranks)

    simulate(3, rank)

    def of_two(exchange: Exchange) -> None:
        ranks, adapted = ExpertParallel(exchange), model_of()
        attach(adapted, Adapter.fresh(adapted, Lora(rank=2)))
        with pytest.raises(ConfigError, match="models with adapters are not supported"):
            shard_experts(adapted, ranks)
        with pytest.raises(ConfigError, match=r"activation_dropout=0.1 is not supported"):
            shard_experts(model_of(activation_dropout=0.1), ranks)
        local = model_of()
        shard_experts(local, replace(ranks, same_rows=True))
        with pytest.raises(ConfigError, match="is already sharded"):
            shard_experts(local, ranks)
        with pytest.raises(ConfigError, match="no gradients are computed if all ranks have the same rows"):
            local(torch.arange(4)[None])

    simulate(2, of_two)
