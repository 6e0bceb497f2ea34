"""Inputs of a run: settings, text, its held-out part, and the model that is built from them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.attention.delta import DeltaSpec, SSDSpec
from headway.attention.linear_attention import LinearAttentionSpec
from headway.checkpoints import load_folder
from headway.data import Piece, TokenFile
from headway.errors import ConfigError, DataError
from headway.models import Softmax, cost
from headway.patterns import Causal, Window
from headway.train import (
    TextConfig,
    train,
)
from headway.train.dry_run import describe_run
from headway.train.inputs import make_spec
from headway.train.metrics import read_metrics
from headway.train.texts import hold_out
from tests.train.runs import HOME_MADE

Make = Callable[..., TextConfig]


def pieces(*documents: list[str]) -> Callable[[], list[Piece]]:
    return lambda: [
        Piece(text, i == len(parts) - 1, "here") for parts in documents for i, text in enumerate(parts)
    ]


@pytest.mark.parametrize("share", [0.01, 0.3, 0.99])
def test_documents_are_held_out_whole(share: float) -> None:
    read = pieces(*([f"{d}.", f"{d};"] for d in range(20)))
    train_part, held = (list(hold_out(read, share, 5, held_out=h)) for h in (False, True))
    assert sorted(p.text for p in train_part + held) == sorted(p.text for p in read())
    assert len(held) == 2 * min(19, max(1, round(share * 20)))
    assert {p.text[:-1] for p in train_part}.isdisjoint(p.text[:-1] for p in held)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_of_one_document_the_end_is_held_out_from_a_line_on(share: float) -> None:
    lines = [f"line {i}\n" for i in range(100)]
    read = pieces(["".join(lines[:30]), "".join(lines[30:77]), "".join(lines[77:])])
    train_text, held_text = (
        "".join(p.text for p in hold_out(read, share, 0, held_out=h)) for h in (False, True)
    )
    assert train_text + held_text == "".join(lines)
    assert train_text.endswith("\n")
    assert len(held_text) == pytest.approx(share * len(train_text + held_text), abs=8)
    assert [p.ends for p in hold_out(read, share, 0, held_out=False)][-1]


def test_one_dial_and_its_overrides() -> None:
    spec = make_spec(TextConfig.of({"data": "x", "depth": 8}), 500)
    assert (spec.width, spec.heads, spec.kv_heads, spec.head_dim, spec.family) == (512, 8, 2, 64, "llama")
    assert spec.tied
    spec = make_spec(
        TextConfig.of(
            {"data": "x", "depth": 4, "width": 96, "heads": 6, "patterns": "Window.last(8); Causal()"}
        ),
        9,
    )
    assert (spec.head_dim, spec.kv_heads, spec.family) == (16, 3, "ministral")
    assert spec.patterns == (Window.last(8), Causal(), Window.last(8), Causal())


def test_layers_mix_tokens_with_what_is_named() -> None:
    fields = {"data": "x", "depth": 4, "heads": 4, "kv_heads": 2, "width": 64}
    spec = make_spec(TextConfig.of({**fields, "mixers": "delta; cosine; softmax;attention"}), 500)
    delta = DeltaSpec(heads=4, key_heads=2, head_dim=16)
    assert spec.mixers == (delta, LinearAttentionSpec("cosine"), LinearAttentionSpec("softmax"), Softmax())
    assert (
        make_spec(TextConfig.of({**fields, "mixers": "attention; delta"}), 500).mixers
        == (Softmax(), delta) * 2
    )
    ssd = SSDSpec(heads=8, key_heads=1, head_dim=128, value_dim=16)
    assert (
        make_spec(TextConfig.of({**fields, "mixers": "ssd; attention"}), 500).mixers == (ssd, Softmax()) * 2
    )
    assert make_spec(TextConfig.of(fields), 500).mixers == (Softmax(),) * 4


def test_layers_of_state_space_duality_are_trained_by_name(settings: Make) -> None:
    """The saved folder has layers of state-space duality, too."""
    config = settings(patterns=None, mixers="ssd; attention", steps=8)
    result = train(config, quiet=True)
    spec = load_folder(Path(config.out) / "final").spec
    assert [type(mixer) for mixer in spec.mixers] == [SSDSpec, Softmax]
    first, *_, last = [r["loss"] for r in read_metrics(Path(config.out) / "metrics.jsonl") if "lr" in r]
    assert last < first
    assert result.loss == last


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"),
        (b"abc\xff", "not UTF-8"),
        (b'{"text": "a"}\n{"txt": "b"}\n', "text.jsonl:2: no key 'text' (did you mean \"txt\"?)"),
        (b'{"text": "a"}\nno\n', "text.jsonl:2: not JSON"),
    ],
)
def test_bad_text_is_named_with_its_line(settings: Make, corpus: Path, content: bytes, said: str) -> None:
    corpus.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(said)):
        train(settings(), quiet=True)


def test_catalog_and_token_files_need_a_tokenizer(settings: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model 'llama-2-7b' has no tokenizer"):
        train(settings(model="llama-2-7b", **HOME_MADE), quiet=True)
    first = train(settings(steps=1), quiet=True)
    tokens = str(first.out / "data" / "train.tokens")
    with pytest.raises(ConfigError, match="holds token ids; give the tokenizer that made them"):
        train(settings(data=tokens, out=str(tmp_path / "b")), quiet=True)
    held_out = {"validation_share": 0.1, "tokenizer": str(first.model), "vocab": None}
    with pytest.raises(ConfigError, match=r"validation_share splits text, but .* is a token file"):
        train(settings(data=tokens, out=str(tmp_path / "b"), **held_out), quiet=True)
    same = settings(data=tokens, tokenizer=str(first.model), vocab=None, steps=1, out=str(tmp_path / "c"))
    assert train(same, quiet=True).loss == first.loss


def test_preview_counts_and_touches_nothing(settings: Make) -> None:
    config = settings()
    before = sorted(Path(config.data).parent.iterdir())
    plan = describe_run(config)
    assert sorted(Path(config.data).parent.iterdir()) == before
    assert sum(plan.groups.values()) == cost.parameter_count(plan.spec)
    assert (plan.steps, plan.rows_per_step, plan.micro_batches) == (6, 8, 3)
    assert "optimizer steps" in plan.text()
    result = train(config, quiet=True)
    tokens = result.out / "data" / "train.tokens"
    exact = describe_run(settings(data=str(tokens), tokenizer=str(result.model), vocab=None))
    assert exact.exact
    assert exact.data == {"training tokens": len(TokenFile(tokens))}
