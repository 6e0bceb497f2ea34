"""Operations on a folder: what is written, what is measured, and what stays untouched if something fails."""

import math

import pytest
import torch

from headway.checkpoints import build_model, load_folder, load_model, save_folder
from headway.data import Rows, TokenFile, encode_corpus
from headway.errors import CheckpointError, ConfigError, DataError
from headway.models import Head, ModelSpec, build
from headway.patterns import Full
from headway.surgery import (
    Change,
    Text,
    compare_pools,
    operate,
    pool_heads,
    put_window,
    quantize_folder,
    row_length,
    stretch_context,
    verdict,
)
from headway.surgery.operation import Row
from headway.text import Tokenizer, train_bpe
from headway.train.evaluation import evaluate
from tests.data import data_path

WORDS = "one two three four five six seven eight nine ten eleven twelve "


@pytest.fixture
def source(tmp_path):
    """Returns a folder of a small model in bfloat16, with its tokenizer and one more file."""
    tokenizer = train_bpe([WORDS], 280)
    spec = ModelSpec.of("llama", vocab=300, width=16, layers=2, heads=4, kv_heads=4, hidden=24, init_std=0.3,
                        trained_context=32, max_context=32, tied=True)  # fmt: skip
    save_folder(tmp_path / "m", build(spec, seed=0, dtype=torch.bfloat16).eval(), tokenizer=tokenizer,
                generation={"temperature": 0.5})  # fmt: skip
    (tmp_path / "m" / "README.md").write_text("mine")
    (tmp_path / "words.txt").write_text(WORDS * 20)
    return tmp_path / "m"


def to_2(folder):
    return Change(*pool_heads(folder.spec, folder.tensors, 2))


def loss(folder, tokens, context):
    return evaluate(load_model(folder, dtype=torch.float32), Rows(tokens, context))


def test_the_report_is_what_the_two_folders_measure_by_themselves(source, tmp_path):
    folder = load_folder(source)
    with Text.read(tmp_path / "words.txt", folder) as text:
        result = operate(folder, tmp_path / "n", to_2(folder), text=text)
    encode_corpus(tmp_path / "words.txt", Tokenizer.load(source), tmp_path / "words.tokens")
    tokens = TokenFile(tmp_path / "words.tokens")
    before, after = (loss(path, tokens, 32) for path in (source, tmp_path / "n"))
    assert result.context == 32
    assert result.tokens == before.tokens == len(tokens) - 1
    for side, measured in ((result.before, before), (result.after, after)):
        assert side.loss == pytest.approx(measured.loss, rel=1e-6)
        assert side.bits_per_byte == pytest.approx(measured.bits_per_byte, rel=1e-6)
        assert side.perplexity == pytest.approx(math.exp(measured.loss), rel=1e-6)
    assert [(p.first, p.last, p.tokens) for p in result.before.positions] == [
        (b.first, b.last, b.tokens) for b in before.positions
    ]
    assert [p.loss for p in result.after.positions] == pytest.approx(
        [b.loss for b in after.positions], rel=1e-6
    )
    row = torch.from_numpy(tokens.tokens[:32].astype("int64"))[None]
    with torch.no_grad():
        old, new = (load_model(path, dtype=torch.float32)(row) for path in (source, tmp_path / "n"))
    (measured,) = result.differences
    assert (measured.tokens, measured.probed) == (32, 32)
    assert measured.difference == pytest.approx(float((new - old).abs().max()), rel=1e-4)
    assert measured.largest == pytest.approx(float(old.abs().max()), rel=1e-4)
    assert result.before.parameters - result.after.parameters == 2 * 2 * 2 * 4 * 16
    assert (result.before.kv_bytes_per_token, result.after.kv_bytes_per_token) == (
        2 * 2 * 16 * 2,
        2 * 2 * 8 * 2,
    )
    assert result.before.kv_bytes_stored == 64 * result.before.kv_bytes_per_token
    old, new = "4 query, 4 key/value (MHA), 4 dims each", "4 query, 2 key/value (GQA), 4 dims each"
    assert result.changed == (("heads", old, new),)
    assert (result.dtype, result.transformers) == ("bfloat16", "loads it")


def test_the_way_back_differs_by_as_much(source, tmp_path):
    folder = load_folder(source)
    forward = operate(folder, tmp_path / "n", to_2(folder))
    backward = operate(load_folder(tmp_path / "n"), tmp_path / "o", Change(folder.spec, dict(folder.tensors)))
    assert backward.differences[0].difference == forward.differences[0].difference > 0
    assert (backward.before, backward.after) == (forward.after, forward.before)


