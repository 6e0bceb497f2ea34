"""`headway plan`: the report adds up, names the backends that would run, and says what does not fit."""

from typing import Any

import pytest
import torch

from headway.attention import select
from headway.attention.linear_attention import LinearAttentionSpec
from headway.errors import ConfigError
from headway.models import Head, ModelSpec, build, catalog, cost
from headway.models.cost.planning import Machine, Report, plan
from headway.patterns import Causal, Window
from tests.native.presence import pretend

BOX = Machine(name="box", memory=32 << 30, bandwidth=20e9, peak=500e9)


def report_of(spec: ModelSpec, **options: Any) -> Report:
    return plan(spec, **{"model": "m", "context": 4096, "batch": 2, "machine": BOX, **options})


def test_a_report_adds_up() -> None:
    spec = catalog.spec("llama-2-7b")
    report = report_of(spec)
    assert report.parameter_count == 6_738_415_616
    assert report.weights == 2 * 6_738_415_616
    assert report.kv == 2 * 4096 * cost.kv_bytes_per_token(spec) == cost.kv_bytes_stored(spec, 4096, batch=2)
    assert report.needed == report.weights + report.kv + report.working
    assert report.fits
    assert report.moved == cost.weight_bytes_read(spec, batch=2) + report.kv
    assert report.step_flops == 2 * cost.decode_flops(spec, 4096)
    assert report.step_seconds == report.moved / 20e9
    assert report.bound == "memory"
    assert report.tokens_per_second == 2 / report.step_seconds
    assert report.prefill_seconds == 2 * cost.prefill_flops(spec, 4096) / 500e9
    assert report.decoding == report.weights + report.kv + report_of(spec, context=1).working
    assert report.checkpointed < sum(report.training.values())
    assert report.trained == 7 * report.weights  # fp32 beside bf16: gradients of both, two moments
    assert report.adapted == 14 * 39_976_960  # 32 layers of 16 (4 * 2 * 4096 + 3 * (4096 + 11008))


@pytest.mark.parametrize("native", [True, False])
def test_layers_of_different_kinds_are_told_apart(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, native)
    spec = catalog.spec("qwen3-0.6b").with_patterns(
        [Window.last(1024), Window.last(1024), Causal(), Causal()]
    )
    report = report_of(spec, context=32768, batch=4)
    window, full = report.layers
    assert (window.pattern, window.cache.what, window.slots, window.reads) == (
        "Window.last(1024)",
        "window",
        1024,
        1024,
    )
    assert (full.pattern, full.cache.what, full.slots, full.reads) == ("Causal()", "growing", 32768, 32768)
    assert window.layers[:3] == (0, 1, 4)
    assert len(window.layers) == len(full.layers) == 14
    assert full.kv_stored == 32 * window.kv_stored
    assert report.kv == window.kv_stored + full.kv_stored == cost.kv_bytes_stored(spec, 32768, batch=4)
    assert window.kv_read + full.kv_read == cost.kv_bytes_read(spec, 32768, batch=4)
    assert window.prefill.what == ("native" if native else "banded")
    assert full.prefill.what == ("native" if native else "sdpa")


def test_grouped_heads_move_less_and_large_batches_are_bound_by_compute() -> None:
    """Row 37."""
    spec = catalog.spec("llama-1-7b")
    moved = []
    for kv_heads in (32, 8, 1):
        fields = {f: getattr(spec, f) for f in ("vocab", "width", "layers", "heads", "head_dim", "hidden")}
        report = report_of(ModelSpec.of("llama", kv_heads=kv_heads, **fields))
        assert report.kv == 2 * 4096 * 2 * 32 * kv_heads * 128 * 2
        moved.append(report.moved)
    assert moved[0] > moved[1] > moved[2]
    large_batch = report_of(catalog.spec("llama-2-70b"), context=16, batch=256, machine=BOX)
    assert large_batch.bound == "compute"
    assert large_batch.step_seconds == large_batch.step_flops / 500e9


