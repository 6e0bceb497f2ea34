"""Costs that are computed from a spec are those counted by brute force, by torch and by the caches."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headway.cache import PAGE
from headway.models import Decoder, Head, ModelSpec, build, catalog, cost
from headway.nn import Experts
from headway.patterns import Causal, Pattern, PerHead, Sink, Window, visible
from headway.positions import Learned
from headway.tokens import Tokens

ALL: tuple[Pattern, ...] = (
    Causal(),
    Window.last(5),
    Window.last(4, step=3),
    Window.last(6) | (Causal() & Sink(2)),
    PerHead(Window.last(2), Window.last(9), Causal() & Sink(3) | Window.last(1), Window.last(2)),
)


def spec_of(patterns: Pattern | tuple[Pattern, ...] = ALL, layers: int = 5, **changes: object) -> ModelSpec:
    fields = {"vocab": 97, "width": 40, "heads": 4, "kv_heads": 2, "head_dim": 12, "hidden": 56, **changes}
    return ModelSpec.of("llama", layers=layers, patterns=patterns, **fields)


def sees(pattern: Pattern, n: int) -> Tensor:
    tokens = Tokens.range(n)
    return visible(pattern, tokens, tokens)[0].expand(4, -1, -1)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tied": True},
        {"qkv_bias": True},
        {"out_bias": True, "mlp_bias": True},
        {"hidden": 0, "mlp_bias": True},
        {"qk_norm": "head", "kv_heads": 1},
        {"sink_logit": True, "gate": "head"},
        {"gate": "channel"},
        {"positions": Learned(4096)},
        {"experts": Experts(count=4, top=2)},
        {
            "layers": 6,
            "patterns": Causal(),
            "experts": (None, Experts(count=4, top=2, shared=8, shared_gate=True)),
        },
    ],
    ids=str,
)
def test_parameters_are_those_of_the_module(change: dict[str, object]) -> None:
    spec = spec_of(**change)
    model = build(spec, device="meta")
    by_place = cost.parameters(spec)
    counts = dict.fromkeys(by_place, 0)
    for name, parameter in model.named_parameters():
        place = (
            "norms"
            if "norm" in name
            else "embedding"
            if "embed" in name
            else "attention"
            if "self_attn" in name
            else "experts"
            if "mlp.experts." in name
            else "feed-forward"
            if "mlp" in name
            else "output layer"
        )
        counts[place] += parameter.numel()
    assert counts == by_place
    assert cost.parameter_count(spec) == sum(counts.values())


CARDS = {
    # names: parameters of the released checkpoints (tied output layers counted once)
    "llama-1-7b": 6_738_415_616,
    "llama-1-13b": 13_015_864_320,
    "llama-1-33b": 32_528_943_616,
    "llama-1-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-34b": 33_743_970_304,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-4b": 4_022_468_096,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b-v0.3": 7_248_023_552,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "starcoder2-3b": 3_030_371_328,
    "santacoder": 1_124_886_528,
    "starcoderbase": 15_517_456_384,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "falcon-180b": 178_557_088_768,
}


@pytest.mark.parametrize("name", CARDS)
def test_row_28_catalog_counts_on_the_meta_device(name: str) -> None:
    """Row 28: the module has as many parameters as the released checkpoint."""
    assert sum(p.numel() for p in build(catalog.spec(name), device="meta").parameters()) == CARDS[name]


SMALLEST = (
    *("transformer-base", "llama-3.2-1b", "mistral-7b", "qwen2-0.5b"),
    *("qwen3-0.6b", "bert-base-chinese", "roberta-base", "nezha-cn-base", "roformer-chinese-char-small"),
    *("gpt2", "santacoder", "starcoder2-3b", "falcon-7b"),
)
"""One model of each family without experts; WoBERT's family is BERT's."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SMALLEST else pytest.mark.slow) for name in catalog.names()],
)
def test_the_count_of_a_spec_is_that_of_its_module(name: str) -> None:
    spec = catalog.spec(name)
    assert sum(p.numel() for p in build(spec, device="meta").parameters()) == cost.parameter_count(spec)


