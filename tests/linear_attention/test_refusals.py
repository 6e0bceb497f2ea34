"""Refusals of linear attention: what it cannot do, with the reason (requirement 83), and arguments that do not fit."""

import pytest
import torch

from headway.attention.linear_attention import LinearAttentionSpec, linear_attend, linear_state
from headway.errors import ConfigError, HeadwayError, PatternError
from headway.nn import LinearAttention, RotaryEmbedding
from headway.patterns import Causal, Full, GlobalKeys, Pattern, PerHead, Window
from headway.positions import LinearBias, PositionScheme, Relative, Rotary, SpecialOrthogonal, T5Bias, YaRN
from headway.scores import ALiBi, Bias, RelativeBias, RelativeKey, Score, SoftCap
from headway.tokens import Tokens
from tests.linear_attention.oracle import table, tensors

SCORES = [
    ALiBi(),
    RelativeBias(torch.zeros(32, 4)),
    RelativeKey(torch.zeros(5, 6)),
    Bias(torch.zeros(7, 7)),
    SoftCap(30.0),
]
REASON = (
    "sums over the keys, never the weights of pairs.*known in 2021 only rotary ones, which rotate queries and keys.*"
    "later ones act on the state: decay by distance .RetNet, not supported. and the gated delta rule"
)


@pytest.mark.parametrize("score", SCORES, ids=lambda s: type(s).__name__)
def test_row_83_scores_are_refused_because_there_are_no_weights(score: Score) -> None:
    q, k, v = tensors(0, 7)
    with pytest.raises(PatternError, match=f"score={type(score).__name__}.*{REASON}"):
        linear_attend(q, k, v, score=score)
    with pytest.raises(PatternError, match=REASON):
        LinearAttention(24, 4, score=score)
    with pytest.raises(PatternError, match=REASON):
        LinearAttention(24, 4, score=[score])


@pytest.mark.parametrize("positions", [LinearBias(), T5Bias(), Relative(4)], ids=lambda p: type(p).__name__)
def test_row_83_so_are_positions_that_mark_scores(positions: PositionScheme) -> None:
    with pytest.raises(PatternError, match=REASON):
        LinearAttention(24, 4, positions=positions)


def test_row_83_so_is_dropout_of_weights() -> None:
    q, k, v = tensors(0, 7)
    with pytest.raises(PatternError, match=r"dropout=0\.1.*so dropout of weights cannot be applied"):
        linear_attend(q, k, v, dropout=0.1)
    with pytest.raises(PatternError, match=REASON):
        LinearAttention(24, 4, dropout=0.1)
    assert LinearAttention(24, 4, output_dropout=0.1).drop_output.p == 0.1


