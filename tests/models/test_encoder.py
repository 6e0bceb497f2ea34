"""Encoders and encoder-decoders that are built of the same blocks: what they see, cost and refuse."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from headway.attention.linear_attention import LinearAttentionSpec
from headway.errors import ConfigError, DataError
from headway.models import Encoder, EncoderDecoder, Head, ModelSpec, build, cost, mark_global
from headway.models.head import Pool
from headway.patterns import Causal, Full, Global, Window
from headway.positions import (
    Learned,
    LinearBias,
    NoPositions,
    PerLayer,
    Relative,
    Rotary,
    Sinusoidal,
    SpecialOrthogonal,
    T5Bias,
)
from headway.tokens import Tokens

SIZE: dict[str, Any] = {"vocab": 50, "width": 32, "layers": 2, "heads": 4, "hidden": 48}
IDS = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))
HALVES = Rotary(pairing="halves")
SCHEMES = [
    NoPositions(),
    Learned(1024),
    Sinusoidal(),
    HALVES,
    Rotary(pairing="adjacent", dims=4),
    Rotary(pairing="adjacent", trainable=True),
    Rotary(pairing="halves", values=True),
    SpecialOrthogonal(HALVES),
    Relative(3),
    Relative(3, sinusoidal=True),
    LinearBias(),
    T5Bias(8, 20),
    PerLayer((HALVES, NoPositions())),
]


def encoder(family: str = "bert", **fields: Any) -> ModelSpec:
    return ModelSpec.of(
        family, **{**SIZE, "dropout": 0.0, "attention_dropout": 0.0, "init_std": 0.3, **fields}
    )


def seq2seq(**fields: Any) -> ModelSpec:
    size = {**SIZE, "dropout": 0.0, "init_std": 0.3}
    encoder_spec = ModelSpec.of("transformer", **size, causal=False, patterns=Full(), head=Head("states"))
    return ModelSpec.of("transformer", **size, encoder=encoder_spec, **fields)


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "spec",
    [
        encoder("bert"),
        encoder("roformer", embedding_width=16),
        encoder("longformer").with_head(Head("classify", labels=("a", "b", "c"), dense="tanh")),
        encoder("roberta").with_head(Head("tag", labels=("x",))),
        encoder("nezha").with_head(Head("answer")),
        encoder("bert").with_head(Head("embed", pool="mean")),
        seq2seq(),
        seq2seq(tied=True, shared_embedding=True),
        ModelSpec.of("gpt2", **SIZE),
        ModelSpec.of("falcon", **SIZE),
        ModelSpec.of("t5", **SIZE),
    ],
    ids=lambda s: f"{s.family}-{s.head.task}-{s.tied}",
)
def test_parameters_are_counted(spec: ModelSpec) -> None:
    assert cost.parameter_count(spec) == count(build(spec, device="meta"))
    assert sum(cost.parameters(spec).values()) == cost.parameter_count(spec)


@pytest.mark.parametrize("positions", SCHEMES, ids=str)
def test_every_scheme_decodes_as_it_sees_all_at_once(positions: Any) -> None:
    spec = replace(ModelSpec.of_depth(2, 50, init_std=0.2), positions=positions)
    model = build(spec, seed=1, dtype=torch.float64).eval()
    assert cost.parameter_count(spec) == count(model)
    with torch.no_grad():
        full = model(IDS)
        cache = model.make_cache(2)
        steps = torch.cat([model(IDS[:, i : i + 1], cache=cache) for i in range(7)], 1)
    assert float((full - steps).abs().max()) < 1e-12 * float(full.abs().max())


@pytest.mark.parametrize("positions", SCHEMES, ids=str)
def test_every_scheme_in_an_encoder_ignores_padding(positions: Any) -> None:
    model = build(encoder(positions=positions), seed=2, dtype=torch.float64).eval()
    tokens = Tokens.from_lengths([7, 4])
    with torch.no_grad():
        batch, alone = model(IDS, tokens=tokens), model(IDS[1:, :4])
    assert float((batch[1, :4] - alone[0]).abs().max()) < 1e-12 * float(alone.abs().max())


@pytest.mark.parametrize("kind", ["elu+1", "cosine"])
def test_linear_attention_by_one_line(kind: str) -> None:
    decoder = ModelSpec.of_depth(2, 50, init_std=0.2)
    model = build(decoder.with_mixer(LinearAttentionSpec(kind)), seed=1, dtype=torch.float64).eval()
    assert model.state_dict().keys() == build(decoder, device="meta").state_dict().keys()
    with torch.no_grad():
        full, cache = model(IDS), model.make_cache(2)
        steps = torch.cat([model(IDS[:, i : i + 1], cache=cache) for i in range(7)], 1)
    assert float((full - steps).abs().max()) < 1e-12 * float(full.abs().max())
    roformer = build(encoder("roformer").with_mixer(LinearAttentionSpec(kind)), seed=1).eval()
    assert roformer(IDS).shape == (2, 7, 50)


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        (Head("masked-lm", dense="gelu"), (2, 7, 50)),
        (Head("masked-lm"), (2, 7, 50)),
        (Head("masked-lm", dense="gelu", bias=False), (2, 7, 50)),
        (Head("classify", labels=("a", "b", "c"), dense="tanh"), (2, 3)),
        (Head("classify", labels=("a", "b"), pool="mean"), (2, 2)),
        (Head("tag", labels=("a", "b")), (2, 7, 2)),
        (Head("answer"), (2, 7, 2)),
        (Head("embed", pool="mean", unit=True), (2, 32)),
        (Head("embed", dense="tanh"), (2, 32)),
        (Head("states"), (2, 7, 32)),
    ],
    ids=str,
)
def test_every_head(head: Head, shape: tuple[int, ...]) -> None:
    model = build(encoder().with_head(head), seed=3).eval()
    assert isinstance(model, Encoder)
    assert cost.parameter_count(model.spec) == count(model)
    out = model(IDS, tokens=Tokens.from_lengths([7, 4]))
    assert out.shape == shape
    if head.unit:
        assert torch.allclose(out.norm(dim=-1), torch.ones(2))


def test_pooling_is_over_tokens() -> None:
    model = build(encoder().with_head(Head("embed", pool="mean")), seed=3, dtype=torch.float64).eval()
    states = model.hidden(IDS[1:, :4])
    left = Tokens.from_lengths([4], total=7, side="left")
    pooled = model(torch.cat((IDS[1:, 4:], IDS[1:, :4]), 1), tokens=left)
    assert torch.allclose(pooled, states.mean(1))
    first = build(encoder().with_head(Head("embed")), seed=3, dtype=torch.float64).eval()
    assert torch.allclose(first(torch.cat((IDS[1:, 4:], IDS[1:, :4]), 1), tokens=left), states[:, 0])
    last = build(encoder().with_head(Head("embed", pool="last")), seed=3, dtype=torch.float64).eval()
    right = Tokens.from_lengths([4], total=7)
    assert torch.allclose(last(IDS[1:], tokens=right), states[:, 3])
    assert torch.allclose(last(torch.cat((IDS[1:, 4:], IDS[1:, :4]), 1), tokens=left), states[:, 3])


@pytest.mark.parametrize("family", ["bert", "longformer"])
@pytest.mark.parametrize("pool", get_args(Pool))
def test_packed_documents_are_pooled_one_by_one(family: str, pool: Pool) -> None:
    patterns = Window.around(1) | Global() if family == "longformer" else None
    spec = encoder(family, **({} if patterns is None else {"patterns": patterns}))
    head = Head("classify", labels=("a", "b"), dense="tanh", pool=pool)
    model = build(spec.with_head(head), seed=3, dtype=torch.float64).eval()
    tokens = mark_global(Tokens.packed([[3, 4], [1, 5]]), "classify")
    packed = model(IDS, tokens=tokens)
    alone = [
        model(IDS[row : row + 1, begin:end], tokens=mark_global(Tokens.range(end - begin), "classify"))
        for row, begin, end in ((0, 0, 3), (0, 3, 7), (1, 0, 1), (1, 1, 6))
    ]
    assert torch.allclose(packed, torch.cat(alone))


@pytest.mark.parametrize("ties", [{}, {"tied": True}, {"tied": True, "shared_embedding": True}], ids=str)
def test_row_15_and_25_a_decoder_reads_the_encoder_s_last_states(ties: dict[str, bool]) -> None:
    model = build(seq2seq(**ties), seed=5, dtype=torch.float64).eval()
    assert isinstance(model, EncoderDecoder)
    source = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    source_tokens = Tokens.from_lengths([9, 6])
    memory_keys: list[Tensor] = []
    model.encoder.norm = None
    handles = [
        block.cross_attn.register_forward_pre_hook(  # type: ignore[union-attr]
            lambda module, args, kwargs: memory_keys.append(kwargs["memory"].k), with_kwargs=True
        )
        for block in model.decoder.blocks
    ]
    with torch.no_grad():
        full = model(source, IDS, source_tokens=source_tokens)
        memory = model.encode(source, tokens=source_tokens)
        for handle in handles:
            handle.remove()
        for block, keys in zip(model.decoder.blocks, memory_keys, strict=True):
            assert block.cross_attn is not None
            expected = block.cross_attn.k_proj(memory.states).unflatten(-1, (4, 8)).transpose(1, 2)
            assert torch.equal(keys, expected)
        keys, cache = model.memory_keys(memory), model.make_cache(2)
        steps = torch.cat(
            [model.logits(model.hidden(IDS[:, i : i + 1], memory=keys, cache=cache)) for i in range(7)], 1
        )
        assert float((full - steps).abs().max()) < 1e-12 * float(full.abs().max())
        alone = model(source[1:, :6], IDS[1:])
        assert float((full[1] - alone[0]).abs().max()) < 1e-12 * float(full.abs().max())


def test_row_14_a_target_does_not_see_what_follows() -> None:
    model = build(seq2seq(), seed=5, dtype=torch.float64).eval()
    source, changed = IDS, IDS.clone()
    changed[:, 4:] = 7
    assert torch.equal(model(source, IDS)[:, :4], model(source, changed)[:, :4])


def test_row_21_three_matrices_are_one() -> None:
    spec = seq2seq(tied=True, shared_embedding=True, embedding_scale=32**0.5)
    model = build(spec, seed=6)
    assert isinstance(model, EncoderDecoder)
    names = [name for name, _ in model.named_parameters() if "embed_tokens" in name or "lm_head" in name]
    assert names == ["decoder.embed_tokens.weight"]
    model(IDS, IDS).sum().backward()
    grad = model.decoder.embed_tokens.weight.grad  # type: ignore[union-attr]
    assert grad is not None
    assert set(grad.abs().sum(1).nonzero().flatten().tolist()) == set(
        range(50)
    )  # every row by the output layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: encoder(causal=True, patterns=Causal()), r"a decoder needs Head\('lm'\)"),
        (lambda: encoder(head=Head()), "an encoder cannot have"),
        (lambda: encoder(norm="batch"), "there is no norm 'batch'"),
        (lambda: encoder(order="sandwhich"), "there is no order 'sandwhich'"),
        (lambda: encoder(token_types=-1), "token_types must be a whole number of at least 0"),
        (lambda: encoder(embedding_scale=0.0), "embedding_scale must be a finite number above 0"),
        (lambda: encoder(head=Head("states")), "tied=True needs an output layer over the vocab"),
        (lambda: seq2seq(embedding_width=16), "embedding_width=16 needs a dense layer"),
        (
            lambda: ModelSpec.of("llama", **SIZE, shared_embedding=True),
            "shared_embedding=True needs encoder=",
        ),
        (lambda: replace(seq2seq(), encoder=encoder()), "encoder= needs a decoder"),
        (lambda: seq2seq(order="sandwich"), 'needs a decoder of order "pre" or "post", got .sandwich'),
        (
            lambda: ModelSpec.of("llama", **SIZE, global_projections=True),
            "global_projections needs an encoder",
        ),
        (
            lambda: encoder(mixers=LinearAttentionSpec(), patterns=Window.around(2)),
            r"layer 0 is linear attention, whose pattern must be Full\(\)",
        ),
        (
            lambda: encoder(mixers=LinearAttentionSpec(), attention_dropout=0.1),
            "no attention weights to drop",
        ),
        (lambda: Head("classify"), "needs the names of its labels"),
        (lambda: Head("answer", labels=("a",)), "takes no labels"),
        (lambda: Head("tag", labels=("a",), dense="gelu"), "takes no dense layer"),
        (lambda: Head("masked"), "did you mean"),
        (lambda: Encoder(ModelSpec.of("llama", **SIZE)), "headway.models.build"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_wrong_calls_are_refused() -> None:
    model = build(encoder(), seed=0).eval()
    assert isinstance(model, Encoder)
    with pytest.raises(DataError, match=r"token types must lie in 0\.\.1"):
        model(IDS, types=torch.full_like(IDS, 2))
    with pytest.raises(DataError, match=r"token types \[2, 3\] must have the shape of ids"):
        model(IDS, types=IDS[:, :3] * 0)
    with pytest.raises(ConfigError, match="one output per row"):
        build(encoder().with_head(Head("embed")), seed=0)(IDS, logits_for=slice(0, 1))
    with pytest.raises(ConfigError, match="has no token types"):
        build(encoder(token_types=0), seed=0)(IDS, types=IDS * 0)