def test_row_28_llama_shares_keys_at_34b_and_70b_only() -> None:
    sizes = [n for n in catalog.names() if n.startswith(("llama-1", "llama-2"))]
    grouped = [n for n in sizes if catalog.spec(n).kv_heads < catalog.spec(n).heads]
    assert grouped == ["llama-2-34b", "llama-2-70b"]
    assert {catalog.spec(n).trained_context for n in sizes if "-1-" in n} == {2048}
    assert {catalog.spec(n).trained_context for n in sizes if "-2-" in n} == {4096}
    assert catalog.spec("LLaMA-2-70B").layout.group == 8


def test_an_unknown_name_is_answered_with_a_near_one() -> None:
    with pytest.raises(
        ValueError, match=r'no model \'lama-2-7b\' \(did you mean "llama-2-7b"\?\); it has .*llama-1-7b'
    ):
        catalog.spec("lama-2-7b")


def counted(model: Decoder, run: object) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()  # type: ignore[operator]
    return int(counter.get_total_flops())


@pytest.mark.parametrize("n", [1, 7, 64])
def test_operations_equal_torch_s_count(n: int) -> None:
    """torch counts whole score matrices (dense backend); the pairs that patterns hide are subtracted."""
    spec = spec_of()
    model = build(spec, seed=0, backend="dense").eval()
    ids = torch.randint(97, (1, n))
    spared = 5 * 4 * n * n - cost.attention_pairs(spec, n)
    assert counted(model, lambda: model(ids)) - spared * 4 * 12 == cost.prefill_flops(spec, n, logits=n)
    for logits in (1, 5):
        masks = [*(sees(p, n) for p in ALL[:-1]), sees(ALL[-1], n)[:, -logits:]]
        spared = sum(mask.numel() - int(mask.sum()) for mask in masks)
        last = slice(-min(logits, n), None)
        assert counted(model, partial(model, ids, logits_for=last)) - spared * 4 * 12 == cost.prefill_flops(
            spec, n, logits=min(logits, n)
        )


def test_decode_operations_equal_torch_s_count() -> None:
    spec = spec_of(Causal())
    model = build(spec, seed=0, backend="dense").eval()
    cache = model.make_cache(1)
    ids = torch.randint(97, (1, PAGE))  # dense attention multiplies whole pages
    with torch.no_grad():
        model(ids[:, :-1], cache=cache)
    assert counted(model, lambda: model(ids[:, -1:], cache=cache)) == cost.decode_flops(spec, PAGE)


@pytest.mark.parametrize("n", [1, 64])
def test_operations_of_experts_are_those_of_the_chosen(n: int) -> None:
    """torch also counts the weighted sum of the outputs of K experts, 2 K M for each row."""
    experts = Experts(count=6, top=2, hidden=24, shared=8, shared_gate=True, router_bias=True)
    spec = spec_of(Causal(), layers=2, experts=(None, experts))
    model = build(spec, seed=0, backend="dense").eval()
    ids = torch.randint(97, (1, n))
    spared = (2 * 4 * n * n - cost.attention_pairs(spec, n)) * 4 * 12 + 2 * n * 2 * 40
    assert counted(model, lambda: model(ids)) - spared == cost.prefill_flops(spec, n, logits=n)
    with torch.no_grad():
        (last,) = (block.mlp for block in model.model.blocks[1:])
        read = [p for e in last.gate(torch.randn(1, 40))[0][0].tolist() for p in last.experts[e].parameters()]
    assert sum(p.numel() for p in read) == 2 * 3 * 24 * 40
    idle = 4 * 3 * 24 * 40
    assert cost.active_parameters(spec) == cost.parameter_count(spec) - idle
    assert cost.weight_bytes_read(spec) == 2 * (cost.parameter_count(spec) - idle - 96 * 40)


def test_several_rows_read_as_many_experts_as_they_are_expected_to_choose() -> None:
    spec = spec_of(Causal(), layers=1, experts=Experts(count=6, top=2, hidden=56))
    many_rows, generator = cost.weight_bytes_read(spec, batch=1000), torch.Generator().manual_seed(0)
    chosen = torch.rand(2000, 3, 6, generator=generator).topk(2).indices.flatten(1)
    distinct = sum(len({*row}) for row in chosen.tolist()) / 2000
    expert_bytes = 2 * 3 * 56 * 40
    three_rows = cost.weight_bytes_read(spec, batch=3) + (1000 - 3) * 80
    assert abs((many_rows - three_rows) / expert_bytes - (6 - distinct)) < 0.05


