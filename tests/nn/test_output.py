"""The loss of an output layer with few trained slots: how many rows its products are given, and the results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headway.models import Encoder, ModelSpec, build
from headway.models.head import Head
from headway.nn import IGNORE_INDEX, Linear, Losses, products
from headway.nn.output import SPARSE, output_cross_entropy

WIDTH, VOCAB, SLOTS = 16, 40, 200


def targets(trained: int) -> Tensor:
    """Returns targets [2, SLOTS / 2], of which `trained` are not ignored."""
    slots = torch.randperm(SLOTS)[:trained]
    ids = torch.full((SLOTS,), IGNORE_INDEX)
    ids[slots] = torch.randint(VOCAB, (trained,))
    return ids.view(2, -1)


def plain(layer: Linear, x: Tensor, target_ids: Tensor) -> Losses:
    return output_cross_entropy(layer, x, target_ids, VOCAB, hits=True)


def smoothed(layer: Linear, x: Tensor, target_ids: Tensor) -> Losses:
    return output_cross_entropy(layer, x, target_ids, VOCAB, label_smoothing=0.1, hits=True)


@pytest.mark.parametrize("loss", [plain, smoothed])
def test_in_bf16_products_have_few_counts_of_rows(
    loss: Callable[[Linear, Tensor, Tensor], Losses], monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN compiles and keeps a kernel for each count: with answers alone, every batch had its own. Losses and
    gradients are those of the trained slots alone, to a rounding of bf16."""
    torch.manual_seed(0)
    layer, counts = Linear(WIDTH, VOCAB, bias=False).bfloat16(), set()
    with torch.no_grad():
        layer.weight.normal_()
    for module in ("cross_entropy", "products"):
        run = getattr(products, "forward_product" if module == "cross_entropy" else "linear")

        def counted(x: Tensor, *arguments: Tensor, run: Callable[..., Tensor] = run) -> Tensor:
            counts.add(x.numel() // WIDTH)
            return run(x, *arguments)

        paths = "headway.nn.cross_entropy.forward_product", "headway.nn.weights.plain.linear"
        monkeypatch.setattr(paths[module == "products"], counted)
    for trained in (1, 15, 17, 100, round(SLOTS * (1 - SPARSE)) - 1):
        target_ids, results = targets(trained), []
        x = torch.randn(2, SLOTS // 2, WIDTH).bfloat16().requires_grad_()
        for pads in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                if not pads:
                    patch.setattr("headway.nn.output.added_rows", lambda rows: 0)
                counts.clear()
                losses = loss(layer, x, target_ids)
                assert counts == {products.filled_rows(trained) if pads else trained}
            assert losses.tokens == trained
            assert losses.hits is not None
            gradients = torch.autograd.grad(losses.total, [x, layer.weight])
            results.append([losses.total, losses.nats, losses.each, losses.hits.float(), *gradients])
        for padded, alone in zip(*results, strict=True):
            torch.testing.assert_close(padded, alone, rtol=2**-7, atol=2**-7 * alone.abs().max().item())


def test_a_head_in_front_of_the_output_has_few_counts_too() -> None:
    spec = ModelSpec.of(
        "bert", vocab=VOCAB, width=WIDTH, layers=1, heads=2, hidden=32, head=Head("masked-lm", dense="gelu")
    )
    model, counts = build(spec, seed=0).bfloat16(), set()
    assert isinstance(model, Encoder)
    assert isinstance(model.head.dense, nn.Module)
    model.head.dense.register_forward_pre_hook(lambda _, args: counts.add(len(args[0])))
    for trained in (3, 30, 90):
        target_ids = targets(trained)
        losses = model(torch.randint(VOCAB, target_ids.shape), targets=target_ids)
        assert losses.tokens == trained
        assert (losses.each != 0).eq(target_ids != IGNORE_INDEX).all()
    assert counts == {16, 32, 96}
