"""Acts 1 and 3 of the demo on small models: the numbers are what they are said to be."""

from pathlib import Path

import pytest
import torch

from headway.cache import PAGE, PageClass
from headway.models import Decoder, ModelSpec, build, catalog, cost
from headway.patterns import Causal, Sink, Window, visible
from headway.tokens import Tokens
from headway_lab.demo import acts


def small(*patterns) -> Decoder:  # type: ignore[no-untyped-def]
    spec = ModelSpec.of_depth(2, 64, width=32, heads=4, kv_heads=2, head_dim=8, hidden=64, patterns=list(patterns),
                              family="ministral")  # fmt: skip
    model = build(spec, seed=0, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(15)  # weights of standard deviation 0.3: with 0.02 all predictions are alike
    return model


def test_the_pictures_show_every_pattern_with_its_name() -> None:
    text = acts.pictures(11)
    for name, _ in acts.PATTERNS:
        assert name in text
    assert max(map(len, text.splitlines())) <= 100
    tokens = Tokens.range(11).with_global(list(acts.GLOBAL))
    allowed = sum(int(visible(pattern, tokens, tokens).sum()) for _, pattern in acts.PATTERNS)
    assert text.count("■") == allowed
    assert "#" not in text
    assert acts.pictures(11, unicode=False).count("#") == allowed


def test_blocks_of_different_heights_stand_side_by_side() -> None:
    text = acts.side_by_side([("a", "1\n2\n3"), ("bb", "4")], gap=2)
    assert text.splitlines() == ["a  bb", "1  4", "2", "3"]
    assert acts.side_by_side([("a" * 30, "x"), ("b" * 30, "y")], width=40).splitlines()[:2] == ["a" * 30, "x"]


def test_the_picture_file_is_a_picture(tmp_path: Path) -> None:
    acts.save_pictures(tmp_path / "patterns.png", count=6)
    assert (tmp_path / "patterns.png").read_bytes().startswith(b"\x89PNG")


def test_kv_bytes_are_those_of_the_model_card() -> None:
    mha, gqa, alternating, windowed = acts.kv_bytes().values()
    spec = catalog.spec("llama-2-7b")
    per_token = 2 * 32 * 32 * 128 * 2  # keys and values, layers, heads, dims, bytes
    assert cost.kv_bytes_per_token(spec, torch.bfloat16) == per_token
    assert mha == [1024 * per_token, 32768 * per_token]
    assert gqa == [n // 4 for n in mha]
    assert alternating[1] == (gqa[1] + windowed[1]) // 2
    assert windowed[1] == windowed[0] == 1024 * per_token // 4
    text = acts.kv_table()
    assert "16.00 GiB" in text
    assert "0.8%" in text


def test_cached_equals_full_up_to_rounding_and_notices_a_wrong_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(Window.last(8), Causal())
    ids = torch.randint(0, 64, (1, 141))
    single, double = (acts.cached_equals_full(model, ids, dtype) for dtype in (torch.float32, torch.float64))
    assert single["tokens"] == 141
    assert single["largest"] == pytest.approx(double["largest"], rel=1e-3)
    assert 0 < double["difference"] < 1e-11
    assert double["difference"] < single["difference"] < 1e-3
    assert double["dtype"] == "float64"

    monkeypatch.setattr(PageClass, "kept", lambda _, page, length, *__: (page + 1) * PAGE >= length)
    assert acts.cached_equals_full(model, ids, torch.float64)["difference"] > 1e-3


def test_the_cache_sizes_and_the_full_layer_grows() -> None:
    rows = acts.cache_sizes(small(Window.last(8) | (Causal() & Sink(2)), Causal()), window=32, chunk=3)
    assert [row["tokens"] for row in rows] == [32, 64, 128, 256]
    assert [row["growing"] for row in rows] == [64, 64, 128, 256]
    assert [row["window"] for row in rows] == [64, 64, 128, 128]  # pages of the last 8 and of 2 sinks
    per_slot = 2 * 2 * 8 * 8  # keys and values, kv heads, dims, bytes of float64
    assert [row["nbytes"] for row in rows] == [
        per_slot * (n + m) for n, m in ((64, 64), (64, 64), (128, 128), (128, 256))
    ]
    assert [row["nbytes_growing"] for row in rows] == [per_slot * 2 * n for n in (64, 64, 128, 256)]
    assert "slots, windowed layer" in acts.cache_table(rows)


def test_the_window_is_timed_against_an_equal_result() -> None:
    row = acts.time_window(tokens=64, repeats=1)
    assert row.case == "window n=64 forward"
    assert (set(row.peers), row.notes) == ({"mask"}, [])
