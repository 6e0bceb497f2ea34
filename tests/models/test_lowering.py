"""One law over all kinds of layers: a kind's native steps are those of its modules, or it has a reason that is said."""

import logging

import pytest
import torch

from headway.generate import Reader
from headway.models.decode_step import DecodeStep, choose_step, say_once
from headway.models.operations import NotLowered
from headway.nn import Lora, set_active
from headway.positions import Rotary
from tests.models.changes import adapted
from tests.models.kinds import DYNAMIC, KINDS
from tests.models.test_decode_step import model, native, read, steps
from tests.native.conftest import Use, at_levels, use  # noqa: F401
from tests.pairwise import chequered


@chequered("kind,dtype", list(KINDS), [torch.float32, torch.bfloat16])
def test_native_steps_are_those_of_the_modules_or_have_a_reason(kind: str, dtype: torch.dtype) -> None:
    fields, reason, change = KINDS[kind]
    made = model(**fields).to(dtype)
    wide = made.spec.norm == "rms" and bool(made.spec.norm_offset)
    if wide and made.spec.order == "post" and dtype == torch.bfloat16:
        reason = reason or "rounded behind it"
    if change is not None:
        change(made)
    if reason is None:
        for rows in (1, 9):
            steps(made, rows, 10)
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