def test_the_new_folder_is_complete_and_the_old_one_untouched(source, tmp_path):
    before = {p.name: p.read_bytes() for p in source.iterdir()}
    folder = load_folder(source)
    operate(folder, tmp_path / "n", to_2(folder))
    assert {p.name: p.read_bytes() for p in source.iterdir()} == before
    new = load_folder(tmp_path / "n")
    assert new.spec.kv_heads == 2
    assert {entry.dtype for entry in new.tensors.forms.values()} == {torch.bfloat16}
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "n" / name).read_bytes() == before[name]
    assert not (tmp_path / "n" / "README.md").exists()
    assert dict(new.generation) == dict(load_folder(source).generation)


def test_what_is_there_is_not_replaced_unasked(source, tmp_path):
    folder = load_folder(source)
    operate(folder, tmp_path / "n", to_2(folder))
    with pytest.raises(CheckpointError, match="exists; choose another name, or use --overwrite"):
        operate(folder, tmp_path / "n", to_2(folder))
    operate(folder, tmp_path / "n", Change(*pool_heads(folder.spec, folder.tensors, 1)), overwrite=True)
    assert load_folder(tmp_path / "n").spec.kv_heads == 1


def test_what_is_written_is_a_gguf_file_where_its_name_says_so(source, tmp_path):
    """It has the pairing of its architecture and, as a folder does, a tokenizer and a measurement."""
    folder = load_folder(source)
    result = operate(folder, tmp_path / "n.gguf", to_2(folder))
    assert [row[0] for row in result.changed] == ["positions", "heads", "format"]
    assert result.transformers is None
    expected = operate(folder, tmp_path / "n", to_2(folder)).differences[0]
    assert result.differences[0].difference == pytest.approx(expected.difference, rel=1e-4)
    new = load_folder(tmp_path / "n.gguf")
    assert (new.format, new.spec.kv_heads, new.spec.positions.pairing) == ("gguf", 2, "adjacent")
    assert Tokenizer.load(tmp_path / "n.gguf").encode(WORDS) == Tokenizer.load(source).encode(WORDS)
    with pytest.raises(ConfigError, match="quantized weights are written into a folder"):
        quantize_folder(folder, tmp_path / "q.gguf", "int8")
    assert not (tmp_path / "q.gguf").exists()


def test_a_folder_can_be_replaced_by_its_own_change(source):
    folder = load_folder(source)
    result = operate(folder, source, to_2(folder), overwrite=True)
    assert load_folder(source).spec.kv_heads == 2
    assert (source / "README.md").read_text() == "mine"
    assert result.differences[0].difference > 0


@pytest.mark.parametrize(
    ("text", "context", "error"),
    [
        (WORDS, 64, "the longest document has .* tokens, and the change begins beyond 40"),
        (WORDS * 20, 40, "rows of 40 tokens cannot show this change, which begins beyond 40 tokens"),
    ],
)
def test_a_measurement_that_shows_nothing_is_refused_and_nothing_is_written(
    source, tmp_path, text, context, error
):
    (tmp_path / "words.txt").write_text(text)
    folder = load_folder(source)
    with Text.read(tmp_path / "words.txt", folder) as words, pytest.raises(DataError, match=error):
        operate(
            folder,
            tmp_path / "n",
            Change(*put_window(folder.spec, folder.tensors, 40)),
            text=words,
            context=context,
            beyond=40,
        )
    assert not list(tmp_path.glob("*n*/config.json"))
    assert not (tmp_path / "n").exists()


def test_a_failing_measurement_leaves_nothing(source, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise DataError("the measurement fails")

    monkeypatch.setattr("headway.surgery.operation.load_folder", fails)
    folder = load_folder(source)
    with pytest.raises(DataError, match="the measurement fails"):
        operate(folder, tmp_path / "n", to_2(folder))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "words.txt"]


def test_longer_rows_are_measured_beyond_what_the_old_model_took(source, tmp_path):
    folder = load_folder(source)
    with Text.read(tmp_path / "words.txt", folder) as text:
        result = operate(
            folder,
            tmp_path / "n",
            Change(*stretch_context(folder.spec, folder.tensors, "linear", 4)),
            text=text,
            beyond=32,
        )
    assert result.context == 128
    assert [p.first for p in result.before.positions] == [0, 16, 32, 64]
    assert all(a.loss != b.loss for a, b in zip(result.before.positions, result.after.positions, strict=True))
    (context,) = (change for change in result.changed if change[0] == "context")
    assert "max context 32" in context[1]
    assert "max context 128" in context[2]


