"""One law for every kind of layer: its native steps are those of its modules, or a reason is given why not."""

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
    """Half of the combinations run by default, and a quarter of the families, whose parts other kinds cover singly."""
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
    decoder = model(**fields).to(dtype)
    has_offset = decoder.spec.norm == "rms" and bool(decoder.spec.norm_offset)
    if has_offset and decoder.spec.order == "post" and dtype == torch.bfloat16:
        reason = reason or "rounds it after the gain"
    if change is not None:
        change(decoder)
    if reason is None:
        # compared together: ten tokens are too few to estimate the error of the reference
        results = [*stepped(decoder, 1, 10), *stepped(decoder, 9, 10)]
        assert_within_reference(*map(torch.cat, zip(*results, strict=True)))
        return
    step, choice = choose_step(decoder, decoder.make_cache(1).pages)
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
    decoder = model()
    pages = decoder.make_cache(1, dtype=torch.float64).pages
    step, choice = choose_step(decoder, pages)
    assert step is None
    assert "in the dtype of the weights" in choice.why
    with pytest.raises(NotLowered, match="in the dtype of the weights"):
        DecodeStep(decoder, pages)
    cache, ids = read(decoder, 2), torch.tensor([[7], [9]])
    adapted(Lora(rank=2, magnitude=True))(decoder)
    set_active(decoder, [])
    expected = native(DecodeStep(model(), cache.pages), cache, ids)
    adapted_cache = read(decoder, 2)
    assert torch.equal(native(DecodeStep(decoder, adapted_cache.pages), adapted_cache, ids), expected)


def test_the_reason_is_said_once_and_a_reader_knows_it(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        scheme = Rotary(pairing="halves", scaling=DYNAMIC)
        for decoder in (model(positions=scheme), model(positions=scheme), model()):
            assert Reader(decoder).steps.what == ("modules" if decoder.spec.positions == scheme else "native")
    assert [record.getMessage() for record in caplog.records] == [
        "decoding by modules, not by native steps: the kernels do not support rotations that depend on the length",
    ]
    assert str(Reader(model(), use_cache=False).steps) == "modules: no cache is used"


@at_levels(1)
def test_scores_of_experts_that_are_no_numbers_give_none(use: Use, level: str) -> None:  # noqa: F811
    """NaN scores of one expert, of some in all groups, of all; with more groups than std::sort sorts by insertion."""
    use(level)
    for which in (slice(5, 6), slice(0, None, 2), slice(None)):
        experts = Experts(count=72, top=3, score="sigmoid", choice_bias=True, groups=36, top_groups=3)
        decoder = model(experts=experts)
        cache, ids = read(decoder, 3), torch.tensor([[7], [9], [2]])
        with torch.no_grad():
            for layer in decoder.modules():
                if isinstance(layer, Router):
                    layer.weight[which] = torch.nan
            assert native(DecodeStep(decoder, cache.pages), cache, ids).isnan().all()
            assert decoder(ids).isnan().all()
