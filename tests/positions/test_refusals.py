"""What position schemes refuse, and the error messages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.errors import ConfigError, PatternError
from headway.nn import RotaryEmbedding
from headway.positions import (
    DynamicNTK,
    Learned,
    LinearBias,
    LinearScaling,
    Llama3,
    LongRope,
    PerLayer,
    Relative,
    Rotary,
    Sinusoidal,
    SpecialOrthogonal,
    T5Bias,
    YaRN,
    to_pairing,
)
from headway.positions.orthogonal import rotation_matrices
from headway_lab.explain.rotary_forms import swapped_form
from tests.positions.small import NONE, ROTARY

HALVES = Rotary(pairing="halves")


def halves(**fields: Any) -> Rotary:
    return Rotary(pairing="halves", **fields)


def converted(**options: Any) -> Tensor:
    return to_pairing(torch.zeros(16, 5), **{"frm": "halves", "to": "adjacent", **options})


REFUSED: list[tuple[Callable[[], Any], str]] = [
    # Rotary
    (lambda: Rotary(pairing="half"), r"pairing 'half' \(did you mean \"halves\"\?\); give a tuple of pairs, or"),
    (lambda: Rotary(pairing=None), r"or a tuple of pairs, got None"),
    (lambda: Rotary(pairing=((0, 1), (1, 2))), r"every coordinate 0..d-1 exactly once"),
    (lambda: Rotary(pairing=((0, 1, 2),)), r"every pair is two integers, got \(0, 1, 2\)"),
    (lambda: Rotary(pairing=()), r"every coordinate"),
    (lambda: Rotary("halves", pairing="halves"), r"theta must be a finite number >= 1, got 'halves'"),
    (lambda: Rotary(0.5, pairing="halves"), r"theta must be a finite number >= 1, got 0.5"),
    (lambda: Rotary(float("nan"), pairing="halves"), r"theta must be a finite number >= 1"),
    (lambda: halves(dims=5), r"even \(coordinates are rotated in pairs\) and at least 2, got 5"),
    (lambda: halves(dims=0), r"at least 2, got 0"),
    (lambda: halves(scaling="linear"), r"must be a Scaling such as Linear"),
    (lambda: HALVES.frequencies(65), r"head_dim 65 is odd.*dims=64"),
    (lambda: halves(dims=64).frequencies(32), r"dims=64 does not fit heads of 32"),
    (lambda: Rotary(pairing=((0, 1),)).frequencies(4), r"lists 1 pairs, but 4 rotated dims are 2 pairs"),
    # what Rotary rotates
    (lambda: HALVES.rotate(torch.zeros(1, 1, 3, 8), torch.arange(3).bfloat16()),
     r"positions must be integers.*got torch.bfloat16"),
    (lambda: HALVES.rotate(torch.zeros(1, 1, 3, 8), torch.arange(3).half()), r"got torch.float16"),
    (lambda: HALVES.rotate(torch.zeros(1, 1, 3, 8), torch.ones(3, dtype=torch.bool)), r"got torch.bool"),
    (lambda: HALVES.rotate(torch.zeros(1, 1, 3, 8), torch.arange(4)),
     r"T = 4 positions and D >= 8, got \(1, 1, 3, 8\)"),
    (lambda: HALVES.rotate(torch.zeros(1, 3, 8), torch.arange(3)), r"are \[B, H, T, D\]"),
    (lambda: HALVES.rotate(torch.zeros(3, 1, 3, 8), torch.zeros(2, 3, dtype=torch.long)),
     r"2 rows do not fit a batch of 3"),
    (lambda: HALVES.rotate(torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, dtype=torch.long)),
     r"\[T\] or \[B, T\], got shape \(1, 1, 3\)"),
    # frequencies of Rotary
    (lambda: halves(schedule="lineal"), r"unknown schedule 'lineal' \(did you mean \"linear\"\?\); give d/2"),
    (lambda: halves(schedule=()), r"d/2 finite numbers, got \(\)"),
    (lambda: halves(schedule=(1.0, float("inf"))), r"d/2 finite numbers"),
    (lambda: halves(schedule=(True,)), r"d/2 finite numbers"),
    (lambda: halves(schedule=2.0), r"d/2 finite numbers, got 2.0"),
    (lambda: Rotary(500.0, pairing="halves", schedule="linear"), r"theta=500 is the base of schedule"),
    (lambda: halves(schedule=(1.0,)).frequencies(4), r"lists 1 frequencies, but 4 rotated"),
    (lambda: halves(schedule=(1.0,), dims=4), r"lists 1 frequencies, but 4 rotated"),
    (lambda: halves(schedule="linear", scaling=LinearScaling(2)), r"LinearScaling is a rule for frequencies"),
    (lambda: halves(trainable=True, scaling=LinearScaling(2)), r"trainable=True trains them"),
    (lambda: halves(trainable=True, scaling=DynamicNTK(2, 8)), r"drop one of them"),
    (lambda: halves(trainable=1), r"trainable must be True or False, got 1"),
    (lambda: halves(trainable=True).rotation(torch.arange(3), 8),
     r"offset must have shape \[4\] if trainable=True .*; got None"),
    (lambda: halves(trainable=True).rotation(torch.arange(3), 8, offset=torch.ones(3)),
     r"offset must have shape \[4\] if trainable=True .*; got \[3\]"),
    (lambda: HALVES.rotation(torch.arange(3), 8, offset=torch.ones(4)),
     r"and be None otherwise; got \[4\] for Rotary"),
    # row 63
    (lambda: SpecialOrthogonal(halves(trainable=True)), r"a Rotary with scaling=None and trainable=False"),
    (lambda: SpecialOrthogonal("halves"), r"got 'halves'"),
    (lambda: SpecialOrthogonal(HALVES).generator(7), r"head_dim 7 is odd"),
    (lambda: rotation_matrices(torch.zeros(4, 4), torch.arange(3.0)), r"must be integers, got torch.float32"),
    (lambda: SpecialOrthogonal(HALVES).rotation(torch.arange(3), 8, offset=torch.ones(6)),
     r"8 rotated dims have 28 trained numbers below the diagonal, got offset=\[6\]"),
    (lambda: SpecialOrthogonal(HALVES).rotation(torch.zeros(1, 1, 1, dtype=torch.long), 8),
     r"must be \[T\] or \[B, T\], got shape \(1, 1, 1\)"),
    (lambda: SpecialOrthogonal(HALVES).rotation(torch.arange(3), 8).apply(torch.ones(1, 1, 4, 8)), r"T = 3 positions"),
    # row 69
    (lambda: PerLayer(()), r"sequence of at least one position scheme, got \(\)"),
    (lambda: PerLayer(ROTARY), r"sequence of at least one position scheme, got Rotary"),
    (lambda: PerLayer((ROTARY, "none")), r"each layer needs a position scheme such as NoPositions\(\), got 'none'"),
    (lambda: PerLayer((PerLayer((ROTARY,)),)), r"got PerLayer"),
    (lambda: PerLayer((ROTARY, Learned(8))), r"Learned\(size=8, offset=0\) is added to the embeddings before"),
    (lambda: PerLayer((ROTARY, T5Bias())), r"some schemes act on queries and keys and others on scores"),
    (lambda: PerLayer((ROTARY, NONE)).expand(5), r"2 schemes do not divide 5 layers"),
    (lambda: PerLayer((ROTARY, NONE)).at(-1), r"numbered from 0, got -1"),
    (lambda: PerLayer((T5Bias(), NONE)).scores(4, 8, False), r"call at\(layer\).scores"),
    (lambda: RotaryEmbedding(PerLayer((ROTARY, NONE)), 8), r"make one for each different positions.at\(layer\)"),
    # row 70
    (lambda: halves(values=True, scaling=DynamicNTK(2, 8)),
     r"under DynamicNTK rotations change as a row grows, and values in a cache are not rotated again"),
    (lambda: halves(values=True, scaling=YaRN(4.0, 32)), r"YaRN has amplitude 1.13863, meant for scores"),
    (lambda: halves(values="yes"), r"values must be True or False, got 'yes'"),
    (lambda: halves(values=True).with_pairing("adjacent"),
     r"pairing cannot change if values=True: .*; keep pairing=.halves"),
    # row 74
    (lambda: Relative(0), r"Relative: clip must be a whole number of at least 1, got 0"),
    (lambda: Relative(2.0), r"got 2.0"),
    (lambda: Relative(2, True).scores(1, 7, True), r"width must be even .* got 7"),
    (lambda: T5Bias(1), r"T5Bias: buckets must be a whole number of at least 2, got 1"),
    (lambda: T5Bias(8, True), r"max_distance must be a whole number of at least 2, got True"),
    (lambda: LinearBias((1.0,)).scores(4, 8, True), r"1 slopes are given for 4 query heads"),
    # scalings
    (lambda: LinearScaling(0.5), r"LinearScaling: factor must be >= 1 .*got 0.5"),
    (lambda: DynamicNTK(0.0, 8), r"DynamicNTK: factor must be a finite number > 0, got 0.0"),
    (lambda: YaRN(float("inf"), 8), r"YaRN: factor must be a finite number > 0, got inf"),
    (lambda: Llama3("8", 1.0, 4.0, 8), r"Llama3: factor must be a finite number > 0, got '8'"),
    (lambda: YaRN(2.0, 0), r"YaRN: trained_context must be a whole number of at least 2, got 0"),
    (lambda: DynamicNTK(2.0, 2048.0), r"trained_context must be a whole number of at least 2, got 2048.0"),
    (lambda: YaRN(2.0, 8, beta_fast=1.0, beta_slow=1.0), r"beta_fast must be greater than beta_slow"),
    (lambda: YaRN(2.0, 8, beta_fast=1.0, beta_slow=32.0), r"beta_fast=1.0 and beta_slow=32.0"),
    (lambda: YaRN(2.0, 8, mscale=1.0), r"set both mscale and .*, or neither .*mscale=1.0 and mscale_all_dim=None"),
    (lambda: YaRN(2.0, 8, mscale=1.0, mscale_all_dim=1.0, attention_factor=1.0), r"already fixes the amplitude"),
    (lambda: YaRN(2.0, 8, attention_factor=-1.0), r"attention_factor must be a finite number > 0, got -1.0"),
    (lambda: Llama3(8.0, 4.0, 1.0, 8192), r"high_freq_factor must be greater than low_freq_factor"),
    (lambda: Llama3(8.0, 4.0, 4.0, 8192), r"high_freq_factor=4.0 and low_freq_factor=4.0"),
    (lambda: LongRope([1.0], [1.0, 2.0], 8, factor=2.0), r"one number per rotated pair, got 1 and 2 numbers"),
    (lambda: LongRope([1.0], [0.0], 8, factor=2.0), r"every long_factor must be a finite number > 0, got 0.0"),
    (lambda: LongRope([1.0], [1.0], 8), r"give factor \(max_context / trained_context\) or attention_factor"),
    (lambda: LongRope([1.0], [1.0], 8, factor=0.5), r"LongRope: factor must be >= 1"),
    (lambda: halves(scaling=LongRope([1.0], [1.0], 8, factor=2.0)).frequencies(64),
     r"64 rotated dims are 32 pairs, but short_factor and long_factor hold 1 numbers"),
    (lambda: Rotary(1.0, pairing="halves", scaling=YaRN(2.0, 8)).frequencies(8), r"theta must be greater than 1"),
    (lambda: halves(scaling=DynamicNTK(2.0, 8)).frequencies(2), r"more than 2 rotated dims"),
    # schemes added to embeddings
    (lambda: Learned(0), r"size must be >= 1 and offset >= 0, got 0 and 0"),
    (lambda: Learned(8, -1), r"got 8 and -1"),
    (lambda: Sinusoidal(pairing="half"), r"Sinusoidal: there is no pairing 'half' .*adjacent, halves"),
    (lambda: Sinusoidal(0), r"theta must be a finite number >= 1, got 0"),
    (lambda: Sinusoidal().embedding(torch.arange(3), 5), r"width must be even .* got 5"),
    (lambda: Sinusoidal().embedding(torch.arange(3).half(), 4), r"got torch.float16"),
    (lambda: Sinusoidal().embedding(torch.arange(3).bfloat16(), 4), r"got torch.bfloat16"),
    (lambda: Learned(8).row(torch.arange(3).half()), r"positions must be integers, got torch.float16"),
    (lambda: Learned(8).row(torch.arange(3).bfloat16()), r"got torch.bfloat16"),
    (lambda: Learned(8).row(torch.arange(3).float()), r"got torch.float32"),
    (lambda: Learned(8).row(torch.ones(3, dtype=torch.bool)), r"got torch.bool"),
    # pairings
    (lambda: converted(heads=4, head_dim=8), r"axis 0 of shape \(16, 5\) must be heads \* head_dim = 4 \* 8 = 32 long"),
    (lambda: converted(heads=2, head_dim=8, dim=2), r"shape \(16, 5\) has no axis 2"),
    (lambda: converted(heads=2, head_dim=8, dims=10), r"10 rotated dims do not fit a head of 8"),
    (lambda: converted(heads=2, head_dim=8, dims=3), r"even .* got 3"),
    (lambda: converted(heads=2, head_dim=8, to=((0, 1),)), r"lists 1 pairs, but 8 rotated dims are 4 pairs"),
    (lambda: converted(heads=2, head_dim=8, to="interleaved"), r"unknown rotary pairing 'interleaved'"),
    (lambda: swapped_form(torch.zeros(2, 7), torch.arange(2)), r"even .* got 7"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "text"), REFUSED)
def test_what_cannot_be_is_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


def test_pairing_is_required() -> None:
    with pytest.raises(TypeError, match="pairing"):
        Rotary()  # type: ignore[call-arg]


def test_buckets_that_reach_no_further_than_distances_are_refused() -> None:
    with pytest.raises(PatternError, match=r"8 buckets hold 2 single distances .* below max_distance=2"):
        T5Bias(8, 2).scores(4, 8, True)