def test_windows_are_told_layer_by_layer_and_bound_what_is_stored(source, tmp_path):
    folder = load_folder(source)
    result = operate(
        folder,
        tmp_path / "n",
        Change(*put_window(folder.spec, folder.tensors, 6, sinks=2)),
        beyond=8,
    )
    assert result.changed == (("patterns", "Causal()", "Window.last(6) | Causal() & Sink(2)"),)
    stored, per_token = result.before.kv_bytes_stored, result.before.kv_bytes_per_token
    assert (stored, result.after.kv_bytes_stored) == (64 * per_token,) * 2, "a page"
    assert result.transformers == "refuses it: it cannot express its patterns"
    assert (
        load_folder(tmp_path / "n").spec.patterns
        == put_window(load_folder(source).spec, {}, 6, sinks=2)[0].patterns
    )


def test_rows_are_long_enough_to_show_the_change():
    spec = ModelSpec.of_depth(1, 300, context=256)
    assert row_length(spec, spec) == 256
    assert row_length(spec, spec, beyond=255) == 256
    assert row_length(spec, spec, beyond=256) == 512
    long = ModelSpec.of_depth(1, 300, context=4096)
    assert row_length(spec, long) == 2048
    assert row_length(spec, long, beyond=2048) == 4096
    assert row_length(spec, ModelSpec.of_depth(1, 300, context=256, max_context=300), beyond=256) == 300


def test_pools_are_compared_on_one_text(source, tmp_path):
    folder = load_folder(source)
    with Text.read(tmp_path / "words.txt", folder) as text:
        rows = compare_pools(folder.spec, folder.tensors, 2, text, 32, seeds=(5, 6))
        result = operate(folder, tmp_path / "n", to_2(folder), text=text)
    assert [(row.pool, row.seed) for row in rows] == [
        ("mean", None),
        ("first", None),
        ("random", 5),
        ("random", 6),
    ]
    assert len({row.loss for row in rows}) == 4
    assert rows[0].loss == pytest.approx(
        result.after.loss, rel=2e-3
    )  # the pools in float32, the folder in bfloat16


@pytest.mark.slow
def test_row_48_a_trained_model_whose_table_says_otherwise(tmp_path):
    """stories260K, pooled from 4 KV heads to 2, on its own samples: one head of two does better than their mean."""
    from headway.api import load
    from headway.checkpoints import convert

    home = data_path("weights/stories260K")
    convert(home / "stories260K.bin", tmp_path / "m", tokenizer=Tokenizer.load(home / "tok512.bin"))
    model, stories = load(tmp_path / "m"), tmp_path / "stories"
    stories.mkdir()
    for seed in range(4):
        story = model.generate("Once upon a time", max_new_tokens=200, temperature=1.0, seed=seed)
        (stories / f"{seed}.txt").write_text(str(story))
    folder = load_folder(tmp_path / "m")
    with Text.read(stories, folder) as text:
        rows = compare_pools(folder.spec, folder.tensors, 2, text, 256)
        unpooled = text.evaluate(load_model(tmp_path / "m"), 256)
    assert unpooled.loss < min(row.loss for row in rows)
    assert verdict(rows) == "the table says otherwise: first < mean < random"


def test_outputs_of_translators_are_compared_on_a_row_that_is_source_and_target(tmp_path):
    size = {"vocab": 60, "width": 16, "layers": 1, "heads": 4, "kv_heads": 4, "hidden": 24, "max_context": 32}
    encoder = ModelSpec.of("transformer", **size, causal=False, patterns=Full(), head=Head("states"))
    save_folder(tmp_path / "m", build(ModelSpec.of("transformer", **size, encoder=encoder), seed=0).eval())
    folder = load_folder(tmp_path / "m")
    row = torch.arange(32) % 60
    result = operate(folder, tmp_path / "n", to_2(folder), rows=[Row(row)])
    before, after = (build_model(load_folder(tmp_path / name))(row[None], row[None]) for name in "mn")
    (difference,) = result.differences
    assert difference.difference == pytest.approx(float((after - before).detach().abs().max()))
    assert difference.difference > 0