@pytest.mark.parametrize(
    "pattern",
    [Window.last(4), Causal() | GlobalKeys(), Causal() & Window.around(3), PerHead(*[Full()] * 3, Causal())],
    ids=str,
)
def test_row_83_so_is_every_pattern_but_full_and_causal(pattern: Pattern) -> None:
    q, k, v = tensors(0, 7)
    with pytest.raises(PatternError, match="so a mask cannot be applied"):
        linear_attend(q, k, v, LinearAttentionSpec(), pattern)
    with pytest.raises(PatternError, match="so a mask cannot be applied"):
        LinearAttention(24, 4, pattern=pattern)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"feature": "elu1"}, r'there is no feature .elu1. .did you mean "elu\+1".*; there are elu\+1'),
        ({"feature": "softmax over tokens"}, "there is no feature .softmax over tokens"),
        ({"key_feature": "gelu"}, "there is no key_feature .gelu"),
        ({"feature": "cosine", "key_feature": "relu"}, "must be the feature of both queries and keys"),
        ({"key_feature": "cosine"}, "must be the feature of both queries and keys"),
        ({"rotary": "denominator"}, "there is no rotary .denominator. .*; there are numerator, both, none"),
        ({"feature": "cosine", "rotary": "numerator"}, "the weights are no distribution"),
        ({"eps": 0.0}, "finite and above 0"),
    ],
)
def test_a_value_that_cannot_be(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LinearAttentionSpec(**fields)  # type: ignore[arg-type]


def test_a_value_says_what_it_is() -> None:
    assert LinearAttentionSpec() == LinearAttentionSpec("elu+1", "elu+1", "numerator")
    assert hash(LinearAttentionSpec("cosine")) == hash(LinearAttentionSpec("cosine", rotary="both"))
    assert str(LinearAttentionSpec("relu", "exp")) == "relu, keys exp, rotary numerator"
    assert (LinearAttentionSpec().features(64), LinearAttentionSpec("cosine").features(64)) == (64, 65)


def test_keys_normalised_over_tokens_cannot_be_causal() -> None:
    linear = LinearAttentionSpec("softmax", "softmax over tokens")
    q, k, v = tensors(0, 7)
    with pytest.raises(PatternError, match="later ones too, so it cannot be Causal"):
        linear_attend(q, k, v, linear, Causal())
    with pytest.raises(PatternError, match="later ones too"):
        linear_state(k, v, linear)


def test_calls_that_do_not_fit() -> None:
    q, k, v = tensors(0, 7)
    at = Tokens.range(7)
    packed, state = Tokens.packed([[3, 4]]), linear_state(k.detach(), v.detach())
    calls: list[tuple[dict[str, object], str]] = [
        ({"v": v[:, :1]}, "k and v must have the same heads and slots"),
        ({"q": q[0]}, r"\[batch, heads, slots, width\]"),
        ({"q": q.float()}, "share dtype and device"),
        ({"q": q[:, :3]}, "cannot share 2 key/value heads"),
        ({"q_tokens": at}, "both or neither"),
        ({"q_tokens": at, "k_tokens": Tokens.range(7, start=1)}, "queries and keys must be the same tokens"),
        ({"q_tokens": Tokens.range(6), "k_tokens": at}, "describe 1 rows of 6 slots"),
        ({"q": q[:, :, :5]}, r"5 queries and 7 keys under Causal\(\) have no defined alignment"),
        (
            {"linear": LinearAttentionSpec(rotary="none"), "rotation": table(torch.arange(7), 6)},
            "rotates nothing; drop rotation=",
        ),
        ({"form": "chunk"}, 'there is no form .chunk. .did you mean "chunked".*; there are auto'),
        ({"pattern": Full(), "past": state}, "past needs Causal\\(\\) and one document per row, got Full"),
        ({"q_tokens": packed, "k_tokens": packed, "past": state}, "got packed documents"),
        ({"past": linear_state(k[:1].detach(), v[:1].detach())}, r"past must be of .* = \[2, 2, 6, 5\]"),
        ({"past": linear_state(k, v)}, "no gradient flows through past"),
    ]
    for changed, message in calls:
        args = {"q": q, "k": k, "v": v, "linear": LinearAttentionSpec(), "pattern": Causal(), **changed}
        with pytest.raises(HeadwayError, match=message):
            linear_attend(**args)  # type: ignore[arg-type]
    with pytest.raises(PatternError, match="one document per row"):
        linear_state(k, v, tokens=packed)


def test_layers_that_cannot_be() -> None:
    rotary = Rotary(pairing="halves")
    cases: list[tuple[dict[str, object], str]] = [
        ({"positions": rotary, "linear": LinearAttentionSpec(rotary="none")}, "rotates nothing"),
        (
            {
                "positions": Rotary(pairing="halves", scaling=YaRN(4.0, 64)),
                "linear": LinearAttentionSpec("cosine"),
            },
            "needs rotations that keep lengths",
        ),
        ({"form": "fast"}, "there is no form .fast"),
        ({"kv_heads": 3}, "cannot share 3"),
    ]
    for fields, message in cases:
        with pytest.raises(HeadwayError, match=message):
            LinearAttention(24, 4, **fields)  # type: ignore[arg-type]


def test_trained_turns_are_the_layer_s_own() -> None:
    positions = SpecialOrthogonal(Rotary(pairing="halves"))
    layer, x = LinearAttention(24, 4, positions=positions), torch.randn(1, 5, 24)
    y = layer(x)
    assert torch.equal(y, layer(x, rotation=RotaryEmbedding(positions, 6)(Tokens.range(5), x.dtype)))
    y.square().sum().backward()
    assert layer.rotary.frequency_offset is not None
    assert layer.rotary.frequency_offset.grad is not None
    assert float(layer.rotary.frequency_offset.grad.abs().max()) > 0
