"""The bytes that a forward pass is said to keep for the backward are those that autograd keeps, for every kind of
model (rows 91 and 109).

Measured with `saved_tensors_hooks`: the bytes of the distinct storages that are saved, without parameters. Not in the
formula are cosines and sines (8 d bytes for each position of one row, if all rows have the same positions), ids, a few
bytes per row, and the sums of linear attention: up to 2 % in these small models.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.attention.delta import DeltaSpec, SSDSpec
from headway.attention.linear_attention import LinearAttentionSpec
from headway.models import FAMILIES, EncoderDecoder, Head, Model, ModelSpec, build, cost
from headway.models.mixers import Softmax
from headway.nn import products
from headway.nn.block import BESIDE, ORDERS
from headway.patterns import Causal
from headway.positions import NoPositions, Relative, Rotary, SpecialOrthogonal, T5Bias
from headway.tokens import Tokens
from tests.checkpoints.shares import share
from tests.pairwise import chequered
from tests.saved import saved_tensors, storage_sizes

TOLERANCE = 0.02
SIZE: dict[str, Any] = {"vocab": 97, "width": 48, "layers": 2, "heads": 4, "hidden": 80}
GROUPED = {**SIZE, "kv_heads": 2}
TOKENS, SOURCE, ROWS = 96, 64, 3
IDS = torch.randint(97, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


def kept(run: Callable[[], Tensor], model: torch.nn.Module) -> int:
    """Returns the bytes of the distinct storages that autograd keeps for `run`, without parameters and buffers."""
    with saved_tensors() as saved:
        assert run().isfinite()
    return sum(storage_sizes(saved, (*model.parameters(), *model.buffers())))


def loss_of(model: Model, ids: Tensor, fused: bool) -> Tensor:
    """Returns a loss over all tokens: the model's own fused loss, or one of all logits at once."""
    spec, options = model.spec, {}
    sources = (ids[:, :SOURCE],) if isinstance(model, EncoderDecoder) else ()
    if spec.global_projections:
        options["tokens"] = Tokens.range(ids.shape[1]).with_global([3])
    if fused and spec.head.needs_vocab:
        return model(*sources, ids, targets=ids, **options).total
    out = model(*sources, ids, **options).float()
    if not spec.head.needs_vocab and spec.head.task not in ("tag", "answer"):
        return out.sum()
    return F.cross_entropy(out.flatten(0, -2), (ids % out.shape[-1]).flatten())


def llamas() -> Iterator[ModelSpec]:
    for change in (
        *({"order": o, "norm": n} for o in ORDERS for n in ("rms", "layer")),
        {"final_norm": False},
        *({"hidden": 0, "layers": 4, "order": o, "dropout": 0.1} for o in ORDERS if o not in BESIDE),
        *({"order": o, "first_norm": False, "residual_scale": 0.5} for o in ("pre", "sandwich")),
        {"order": "output", "final_norm": False, "qk_norm": "all"},
        {"order": "sandwich", "norm_offset": 1.0, "qk_norm": "head", "score_cap": 5.0},
        {"logit_cap": 3.0},
        {"order": "post", "final_norm": False, "embedding_norm": True, "norm": "layer"},
        {"embedding_norm": True, "logit_scale": 0.5},
        {"activation_dropout": 0.1},
        {"activation_dropout": 0.1, "activation": "relu", "gated": False},
        {"dropout": 0.1, "final_dropout": True},
        {"sink_logit": True},
        {"gate": "head", "sink_logit": True},
        {"gate": "channel"},
        {"qk_norm": "head", "positions": NoPositions()},
        {"qk_norm": "head", "positions": Rotary(pairing="halves", dims=6, values=True)},
        {"positions": Rotary(pairing="adjacent", trainable=True)},
        {"positions": Rotary(pairing="halves", trainable=True)},
        {"positions": SpecialOrthogonal(Rotary(pairing="halves"))},
    ):
        yield ModelSpec.of("llama", **{**GROUPED, **change})


