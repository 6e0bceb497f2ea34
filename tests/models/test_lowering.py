"""One law over all kinds of layers: a kind's native steps are those of its modules, or it has a reason that is said."""

import logging

import pytest
import torch

from headway.generate import Reader
from headway.models.decode_step import DecodeStep, choose_step, say_once
from headway.models.operations import NotLowered
from headway.nn import Experts, Lora, set_active
from headway.nn.experts import Router
from headway.positions import Rotary
from tests.models.changes import adapted
from tests.models.kinds import DYNAMIC, KINDS
from tests.models.test_decode_step import model, native, read, stepped
from tests.native.conftest import Use, at_levels, use  # noqa: F401
from tests.tolerance import assert_within_reference


def is_slow(kind: int, dtype: int) -> bool:
    """Quick is half of the product; of families, made of what other kinds have one by one, a quarter."""
    return (kind + dtype) % (4 if list(KINDS)[kind].startswith("family ") else 2) > 0


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=pytest.mark.slow if is_slow(i, j) else ())
        for i, kind in enumerate(KINDS)
        for j, dtype in enumerate((torch.float32, torch.bfloat16))
    ],
    ids=str,
)
def test_native_steps_are_those_of_the_modules_or_have_a_reason(kind: str, dtype: torch.dtype) -> None:
    fields, reason, change = KINDS[kind]
    made = model(**fields).to(dtype)
    wide = made.spec.norm == "rms" and bool(made.spec.norm_offset)
    if wide and made.spec.order == "post" and dtype == torch.bfloat16:
        reason = reason or "rounded behind it"
    if change is not None:
        change(made)
    if reason is None:
        # together: ten tokens are too few for what a reference's error says
        results = [*stepped(made, 1, 10), *stepped(made, 9, 10)]
        assert_within_reference(*map(torch.cat, zip(*results, strict=True)))
        return
    step, choice = choose_step(made, made.make_cache(1).pages)
    assert step is None
    assert choice.what == "modules"
    assert reason in choice.why


@at_levels(0)
def test_operations_beside_products_at_every_level(use: Use, level: str) -> None:  # noqa: F811
    use(level)
    beside = (
        "gates and sinks",
        "a gate of each channel",
        "scaled residuals sandwich",
        "short convolutions True",
    )
    mixtures = "experts and a shared one", "experts by sigmoids"
    for kind in (*beside, *mixtures, "delta by head, silu, None", "delta by channel, sigmoid, 6"):
        test_native_steps_are_those_of_the_modules_or_have_a_reason(kind, torch.float32)


def test_a_cache_of_another_type_and_switched_off_adapters() -> None:
    made = model()
    other = made.make_cache(1, dtype=torch.float64).pages
    step, choice = choose_step(made, other)
    assert step is None
    assert "in the type of the weights" in choice.why
    with pytest.raises(NotLowered, match="in the type of the weights"):
        DecodeStep(made, other)
    before, ids = read(made, 2), torch.tensor([[7], [9]])
    adapted(Lora(rank=2, magnitude=True))(made)
    set_active(made, [])
    wanted = native(DecodeStep(model(), before.pages), before, ids)
    again = read(made, 2)
    assert torch.equal(native(DecodeStep(made, again.pages), again, ids), wanted)


def test_the_reason_is_said_once_and_a_reader_knows_it(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        scheme = Rotary(pairing="halves", scaling=DYNAMIC)
        for made in (model(positions=scheme), model(positions=scheme), model()):
            assert Reader(made).steps.what == ("modules" if made.spec.positions == scheme else "native")
    assert [record.getMessage() for record in caplog.records] == [
        "decoding by modules, not by native steps: the kernels know no rotation that depends on the length",
    ]
    assert str(Reader(model(), use_cache=False).steps) == "modules: no cache is used"


@at_levels(1)
def test_scores_of_experts_that_are_no_numbers_give_none(use: Use, level: str) -> None:  # noqa: F811
    """Of one expert, of some in all groups, and of all; there are more groups than std::sort inserts one by one."""
    use(level)
    for which in (slice(5, 6), slice(0, None, 2), slice(None)):
        experts = Experts(count=72, top=3, score="sigmoid", choice_bias=True, groups=36, top_groups=3)
        made = model(experts=experts)
        before, ids = read(made, 3), torch.tensor([[7], [9], [2]])
        with torch.no_grad():
            for layer in made.modules():
                if isinstance(layer, Router):
                    layer.weight[which] = torch.nan
            assert native(DecodeStep(made, before.pages), before, ids).isnan().all()
            assert made(ids).isnan().all()
