"""What models, layers and pure values refuse, and their messages."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway.attention.linear_attention import LinearAttentionSpec
from headway.errors import ConfigError, DataError, PatternError
from headway.models import EncoderDecoder, Head, ModelSpec, build, cost
from headway.models.cost.weights import must_decode
from headway.models.quantize import compress_model
from headway.nn import Attention, Block, FeedForward, GlobalAttention, RMSNorm
from headway.patterns import Causal, Full, Pattern, pairs
from headway.patterns.text import parse
from headway.positions import Rotary
from headway.quantization import quantize_weights
from headway.scores import ALiBi, SoftCap
from headway.surgery import stretch_context
from headway.tokens import Tokens

SMALL: dict[str, Any] = {"vocab": 32, "width": 16, "layers": 1, "heads": 2, "hidden": 16}
IDS = torch.arange(6).view(2, 3)
DECODER = ModelSpec.of("llama", **SMALL)
ENCODER = ModelSpec.of("bert", **SMALL)
PAIR = ModelSpec.of_pair("transformer", **SMALL)
EMBEDDER = ENCODER.with_head(Head("embed"))


class Evens(Pattern):
    """A pattern that is not built from the primitives of the library."""

    def allows(self, q: Tokens, k: Tokens) -> Any:
        return (k.index % 2 == 0).expand(*q.index.shape[:-1], q.count, k.count)

    def judge(self, q: Any, k: Any) -> Any:
        raise NotImplementedError


def decoder(ids: torch.Tensor = IDS, **options: Any) -> Any:
    return build(DECODER, seed=0)(ids, **options)


def pair(source: torch.Tensor, ids: torch.Tensor, **options: Any) -> Any:
    return build(PAIR, seed=0)(source, ids, **options)


def attention(**options: Any) -> Attention:
    return Attention(16, 2, pattern=Full(), **options)


def block(**options: Any) -> Block:
    return Block(attention(), FeedForward(16, 16), lambda: RMSNorm(16), **options)


def sums() -> Any:
    """Returns the cache of one layer that keeps no keys."""
    return build(DECODER.with_mixer(LinearAttentionSpec("elu+1")), seed=0).make_cache(1).pages[0]


LATE = "label_smoothing needs targets; give targets=, or drop label_smoothing="
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: decoder(label_smoothing=0.1), ConfigError, LATE),
    (lambda: pair(IDS, IDS, label_smoothing=0.1), ConfigError, LATE),
    (
        lambda: decoder(targets=IDS, logits_for=slice(-1, None)),
        ConfigError,
        "targets and logits_for exclude each other: the loss covers all targets that are not -100; drop one of them",
    ),
    (
        lambda: decoder(targets=IDS[:, 1:]),
        DataError,
        "targets [2, 2] must have the shape of ids [2, 3]",
    ),
    (
        lambda: build(EMBEDDER, seed=0)(IDS, context=object()),
        ConfigError,
        "Encoder: Head('embed') needs whole rows, but context parallel shards them; train this head without it",
    ),
    (
        lambda: build(EMBEDDER, seed=0)(IDS, targets=IDS),
        ConfigError,
        "Encoder: targets need Head('masked-lm'), this model has Head('embed'); compute the loss from its outputs",
    ),
    (
        lambda: build(ENCODER, seed=0)(IDS, types=torch.zeros(2, 3)),
        DataError,
        "token types must be whole numbers [batch, tokens], got torch.float32 [2, 3]",
    ),
    (
        lambda: build(ENCODER, seed=0)(IDS, types=torch.zeros(2, 3, dtype=torch.bool)),
        DataError,
        "token types must be whole numbers [batch, tokens], got torch.bool [2, 3]",
    ),
    (
        lambda: build(ENCODER, seed=0)(IDS, types=torch.zeros(3, dtype=torch.int64)),
        DataError,
        "token types must be whole numbers [batch, tokens], got torch.int64 [3]",
    ),
    (
        lambda: EncoderDecoder(DECODER),
        ConfigError,
        "EncoderDecoder: the spec has no encoder; give ModelSpec(encoder=...)",
    ),
    (
        lambda: pair(IDS, IDS[:1]),
        ConfigError,
        "EncoderDecoder: 2 sources but 1 targets; give one source per target",
    ),
    (
        lambda: Head("embed", pool="middle"),  # type: ignore[arg-type]
        ConfigError,
        "Head: there is no pool 'middle'; there are first, last, mean",
    ),
    (lambda: Head("states", unit=True), ConfigError, """Head: unit=True is for task "embed", got 'states'"""),
    (
        lambda: ModelSpec.of(
            "transformer",
            **SMALL,
            encoder=ModelSpec.of("bert", **{**SMALL, "width": 32}).with_head(Head("states")),
        ),
        ConfigError,
        "ModelSpec: the encoder's width 32 must equal the decoder's, 16",
    ),
    (
        lambda: ModelSpec.of(
            "transformer",
            **SMALL,
            shared_embedding=True,
            encoder=ModelSpec.of("bert", **{**SMALL, "vocab": 33}).with_head(Head("states")),
        ),
        ConfigError,
        "ModelSpec: shared_embedding=True needs equal sizes, got 33 x 16 and 32 x 16",
    ),
    (
        lambda: build(DECODER.with_mixer(LinearAttentionSpec("elu+1")), seed=0).make_cache(1, slack=2),
        ConfigError,
        "slack=2: layers of linear attention keep one state of all tokens, which cannot be trimmed; use slack=0",
    ),
    (
        lambda: attention().keys(torch.zeros(2, 3, 8)),
        ConfigError,
        "Attention: memory must be [batch, keys, 16], got [2, 3, 8]",
    ),
    (
        lambda: attention().keys(torch.zeros(3, 16)),
        ConfigError,
        "Attention: memory must be [batch, keys, 16], got [3, 16]",
    ),
    (
        lambda: attention()(
            torch.zeros(1, 2, 16),
            memory=attention().keys(torch.zeros(1, 3, 16)),
            memory_tokens=Tokens.range(3),
        ),
        ConfigError,
        "Attention: memory is KeyValues, which hold their tokens; drop memory_tokens=",
    ),
    (
        lambda: block(order="parallel", cross_attn=attention()),
        ConfigError,
        """Block: cross-attention needs order "pre" or "post", got 'parallel'""",
    ),
    (
        lambda: block()(torch.zeros(1, 2, 16), memory=attention().keys(torch.zeros(1, 3, 16))),
        ConfigError,
        "Block: memory is given, but there is no cross_attn",
    ),
    (
        lambda: block(cross_attn=attention())(torch.zeros(1, 2, 16)),
        ConfigError,
        "Block: cross_attn needs memory=",
    ),
    (
        lambda: attention()(torch.zeros(1, 2, 16), tokens=Tokens.range(2), cache=sums()),
        ConfigError,
        "Attention: cache must keep keys and values, got a PagedStates; give a layer of PagedCache(spec, patterns)",
    ),
    (
        lambda: GlobalAttention(16, 2, pattern=Full())(
            torch.zeros(1, 2, 16), tokens=Tokens.range(2), cache=sums()
        ),
        ConfigError,
        "GlobalAttention: caches and cross-attention are not supported, since global queries see later tokens and "
        "have their own keys; drop cache= and memory=",
    ),
    (
        lambda: compress_model(build(DECODER, seed=0)),
        ConfigError,
        "compression needs weights in bfloat16 on the CPU, got torch.float32 on cpu; load the model in bf16",
    ),
    (
        lambda: cost.prefill_flops(EMBEDDER, 8, logits=8),
        ConfigError,
        "prefill_flops: Head('embed') gives one output per row, so logits must be 1, got 8",
    ),
    (
        lambda: cost.prefill_flops(DECODER, 8, source=8),
        ConfigError,
        "source=8 is for encoder-decoders only, but this model is of kind decoder; leave source out",
    ),
    (
        lambda: must_decode(ENCODER, "kv_bytes"),
        ConfigError,
        "kv_bytes is for decoding token by token, which an encoder does not do; use prefill_flops, "
        "activation_bytes or training_bytes",
    ),
    (
        lambda: pairs(Causal(), 8, tokens=Tokens.range(9)),
        PatternError,
        "pairs: tokens describe 9 slots, but n is 8",
    ),
    (
        lambda: pairs(Causal(), 8, last=2, tokens=Tokens.range(8)),
        PatternError,
        "pairs: last=2 cannot be combined with tokens; drop one of them",
    ),
    (
        lambda: pairs(Evens(), 1 << 20),
        PatternError,
        f"pairs: {Evens()} has no closed-form count; its pairs are counted one by one, up to "
        "n = 131072, got n = 1048576",
    ),
    (
        lambda: parse("Causal(\ud800)"),
        PatternError,
        "pattern 'Causal(\\ud800)': cannot be read at character 8: surrogates not allowed",
    ),
    (
        lambda: quantize_weights(torch.ones(4, 4), 3),
        ValueError,
        "weights are quantized to 8 or 4 bits, not to 3",
    ),
    (lambda: SoftCap(0.0), PatternError, "SoftCap: cap must be greater than 0, got 0.0"),
    (lambda: SoftCap(float("nan")), PatternError, "SoftCap: cap must be greater than 0, got nan"),
    (
        lambda: ALiBi().select_heads(torch.tensor([0])),
        PatternError,
        "ALiBi: selecting some heads needs the slopes of all; pass slopes=alibi_slopes(heads)",
    ),
    (
        lambda: stretch_context(
            ModelSpec.of("llama", **SMALL, positions=Rotary(pairing="halves", trainable=True)),
            {},
            "linear",
            2.0,
        ),
        ConfigError,
        "stretch_context: this model's frequencies are trained, but ",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSED, ids=[text[:48] for _, _, text in REFUSED])
def test_what_cannot_be_is_refused_and_said(
    call: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        call()