def test_training_counts_two_products_more_per_product() -> None:
    spec = spec_of(Causal())
    assert cost.train_flops(spec, 64) * 64 == 3 * cost.prefill_flops(spec, 64, logits=64)
    model = build(spec, seed=0)
    ids = torch.randint(97, (1, 64))
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    linear = 3 * (cost.prefill_flops(spec, 64, logits=64) - 4 * 12 * cost.attention_pairs(spec, 64))
    counts = counter.get_flop_counts()["Global"]
    products = sum(v for op, v in counts.items() if "mm" in str(op))
    assert products == linear


@pytest.mark.parametrize("n", [1, 5, 6, 40])
def test_pairs_and_keys_by_brute_force(n: int) -> None:
    spec = spec_of()
    masks = [sees(p, n) for p in ALL]
    assert cost.attention_pairs(spec, n) == sum(int(m.sum()) for m in masks)
    seen = sum(int(m[:, -1].sum()) for m in masks)
    assert cost.decode_flops(spec, n) == 2 * (cost.matrix_weights(spec) + 40 * 97) + 4 * 12 * seen
    read = sum(int(m[:, -1].unflatten(0, (2, 2)).any(1).sum()) for m in masks)
    assert cost.kv_bytes_read(spec, n, torch.float32, batch=3) == 3 * 2 * 12 * 4 * read


def test_windows_grow_linearly_and_full_attention_quadratically() -> None:
    """Row 110, counted: pairs(2 n) / pairs(n)."""
    full, window = spec_of(Causal()), spec_of(Window.last(64))
    for n in (1024, 2048):
        assert 3.99 < cost.attention_pairs(full, 2 * n) / cost.attention_pairs(full, n) < 4
        assert 2 < cost.attention_pairs(window, 2 * n) / cost.attention_pairs(window, n) < 2.05
    # Row 95: a dilated window costs the same and sees further.
    dilated = spec_of(Window.last(64, step=4))
    assert cost.attention_pairs(dilated, 1000) < cost.attention_pairs(window, 1000)
    assert cost.receptive_field(dilated) == 1 + 4 * ((cost.receptive_field(window) or 0) - 1)


@pytest.mark.parametrize("n", [1, 64, 72, 150])
def test_stored_bytes_are_those_of_the_caches(n: int) -> None:
    spec = spec_of()
    model = build(spec, seed=0).eval()
    cache = model.make_cache(3)
    with torch.no_grad():
        for chunk in torch.zeros(3, n, dtype=torch.int64).split(40, 1):
            model(chunk, cache=cache)
    assert cache.slots == cost.cache_slots(spec, n)
    assert cache.nbytes == cost.kv_bytes_stored(spec, n, torch.float32, batch=3)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_cache_bytes_shrink_with_kv_heads(kv_heads: int) -> None:
    """Row 51: exactly g / h, stored and read."""
    full, shared = spec_of(Causal(), kv_heads=4), spec_of(Causal(), kv_heads=kv_heads)
    for count_bytes in (cost.kv_bytes_stored, cost.kv_bytes_read):
        assert count_bytes(shared, 128) * 4 == count_bytes(full, 128) * kv_heads
    assert cost.kv_bytes_per_token(shared, torch.float32) == 5 * 2 * kv_heads * 12 * 4
    assert cost.kv_bytes_stored(shared, 128, torch.float32) == 128 * cost.kv_bytes_per_token(
        shared, torch.float32
    )


def test_a_tied_output_layer_is_read_and_an_embedding_is_looked_up() -> None:
    spec, tied = spec_of(), spec_of(tied=True)
    rest = cost.parameter_count(spec) - 2 * 97 * 40
    assert cost.weight_bytes_read(spec, torch.float32, batch=3) == 4 * (rest + 97 * 40 + 3 * 40)
    assert cost.weight_bytes_read(tied, torch.float32, batch=3) == 4 * (rest + 97 * 40)


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_of_fewer_columns_is_looked_up_and_its_projection_is_read(tied: bool) -> None:
    spec = spec_of(embedding_width=16, head=Head("lm", dense="gelu"), positions=Learned(4096), tied=tied)
    looked_up = 4096 * 16 + (0 if tied else 97 * 16)
    rows = 3 * (1 if tied else 2)
    read = cost.parameter_count(spec) - looked_up + rows * 16
    assert cost.weight_bytes_read(spec, torch.float32, batch=3) == 4 * read
