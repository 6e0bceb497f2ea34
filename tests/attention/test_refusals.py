"""Refusals of `attend`, patterns, tokens and scores: messages say what was given, and what to give instead."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import headway
from headway.attention import attend, attend_keys, attention_weights, choose
from headway.errors import BackendError, HeadwayError, PatternError
from headway.patterns import Causal, Full, PerHead, Window, parse
from headway.scores import RelativeBias, SoftCap
from headway.tokens import Tokens
from tests.attention.small import qkv

Q, K, V = qkv()
MASK = torch.ones(2, 1, 11, 11)
NAN, INF = float("nan"), float("inf")
NUMBERS = (torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16)
SHAPES = ((11, 11), (2, 11, 11), (2, 11), (11,), (2, 1, 1, 11, 11), (2, 4, 11, 10))
TENSORS: list[tuple[tuple[Any, ...], str]] = [
    ((Q[0], K, V), r"must be \[batch, heads, slots, width\]"),
    ((Q, K, V[:, :, :5]), "same heads and slots"),
    ((Q, K[..., :4], V), "q and k must have the same width"),
    ((Q, K[:1], V[:1]), "same batch size"),
    ((Q[:, :3], K, V), r"3 query heads cannot share 2 .* one of \[1, 3\]"),
    ((Q[:, :1], K, V), "1 query heads cannot share 2"),
    ((Q.half(), K.half(), V.half()), "float16 products run hundreds of times slower"),
    ((Q.long(), K.long(), V.long()), "must be floating point"),
    ((Q[:, :, :5], K, V), r"5 queries and 11 keys under Causal\(\) have no defined alignment"),
    *(
        (
            tuple(t.numpy() if i == place else t for i, t in enumerate((Q, K, V))),
            r"q, k and v must be torch tensors .* got ndarray; convert an array by torch.as_tensor",
        )
        for place in range(3)
    ),
    *(
        (
            tuple(t.to(dtype) if i == place else t for i, t in enumerate((Q, K, V))),
            rf"share dtype and device; got (?=.*{dtype}).*torch.float64",
        )
        for place in range(3)
        for dtype in (torch.float32, torch.bfloat16)
    ),
]
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"dropout": 1.0}, "dropout is a probability from 0 to below 1, got 1.0"),
    ({"scale": NAN}, "scale must be finite, got nan"),
    ({"scale": "a"}, "scale must be one number, got 'a'"),
    ({"scale": INF}, "scale must be finite, got inf"),
    ({"scale": -INF}, "scale must be finite, got -inf"),
    ({"q_tokens": Tokens.range(4), "k_tokens": Tokens.range(11)}, "q_tokens describe 1 rows of 4 slots"),
    ({"pattern": Causal(), "q_tokens": Tokens.range(11)}, "both or neither"),
    ({"pattern": PerHead(Causal(), Full())}, "PerHead names 2 heads, but q has 4"),
    ({"backend": "nativ"}, "unknown backend 'nativ'"),
    *(
        ({"keep": MASK.to(t)}, rf"keep must be bool \(True = may be seen\), got {t}; .*mask.bool")
        for t in NUMBERS
    ),
    *(
        (
            {"keep": torch.ones(shape, dtype=torch.bool)},
            rf"\[batch, heads, queries, keys\] = \[2, 4, 11, 11\], got \[{', '.join(map(str, shape))}\]",
        )
        for shape in SHAPES
    ),
    ({"score": SoftCap}, "each step must be a Score .* got the class SoftCap; use an instance of it"),
    ({"score": 2.0}, "each step must be a Score .* got a float"),
    ({"score": [SoftCap(3.0), 1]}, "each step must be a Score .* got a int"),
]
NO_PATTERNS: list[tuple[Any, str]] = [
    (MASK[0, 0].bool(), r"got a Tensor of shape \(11, 11\); pass a mask as keep=mask"),
    (Q.numpy(), "got a ndarray of shape .* keep=mask"),
    (Causal, r"got the class Causal; give an instance, Causal\(...\)"),
    ("Causal()", r"got a str; convert it by headway.patterns.parse\('Causal\(\)'\)"),
    (3, "got 3 of type int"),
]
VALUES: list[tuple[Callable[[], Any], str]] = [
    (lambda: Window.last(0), "got 0; for no window use Causal"),
    (lambda: Window.last(-1), "must be an integer of at least 1, got -1"),
    (lambda: Window.last(True), "must be an integer of at least 1, got True"),
    (lambda: Window.last(None), "got None"),
    (lambda: Window.around(-1), "before must be a whole number of at least 0, got -1"),
    (lambda: Window.around(None), "before must be a whole number of at least 0, got None"),
    (lambda: Window(1, -2), "after must be a whole number of at least 0, got -2"),
    (lambda: Window(None), "before must be a whole number of at least 0, got None"),
    (lambda: parse("Window.last(-1)"), r"'Window.last\(-1\)': .*got -1"),
    (lambda: parse("Window.last(None)"), "'None' at character 13 is neither a pattern nor a whole number"),
    (lambda: parse(f"Window.last({10**23})"), r"positions, but at most \d+ are possible; use Causal\(\)"),
    (lambda: parse(f"Window(0, 3, {2**62})"), r"positions, but at most \d+ are possible; use Causal\(\)"),
    (lambda: parse(f"Sink({10**23})"), r"Sink: count must be a whole number in 0..2\*\*62"),
    (lambda: Causal() & Window, r"& joins two patterns, but to the right of Causal\(\) is the class Window"),
    (lambda: Window.last(2) | 3, r"\| joins two patterns, but to the right of Window.last\(2\) is 3"),
    (lambda: Tokens.from_attention_mask(torch.ones(2, 3, 3)),
     r"must have shape \[batch, slots\], got \(2, 3, 3\); .* as keep= of attend"),
    (lambda: Tokens.from_attention_mask(torch.ones(2, 1, 3, 3)), r"got \(2, 1, 3, 3\)"),
    (lambda: Tokens.from_attention_mask(torch.tensor([[0.0, torch.finfo(torch.float32).min]])), "as mask == 0"),
    (lambda: Tokens.from_attention_mask(torch.tensor([[0.0, -1e4]])), "pass an additive mask .* as mask == 0"),
    (lambda: Tokens.from_attention_mask(torch.tensor([[1.0, NAN]])), r"must hold only 0 \(padding\) and 1 \(token\)"),
    (lambda: Tokens.from_attention_mask(torch.tensor([[1.0, 0.5]])), r"must hold only 0 \(padding\) and 1 \(token\)"),
    (lambda: Tokens.from_attention_mask(torch.tensor([[-100, 1]])), r"must hold only 0 \(padding\) and 1 \(token\)"),
    (lambda: RelativeBias(torch.ones(32, 4), max_distance=8),
     "32 buckets hold 8 single distances .* below max_distance=8;"),
    (lambda: RelativeBias(torch.ones(32, 4), max_distance=9, bidirectional=False),
     "32 buckets hold 16 single distances .* below max_distance=9;"),
    (lambda: RelativeBias(torch.ones(3, 4)), "3 buckets hold 0 single distances .* at least 1"),
    (lambda: attend_keys(Q, Tokens.range(11), [], Causal()), "no KeyValues are given; give at least one"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "text"), TENSORS)
def test_tensors_that_do_not_fit(tensors: tuple[Any, ...], text: str) -> None:
    with pytest.raises(HeadwayError, match=text):
        attend(*tensors, Causal())


@pytest.mark.parametrize(("arguments", "text"), ARGUMENTS)
def test_arguments_that_cannot_be(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(HeadwayError, match=text) as caught:
        attend(Q, K, V, **arguments)
    assert isinstance(caught.value, PatternError) or not arguments.keys() & {"keep", "score"}


@pytest.mark.parametrize(("pattern", "text"), NO_PATTERNS)
def test_what_is_no_pattern(pattern: Any, text: str) -> None:
    for call in (lambda: attend(Q, K, V, pattern), lambda: attention_weights(Q, K, pattern)):
        with pytest.raises(PatternError, match=rf"pattern must be a Pattern such as Causal\(\), .*{text}"):
            call()


@pytest.mark.parametrize(("make", "text"), VALUES)
def test_values_that_cannot_be(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(PatternError, match=text):
        make()


def test_a_backend_that_cannot_and_a_device_that_is_none() -> None:
    with pytest.raises(BackendError, match=r"choose: there is no device 'gpu' .*there are cpu, cuda"):
        choose(Causal(), queries=8, keys=8, heads=8, device="gpu")
    with pytest.raises(BackendError, match='"diagonal" cannot run this call: queries and keys must be'):
        attend(Q[:, :, :5], K, V, Full(), backend="diagonal")


def test_the_largest_window_and_the_nearest_last_bucket_are_taken() -> None:
    far = Window.last(2**62 + 1)
    assert torch.equal(attend(Q, K, V, far), attend(Q, K, V, Causal()))
    assert headway.patterns.parse(str(far)) == far
    last = RelativeBias(torch.ones(32, 4), max_distance=9).bucket(torch.arange(-40, 41))
    assert last.tolist() == [15] * 32 + [*range(8, -1, -1), *range(17, 25)] + [31] * 32
