"""Row 106: encoders for short rows are made long, and what stays the same."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from headway.checkpoints import load_folder, save_folder
from headway.checkpoints.restore import restore
from headway.cli import run
from headway.errors import CheckpointError, ConfigError, DataError
from headway.models import Encoder, Head, ModelSpec, build, cost
from headway.patterns import Global, Window
from headway.positions import Learned, Rotary
from headway.surgery import lengthen, make_longformer
from headway.text import Tokenizer
from headway.tokens import Tokens
from tests.checkpoints.hf import off

VOCAB, SHORT, WINDOW, LONG = 47, 24, 16, 96
SIZE: dict[str, Any] = {
    "vocab": VOCAB, "width": 16, "layers": 2, "heads": 4, "hidden": 24, "init_std": 0.3, "dropout": 0.0,
    "attention_dropout": 0.0, "trained_context": SHORT,
}  # fmt: skip
TABLES = {"bert": Learned(SHORT), "roberta": Learned(SHORT, offset=2)}
ROUNDING = 1e-6
"""Relative to the largest output: both models round in float32, and sum in different orders."""
Parts = tuple[ModelSpec, dict[str, Tensor]]


def make(family: str = "roberta", dtype: torch.dtype = torch.float64, **fields: Any) -> Parts:
    positions = {"positions": TABLES[family]} if family in TABLES else {}
    head = fields.pop("head", None)
    spec = ModelSpec.of(family, **{**SIZE, **positions, **fields})
    spec = spec if head is None else spec.with_head(head)
    return spec, build(spec, seed=1, dtype=dtype).state_dict()


def outputs(parts: Parts, ids: Tensor, tokens: Tokens | None = None) -> Tensor:
    spec, state = parts
    model = restore(spec, state, dtype=next(iter(state.values())).dtype)
    assert isinstance(model, Encoder)
    with torch.no_grad():
        out: Tensor = model(ids, tokens=tokens)
    return out


def ids(count: int, rows: int = 2) -> Tensor:
    return torch.randint(3, VOCAB, (rows, count), generator=torch.Generator().manual_seed(2))


HEADS = {
    "masked": None,
    "classify": Head("classify", labels=("a", "b", "c"), dense="tanh"),
    "tag": Head("tag", labels=("a", "b")),
    "answer": Head("answer"),
    "states": Head("states"),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("family", ["bert", "roberta", "roformer", "nezha"])
def test_row_106_rows_within_half_a_window_are_as_they_were(family: str, head: Head | None) -> None:
    """This holds for up to w / 2 + 1 tokens, whichever are global; with one more the ends no longer see each other."""
    old = make(family, head=head)
    new = make_longformer(*old, LONG, WINDOW)
    count = WINDOW // 2 + 1
    for marked in ([], [0], [1, 4], list(range(count))):
        tokens = Tokens.range(count).with_global([marked])
        assert off(outputs(new, ids(count), tokens), outputs(old, ids(count))) < 1e-12
    assert off(outputs(new, ids(count + 1)), outputs(old, ids(count + 1))) > 1e-6


def test_the_table_is_copied_end_to_end_and_the_rows_before_it_stay() -> None:
    """512 rows eight times are 4096 (the paper's numbers); RoBERTa's two rows that no token reads remain two."""
    spec, state = make("roberta", positions=Learned(512, offset=2), trained_context=512)
    new, changed = make_longformer(spec, state, 4096)
    old, table = state["model.embed_positions.weight"], changed["model.embed_positions.weight"]
    assert new.positions == Learned(4096, offset=2)
    assert torch.equal(table, torch.cat((old[:2], *[old[2:]] * 8)))
    assert (new.trained_context, new.context_limit, new.family) == (4096, 4096, "longformer")
    assert set(new.patterns) == {Window.around(256) | Global()}
    cut = make_longformer(spec, state, 1000)[1]["model.embed_positions.weight"]
    assert torch.equal(cut, table[:1002])


def test_bert_s_table_is_given_a_row_that_no_token_reads() -> None:
    spec, state = make("bert")
    new, changed = make_longformer(spec, state, LONG)
    old, table = state["model.embed_positions.weight"], changed["model.embed_positions.weight"]
    assert new.positions == Learned(LONG, offset=1)
    assert torch.equal(table, torch.cat((torch.zeros(1, 16, dtype=old.dtype), *[old] * 4)))


def test_global_projections_begin_as_copies_and_nothing_else_changes() -> None:
    spec, state = make("roberta")
    new, changed = make_longformer(spec, state, LONG)
    added = changed.keys() - state.keys()
    assert len(added) == 2 * 3 * 2
    for name in added:
        assert torch.equal(changed[name], state[name.replace("_global_proj", "_proj")])
        assert changed[name].data_ptr() != state[name.replace("_global_proj", "_proj")].data_ptr()
    unchanged = state.keys() - {"model.embed_positions.weight"}
    assert all(torch.equal(changed[name], state[name]) for name in unchanged)
    assert (
        cost.parameter_count(new) == cost.parameter_count(spec) + 2 * 3 * (16 * 16 + 16) + (LONG - SHORT) * 16
    )


def test_windows_by_layer_and_the_field_that_they_give() -> None:
    new, state = make_longformer(*make("roberta"), LONG, [4, 8])
    assert new.patterns == (Window.around(2) | Global(), Window.around(4) | Global())
    row, altered = ids(LONG, 1), ids(LONG, 1)
    altered[0, 50] = (row[0, 50] + 1) % VOCAB
    before, after = outputs((new, state), row), outputs((new, state), altered)
    reached = (before != after).any(-1)[0].nonzero().flatten().tolist()
    assert (reached[0], reached[-1]) == (50 - 6, 50 + 6)
    tokens = Tokens.range(LONG).with_global([0])
    assert (outputs((new, state), row, tokens) != outputs((new, state), altered, tokens)).any(-1).all()


@pytest.mark.parametrize(
    ("family", "name", "changes"),
    [
        ("Roberta", "ForMaskedLM", {"pad_token_id": 1}),
        ("Roberta", "ForSequenceClassification", {"pad_token_id": 1}),
        ("Bert", "ForMaskedLM", {}),
        ("Bert", "ForSequenceClassification", {}),
        ("Bert", "ForTokenClassification", {}),
        ("Bert", "ForQuestionAnswering", {}),
        ("Bert", "Model", {}),
    ],
)
def test_what_it_writes_transformers_reads_and_finds_unchanged(
    family: str, name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """A short-row class of transformers and, after our surgery, its Longformer agree on short, padded rows."""
    rows = SHORT + (2 if family == "Roberta" else 0)
    model_class, config = getattr(transformers, family + name), getattr(transformers, family + "Config")
    size = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 24, "max_position_embeddings": rows, "initializer_range": 0.3}  # fmt: skip
    torch.manual_seed(0)
    options = {"add_pooling_layer": False} if name == "Model" else {}
    old = model_class(config(**size, **changes), **options).eval()
    old.save_pretrained(tmp_path / "a")
    result = lengthen(load_folder(tmp_path / "a"), tmp_path / "b", LONG, WINDOW)
    assert result.transformers == "loads it"
    new = getattr(transformers, "Longformer" + name).from_pretrained(tmp_path / "b", **options).eval()
    pad = new.config.pad_token_id
    assert pad == (1 if family == "Roberta" else 0)
    row = ids(9)
    mask = torch.ones_like(row)
    row[1, 6:], mask[1, 6:] = pad, 0
    glob = torch.zeros_like(row)
    glob[:, [0, 3]] = 1
    with torch.no_grad():
        old_outputs = old(row, attention_mask=mask)
        new_outputs = new(row, attention_mask=mask, global_attention_mask=glob)
    for expected, actual in zip(list(old_outputs.values())[:2], list(new_outputs.values())[:2], strict=True):
        valid = mask.bool() if expected.shape[1:2] == mask.shape[1:] else slice(None)
        assert off(actual[valid], expected[valid]) < 10 * ROUNDING


def tokenizer(path: Path) -> None:
    """Saves a tokenizer of characters that states how long its model's rows may be."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(["[UNK]", *"abcdefghijklmnopqrstuvwxyz ."])}
    backend = Backend(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    Tokenizer(backend, config={"model_max_length": SHORT}).save(path)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    spec, _ = make("roberta", dtype=torch.float32)
    save_folder("m", build(spec, seed=1).eval())
    tokenizer(tmp_path / "m")
    (tmp_path / "text.txt").write_text("the cat sat on the mat. the dog sat on the log.")
    return tmp_path


def test_the_report_says_what_stays_and_what_it_costs(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["surgery", "longformer", "m", "n", "--context", "96", "--window", "16"]
    assert run([*command, "--data", "text.txt", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["transformers"] == "loads it"
    assert report["context"] == 96
    assert report["unchanged"] == 9
    assert report["before"]["pairs"] == 2 * 4 * 96**2
    assert report["after"]["pairs"] == 2 * 4 * (96 * 17 - 8 * 9)
    short, marked, full = report["differences"]
    assert (short["tokens"], marked["tokens"], full["tokens"]) == (9, 9, 24)
    assert (short["marked"], marked["marked"], full["marked"]) == (False, True, False)
    assert max(short["difference"], marked["difference"]) < 10 * ROUNDING * short["largest"]
    assert full["difference"] > 1e-3
    assert json.loads((home / "n" / "tokenizer_config.json").read_text())["model_max_length"] == 96
    assert load_folder("n").spec.patterns == (Window.around(8) | Global(),) * 2
    assert run([*command, "--overwrite"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "m -> n; transformers loads it",
        "family: roberta -> longformer",
        "positions: on embeddings: Learned(size=24, offset=2) -> on embeddings: Learned(size=96, offset=2)",
        "patterns: Full() -> Window.around(8)",
        "rows of up to 9 tokens see what they saw",
        "in the last 9 of 9 tokens, the first of them global",
    ):
        assert part in printed, part
    assert re.search(r"scores of a row of 96 +73 728 +12 480\n", printed)


def test_a_window_that_holds_all_changes_no_row_at_all(home: Path) -> None:
    result = lengthen(load_folder("m"), "n", LONG, 2 * SHORT)
    assert result.unchanged == SHORT
    assert [check.tokens for check in result.differences] == [SHORT, SHORT]
    assert all(check.difference < 10 * ROUNDING * check.largest for check in result.differences)


def test_what_transformers_has_no_class_for_is_headway_s_own(tmp_path: Path) -> None:
    for family, fields, reason in (
        ("roformer", {"positions": Rotary(pairing="adjacent")}, "global_projections"),
        ("bert", {"activation": "relu", "head": Head("masked-lm", dense="relu")}, "head"),
        ("bert", {"head": Head("embed", pool="mean", unit=True)}, "head"),
    ):
        spec, _ = make(family, dtype=torch.float32, **fields)
        save_folder(tmp_path / "a", build(spec, seed=1).eval(), overwrite=True)
        result = lengthen(load_folder(tmp_path / "a"), tmp_path / "b", LONG, WINDOW, overwrite=True)
        assert result.transformers.startswith("refuses it: it cannot express its")
        assert reason in result.transformers
        assert json.loads((tmp_path / "b" / "config.json").read_text())["model_type"] == "headway"
        assert all(check.difference < 10 * ROUNDING * check.largest for check in result.differences[:2])


def test_what_cannot_be_made_long() -> None:
    parts = make("roberta")
    llama = ModelSpec.of("llama", **SIZE)
    for call, message in (
        (lambda: make_longformer(llama, {}, LONG), "this llama is a decoder"),
        (lambda: make_longformer(*make_longformer(*parts, LONG), LONG), "has projections for global tokens already"),
        (lambda: make_longformer(*parts, SHORT - 1), "context must be at least that, got 23"),
        (lambda: make_longformer(*parts, LONG, 5), "attention_window must be even"),
        (lambda: make_longformer(*parts, LONG, 0), "attention_window must be a whole number of at least 1"),
        (lambda: make_longformer(*parts, LONG, [4]), "1 windows for 2 layers"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            call()


def test_nothing_is_left_when_something_is_wrong(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "there").mkdir()
    (home / "there" / "x").write_text("")
    folder = load_folder("m")
    with pytest.raises(CheckpointError, match="there exists"):
        lengthen(folder, "there", LONG)
    with pytest.raises(DataError, match="the text has no tokens"):
        lengthen(folder, "n", LONG, text="")
    assert run(["surgery", "longformer", "m", "n", "--window", "4,x"]) == 1
    assert "--window is one even number" in capsys.readouterr().err
    assert run(["surgery", "longformer", "m", "n", "--data", "none.txt"]) == 1
    assert not (home / "n").exists()