@pytest.mark.parametrize("context", [4, 12])
def test_the_backends_named_are_the_backends_run(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec.of_depth(2, 50, patterns=[Window.last(5), Causal()])
    report = plan(spec, model="m", context=context, dtype=torch.float32, machine=BOX)
    ran: list[str] = []
    pick = select.pick

    def note(*arguments: Any) -> Any:
        backend = pick(*arguments)
        ran.append(backend.name)
        return backend

    monkeypatch.setattr(select, "pick", note)
    select.call_cache.forget()
    model = build(spec, seed=0).eval()
    ids = torch.zeros(1, context, dtype=torch.int64)
    cache = model.make_cache(1)
    with torch.no_grad():
        model(ids)
        assert ran == [layer.prefill.what for layer in report.layers]
        for t in range(context):
            ran.clear()
            model(ids[:, t : t + 1], cache=cache)
    assert ran == [layer.decode.what for layer in report.layers]


def test_what_does_not_fit_is_said() -> None:
    report = report_of(catalog.spec("llama-2-70b"))
    assert not report.fits
    tight = Machine(name="b", memory=67 << 28, bandwidth=1e9, peak=1e9)
    unchunked = report_of(catalog.spec("llama-2-7b"), machine=tight)
    chunked = report_of(catalog.spec("llama-2-7b"), machine=tight, prefill_chunk=512)
    assert chunked.fits
    assert not unchunked.fits
    short = report_of(catalog.spec("llama-2-7b"), context=512)
    assert (
        chunked.working == short.working + 2 * 4096 * 128 * 2
    )  # the keys and values of a head are packed again
    assert unchunked.needed - chunked.needed == unchunked.working - chunked.working


@pytest.mark.parametrize(
    ("model", "chunk", "said"),
    [("bert-base-uncased", 64, "of kind encoder"), ("llama-2-7b", 0, "at least 1")],
)
def test_only_prompts_are_read_in_chunks(model: str, chunk: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        report_of(catalog.spec(model), prefill_chunk=chunk)


def test_a_longer_context_than_was_trained_is_said() -> None:
    long = report_of(catalog.spec("llama-2-7b"), context=32768)
    assert "a context of 32768 exceeds the 4096 tokens that the model was trained on" in " ".join(long.notes)
    assert "exceeds" not in " ".join(report_of(catalog.spec("llama-2-7b")).notes)
    windows = catalog.spec("llama-2-7b").with_patterns(Window.last(65))
    assert "cannot depend on more than 2049" in " ".join(report_of(windows).notes)


@pytest.mark.parametrize("context", [10**8, 10**11])
def test_a_plan_is_arithmetic_at_any_length(context: int) -> None:
    """The plan of a row of 100 million tokens is computed without a number for each of them."""
    spec = catalog.spec("mistral-7b").with_patterns([Window.last(4096), Causal()])
    report = report_of(spec, context=context, batch=1)
    window, full = 4096 * 4097 // 2 + (context - 4096) * 4096, context * (context + 1) // 2
    assert cost.attention_pairs(spec, context) == 32 * 16 * (window + full)
    assert report.prefill_flops == cost.prefill_flops(spec, context)
    assert [layer.reads for layer in report.layers] == [4096, context]
    assert not report.fits


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"2 rows of 10{15} tokens exceed the limit of 1099511627776 .* lower"
    ):
        report_of(catalog.spec("llama-2-7b"), context=10**15)
    with pytest.raises(ValueError, match="context, source and batch must be at least 1, got 0, None and 2"):
        report_of(catalog.spec("llama-2-7b"), context=0)
    limited = ModelSpec.of_depth(2, 50, max_context=512, context=512)
    with pytest.raises(ValueError, match="takes rows of at most 512 tokens, got 4096; lower the context"):
        report_of(limited)
    small: dict[str, Any] = {"vocab": 32, "width": 16, "layers": 1, "heads": 2, "hidden": 32}
    encoder = ModelSpec.of("bert", **small, max_context=64).with_head(Head("states"))
    with pytest.raises(ValueError, match="at most 64 tokens, got 65; lower the source"):
        report_of(ModelSpec.of("transformer", **small, encoder=encoder), context=8, source=65)
    with pytest.raises(ValueError, match="source=8 is for encoder-decoders only"):
        report_of(catalog.spec("llama-2-7b"), source=8)


def test_row_91_an_encoder_has_a_plan_without_steps() -> None:
    spec = catalog.spec("bert-base-uncased")
    report = report_of(spec, context=512)
    assert (report.kv, report.moved, report.step_flops, report.tokens_per_second) == (0, None, None, None)
    assert report.prefill_flops == 2 * cost.prefill_flops(spec, 512, logits=512)
    assert report.training == cost.training_bytes(spec, 512, 2, torch.bfloat16)
    (layer,) = report.layers
    assert (layer.slots, layer.cache, layer.decode) == (None, None, None)
    assert layer.prefill is not None


def test_row_91_an_encoder_decoder_has_one_for_its_sources_and_steps() -> None:
    spec = catalog.spec("transformer-base")
    report = report_of(spec, context=128, source=256)
    assert spec.encoder is not None
    memory = cost.memory_bytes(spec, 256, batch=2)
    assert report.kv == memory + cost.kv_bytes_stored(spec, 128, batch=2)
    assert report.moved == cost.weight_bytes_read(spec, batch=2) + memory + cost.kv_bytes_read(
        spec, 128, batch=2
    )
    assert report.step_flops == 2 * cost.decode_flops(spec, 128, 256)
    assert report.prefill_flops == 2 * cost.prefill_flops(spec, 1, source=256)
    assert report.training["encoder"] > 0
    assert [layer.cache is None for layer in (*report.layers, *report.encoder_layers)] == [False, True]
    assert report_of(spec, context=128) == report_of(spec, context=128, source=128)


def test_linear_attention_is_planned_without_backends() -> None:
    spec = catalog.spec("gpt2").with_mixer(LinearAttentionSpec())
    report = report_of(spec, context=512)
    assert report.kv == cost.kv_bytes_stored(spec, 512, batch=2) == report.layers[0].kv_stored
    assert (report.layers[0].prefill, report.layers[0].decode) == (None, None)
    assert "linear attention (elu+1, rotary numerator): a state of one size at any length" in " ".join(
        report.notes
    )