def linears() -> Iterator[ModelSpec]:
    for positions in (NoPositions(), Rotary(pairing="halves")):
        for feature in ("elu+1", "cosine", "softmax"):
            llama = ModelSpec.of("llama", **GROUPED, positions=positions)
            yield llama.with_mixer(LinearAttentionSpec(feature))
    roformer = ModelSpec.of("roformer", **SIZE)
    for features in (("elu+1",), ("cosine",), ("softmax",), ("softmax", "softmax over tokens")):
        yield roformer.with_mixer(LinearAttentionSpec(*features))


def hybrids() -> Iterator[ModelSpec]:
    for delta in (
        DeltaSpec(heads=4, key_heads=2, head_dim=8),
        DeltaSpec(heads=2, key_heads=2, head_dim=8, value_dim=20, gate="sigmoid", decay="channel"),
        SSDSpec(heads=4, key_heads=1, head_dim=16, value_dim=8),
        SSDSpec(heads=4, key_heads=2, head_dim=16, value_dim=24, conv_bias=False),
        SSDSpec(
            heads=4,
            key_heads=2,
            head_dim=16,
            value_dim=24,
            norm=False,
            least_step=0.1,
            factors=(2, 1, 1, 1, 0.5),
        ),
    ):
        yield ModelSpec.of("llama", **GROUPED).with_mixer(delta)
        yield ModelSpec.of(
            "llama", **GROUPED, mixers=(delta, Softmax()), qk_norm="head", gate="channel", dropout=0.1
        )
    for change in ({}, {"qk_norm": "head", "dropout": 0.1, "mlp_scale": 0.5, "mlp_gate_scale": 2.0}):
        beside = Softmax(beside=SSDSpec(heads=4, key_heads=2, head_dim=16, value_dim=8), factors=(0.5, 2.0))
        yield ModelSpec.of("llama", **{**GROUPED, **change}, mixers=beside)
    for order in ("pre", "post", "sandwich", "output"):
        fields = {"layers": 4, "layer_hidden": (None, 0, 24, None), "order": order, "dropout": 0.1}
        yield ModelSpec.of("llama", **{**GROUPED, **fields})


def heads() -> Iterator[ModelSpec]:
    bert = ModelSpec.of("bert", **SIZE, embedding_width=24)
    yield bert
    yield replace(bert, embedding_norm=False, dropout=0.0)
    yield replace(bert, head=Head("masked-lm"), embedding_width=None)
    yield replace(bert, head=Head("masked-lm", dense="relu"), norm="rms", tied=False)
    for head in (
        Head("tag", labels=("a", "b", "c")),
        Head("answer"),
        Head("embed", pool="mean"),
        Head("states"),
        Head("classify", labels=("a", "b"), dense="tanh"),
    ):
        yield bert.with_head(head)


def pairs() -> Iterator[ModelSpec]:
    for family in ("transformer", "bart", "mbart", "t5", "marian"):
        yield ModelSpec.of_pair(family, **SIZE)
    yield ModelSpec.of_pair("transformer", **{**SIZE, "hidden": 0, "layers": 4})
    yield ModelSpec.of_pair("llama", **GROUPED, qk_norm="head", positions=T5Bias())


def measured(spec: ModelSpec, dtype: torch.dtype, fused: bool, backend: str) -> tuple[int, int]:
    model = build(spec, seed=0, dtype=dtype, backend=backend if spec.softmax_layers else "auto")
    actual = kept(lambda: loss_of(model, IDS, fused), model)
    source = SOURCE if isinstance(model, EncoderDecoder) else None
    expected = cost.activation_bytes(
        spec,
        TOKENS,
        ROWS,
        dtype,
        source=source,
        scores="stored" if backend == "dense" else "recomputed",
    )
    if not fused and spec.head.needs_vocab:
        # log-probabilities of all tokens in float32 and, if they are capped, the logits in `dtype`
        expected["logits"] = (4 + dtype.itemsize * (spec.logit_cap is not None)) * spec.vocab * TOKENS * ROWS
    return actual, sum(expected.values())


