"""`headway surgery`, run as a command."""

import json

import pytest

from headway.checkpoints import load_folder, save_folder
from headway.cli import run
from headway.models import ModelSpec, build
from headway.patterns import Window
from headway.text import train_bpe

WORDS = "one two three four five six seven eight nine ten eleven twelve "


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A working folder with a model `m` of 4 kv heads, its tokenizer, and `text.txt`."""
    monkeypatch.chdir(tmp_path)
    spec = ModelSpec.of("llama", vocab=280, width=16, layers=2, heads=4, kv_heads=4, hidden=24, init_std=0.3,
                        trained_context=32, tied=True)  # fmt: skip
    save_folder("m", build(spec, seed=0).eval(), tokenizer=train_bpe([WORDS], 280))
    (tmp_path / "text.txt").write_text(WORDS * 10)
    return tmp_path


def test_gqa_reports_what_it_saves_and_costs(home, capsys):
    assert run(["surgery", "gqa", "m", "n", "--kv-heads", "2", "--data", "text.txt"]) == 0
    out, err = capsys.readouterr()
    for part in (
        "m -> n; transformers loads it",
        "(MHA), 4 dims each -> 4 query, 2 key/value (GQA)",
        "mean: keeps what the heads of a group have in common; the means hold",
        "not first: keeps one head of each group",
        "KV per token (float32)  256 B",
        "128 B",
        "KV of a row of 32",
        "bits per byte",
        "largest difference of a logit:",
        "tokens to look back on",
        "0-15",
    ):
        assert part in out, part
    assert "measuring before and after" in err
    assert load_folder("n").spec.kv_heads == 2


def test_quantized_weights_become_plain_ones_and_the_report_says_so(home, capsys):
    assert run(["quantize", "m", "--weights", "int8", "--group", "-1", "q"]) == 0
    capsys.readouterr()
    assert run(["surgery", "gqa", "q", "n", "--kv-heads", "2"]) == 0
    out = capsys.readouterr().out
    assert "weights: int8, " in out
    assert "-> float32" in out
    assert load_folder("n").weights == "float32"


def test_compare_prints_all_pools_and_what_the_table_says(home, capsys):
    command = [
        "surgery",
        "gqa",
        "m",
        "n",
        "--kv-heads",
        "1",
        "--compare",
        "--seed",
        "7",
        "--data",
        "text.txt",
    ]
    assert run([*command, "--limit", "64", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["pool"], row["seed"]) for row in report["pools"]] == [
        ("mean", None), ("first", None), ("random", 7), ("random", 8), ("random", 9),
    ]  # fmt: skip
    assert report["pools"][0]["loss"] == pytest.approx(report["after"]["loss"], rel=1e-6)
    assert report["tokens"] == 64
    verdict = report["verdict"]
    assert "random" in verdict
    assert run([*command, "--limit", "64", "--overwrite"]) == 0
    out = capsys.readouterr().out
    assert "right after, without training:" in out
    assert verdict in out


def test_the_seed_decides_random(home, capsys):
    for out, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert run(["surgery", "gqa", "m", out, "--kv-heads", "2", "--pool", "random", "--seed", seed]) == 0
    a, b, c = ((home / out / "model.safetensors").read_bytes() for out in "abc")
    assert a == b != c
    assert "no loss was measured: --data FILE gives" in capsys.readouterr().out


def test_window_bounds_what_is_stored(home, capsys):
    command = ["surgery", "window", "m", "n", "--window", "6", "--sinks", "2", "--layers", "1"]
    assert run([*command, "--data", "text.txt"]) == 0
    out = capsys.readouterr().out
    assert "transformers refuses it: it cannot express its patterns" in out
    assert "patterns: Causal() -> layers 0: Causal(); layers 1: Window.last(6) | Causal() & Sink(2)" in out
    assert "layers 1: asked for" in out
    assert run(["surgery", "window", "n", "k", "--window", "6", "--context", "256", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    last_layer = "layers 1: Window.last(6) | Causal() & Sink(2)"
    assert report["changed"] == [
        ["patterns", f"layers 0: Causal(); {last_layer}", f"layers 0: Window.last(6); {last_layer}"]
    ]
    assert report["before"]["kv_bytes_stored"] == (256 + 128) * 128
    assert report["after"]["kv_bytes_stored"] == (64 + 128) * 128
    assert report["before"]["loss"] is None
    assert str(load_folder("k").spec.patterns[1]) == "Window.last(6) | Causal() & Sink(2)"


def test_widening_a_window_shows_within_the_wider_one(home, capsys):
    assert run(["surgery", "window", "m", "n", "--window", "4"]) == 0
    assert "layers 0-1: they saw all before them, so that their caches grew" in capsys.readouterr().out
    wider = ["surgery", "window", "n", "k", "--window", "40", "--layers", "all", "--context", "20", "--json"]
    assert run(wider) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["differences"][0]["probed"] == 20
    assert report["differences"][0]["difference"] > 0.1
    assert {*load_folder("k").spec.patterns} == {Window.last(40)}


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn", "llama3", "dynamic"])
def test_context_shows_perplexity_by_position(home, capsys, method):
    assert (
        run(["surgery", "context", "m", "n", "--method", method, "--factor", "4", "--data", "text.txt"]) == 0
    )
    out = capsys.readouterr().out
    assert "context: trained on 32 tokens -> trained on 128 tokens" in out
    assert "KV of a row of 128" in out
    assert [line.split()[0] for line in out.splitlines()[-4:]] == ["0-15", "16-31", "32-63", "64-127"]
    assert load_folder("n").spec.trained_context == 128


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["gqa", "m", "n", "--kv-heads", "3"],
            1,
            "4 key/value heads cannot become 3: groups have equal sizes",
        ),
        (["gqa", "m", "n", "--kv-heads", "2", "--pool", "men"], 1, "no pool 'men' (did you mean \"mean\"?)"),
        (["gqa", "m", "n", "--kv-heads", "2", "--seed", "1"], 1, "--seed is for --pool random or --compare"),
        (
            ["gqa", "m", "n", "--kv-heads", "2", "--compare"],
            1,
            "--compare measures losses, so it needs --data",
        ),
        (
            ["gqa", "m", "n", "--kv-heads", "2", "--limit", "9"],
            1,
            "--limit counts tokens of the text of --data",
        ),
        (["gqa", "m", "n"], 2, "--kv-heads"),
        (["gqa", "m", "n", "--kv-heads", "2", "--heads", "2"], 2, "--heads"),
        (["gqa", "x", "n", "--kv-heads", "2"], 1, "x does not exist: a model is a folder"),
        (["gqa", "m", "n", "--kv-heads", "2", "--data", "no.txt"], 1, "no.txt: no such file or folder"),
        (["gqa", "m", "n", "--kv-heads", "2", "--text", "text.txt"], 2, "No such option: --text"),
        (["gqa", "m", "m", "--kv-heads", "2"], 1, "m exists; choose another name, or use --overwrite"),
        (["window", "m", "n", "--window", "0"], 2, "--window"),
        (["window", "m", "n", "--window", "4", "--sinks", "-1"], 2, "--sinks"),
        (["window", "m", "n", "--window", "4", "--layers", "2"], 1, "layers '2': '2' is neither a layer nor"),
        (
            ["window", "m", "n", "--window", "8", "--context", "8"],
            1,
            "rows of 8 tokens cannot show this change",
        ),
        (["window", "m", "m", "--window", "8"], 1, "m exists; choose another name"),
        (["window", "m", "n", "--window", "900", "--data", "text.txt"], 1, "the longest document has"),
        (["context", "m", "n", "--method", "yarn"], 2, "--factor"),
        (["context", "m", "n", "--method", "yarn", "--factor", "0.5"], 2, "--factor"),
        (
            ["context", "m", "n", "--method", "yarm", "--factor", "2"],
            1,
            "no method 'yarm' (did you mean \"yarn\"?)",
        ),
        (
            ["context", "m", "n", "--method", "ntk", "--factor", "2", "--context", "32"],
            1,
            "begins beyond 32 tokens",
        ),
        (["longer", "m", "n"], 2, "No such command 'longer'"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(home, capsys, arguments, code, message):
    before = sorted(home.iterdir())
    assert run(["surgery", *arguments]) == code
    assert message in capsys.readouterr().err
    assert sorted(home.iterdir()) == before


def test_a_text_needs_a_tokenizer(home, capsys):
    (home / "m" / "tokenizer.json").unlink()
    assert run(["surgery", "gqa", "m", "n", "--kv-heads", "2", "--data", "text.txt"]) == 1
    assert "tokenizer" in capsys.readouterr().err
    assert not (home / "n").exists()