@chequered("specs,dtype", [llamas, linears, hybrids, heads, pairs], [torch.float32, torch.bfloat16])
def test_rows_91_and_109_kept_bytes_are_what_autograd_keeps(
    specs: Callable[[], Iterator[ModelSpec]], dtype: torch.dtype
) -> None:
    for spec in specs():
        for fused, backend in ((True, "auto"), (False, "auto"), (False, "dense")):
            actual, expected = measured(spec, dtype, fused, backend)
            assert abs(actual - expected) < TOLERANCE * expected, (spec, fused, backend, actual / expected)


@share("family", FAMILIES, 0, 3)
def test_row_91_so_they_are_in_every_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured without the rows of zeros that products of few rows are padded with, as experts have few rows here."""
    monkeypatch.setattr(products, "filled_rows", lambda rows: rows)
    spec = ModelSpec.of(family, **SIZE)
    spec = replace(spec, positions=Relative(8)) if family == "nezha" else spec
    for backend in ("auto", "dense"):
        if backend == "auto" and family == "nezha":
            continue  # "auto" is "dense" for these scores in rows this short, which stores them
        actual, expected = measured(spec, torch.float32, False, backend)
        assert abs(actual - expected) < TOLERANCE * expected, (backend, actual / expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_norm_behind_the_embedding_keeps_what_autograd_keeps_for_it(dtype: torch.dtype) -> None:
    """To the byte: what a model with the norm keeps beyond the same model without it."""
    specs = [
        ModelSpec.of("llama", **GROUPED, norm="layer", embedding_norm=with_norm)
        for with_norm in (True, False)
    ]
    (actual_with, expected_with), (actual_without, expected_without) = (
        measured(spec, dtype, False, "sdpa") for spec in specs
    )
    assert actual_with - actual_without == expected_with - expected_without > 0


def test_a_fused_loss_keeps_a_matrix_in_place_of_the_logits() -> None:
    spec = ModelSpec.of("llama", **GROUPED)
    assert cost.activation_bytes(spec, 512, 2)["logits"] == 4 * 97 * 48


def test_a_long_target_keeps_the_log_probabilities_of_one_chunk() -> None:
    spec = ModelSpec.of_pair("transformer", **{**SIZE, "vocab": 200_000})
    short, long = (cost.activation_bytes(spec, n, 64)["logits"] for n in (1, 512))
    assert short == 64 * 4 * 200_000 == long


def test_four_times_the_length_is_sixteen_times_the_scores() -> None:
    spec = ModelSpec.of("llama", **GROUPED)
    short, long = (cost.activation_bytes(spec, n, scores="stored") for n in (512, 2048))
    assert long["scores"] == 16 * short["scores"]
    for cause in ("norms", "attention", "feed-forward"):
        assert long[cause] == 4 * short[cause]
    assert cost.activation_bytes(spec, 2048)["scores"] == 0


def test_checkpointed_blocks_keep_one_block_and_the_inputs() -> None:
    spec = ModelSpec.of("llama", **{**GROUPED, "layers": 5}, patterns=Causal())
    by_cause = cost.activation_bytes(spec, 64, 2, gradient_checkpointing="block")
    of_one_layer = cost.activation_bytes(ModelSpec.of("llama", **{**GROUPED, "layers": 1}), 64, 2)
    assert {k: v for k, v in by_cause.items() if k != "inputs"} == of_one_layer
    assert by_cause["inputs"] == 5 * 2 * 64 * 48 * 4
    pair = ModelSpec.of_pair("bart", **{**SIZE, "layers": 4})
    checkpointed, plain = (
        cost.activation_bytes(pair, 64, 2, gradient_checkpointing=g) for g in ("block", "none")
    )
    assert sum(checkpointed.values()) < sum(plain.values())


def test_a_source_is_of_an_encoder_decoder() -> None:
    for spec, kind in ((ModelSpec.of("llama", **SIZE), "decoder"), (ModelSpec.of("bert", **SIZE), "encoder")):
        with pytest.raises(
            ValueError, match=rf"source=3 is for encoder-decoders only, but this model is of kind {kind}"
        ):
            cost.activation_bytes(spec, 8, source=3)
    pair = ModelSpec.of_pair("bart", **SIZE)
    assert cost.activation_bytes(pair, 8, source=8) == cost.activation_bytes(pair, 8)
