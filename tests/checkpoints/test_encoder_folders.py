"""Encoder folders: old names, other heads, what is refused, headway's own models, and the output of the commands."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from headway.checkpoints import inspect, load_folder, save_folder, spec_from_config
from headway.checkpoints.heads import change_pairing
from headway.checkpoints.hf.config import unsupported_by_transformers
from headway.checkpoints.restore import build_model, load_model, restore
from headway.cli import run as cli
from headway.cli.inspect import text as inspect_text
from headway.errors import CheckpointError, ConfigError
from headway.models import Encoder, EncoderDecoder, Head, ModelSpec, build, catalog
from headway.patterns import Full, Global, Window
from headway.positions import Rotary
from headway.tokens import Tokens
from tests.checkpoints.edits import set_tensors
from tests.checkpoints.encoders import (
    CLASSES,
    SMALL,
    Case,
    inputs,
    output,
    peer,
    run,
    seen,
)
from tests.checkpoints.hf import off


def test_another_table_of_angles_is_refused(tmp_path: Path) -> None:
    peer(Case("roformer", "states")).save_pretrained(tmp_path / "m")

    name = "encoder.embed_positions.weight"
    table = load_file(tmp_path / "m" / "model.safetensors")[name]
    for other in ({name: table * 0.5}, {name: table.to(torch.int64)}):
        set_tensors(tmp_path / "m", lambda state: state.update(other))  # noqa: B023
        with pytest.raises(CheckpointError, match=r"embed_positions\.weight must be the constant of shape"):
            load_folder(tmp_path / "m")


def test_names_of_old_files(tmp_path: Path) -> None:
    """Old files have gamma and beta, position_ids, the heads of pretraining, and the tied matrix a second time."""
    theirs = peer(Case("bert", "masked-lm"))
    batch, tokens = inputs(theirs)
    expected = output(theirs(**batch)).detach()

    def old(state: dict[str, Tensor]) -> None:
        for name in [*state]:
            before = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
            state[before] = state.pop(name)
        state |= {
            "bert.embeddings.position_ids": torch.arange(20)[None],
            "cls.predictions.decoder.weight": state["bert.embeddings.word_embeddings.weight"].clone(),
            "cls.seq_relationship.weight": torch.zeros(2, 48),
            "cls.seq_relationship.bias": torch.zeros(2),
            "bert.pooler.dense.weight": torch.zeros(48, 48),
            "bert.pooler.dense.bias": torch.zeros(48),
        }

    theirs.save_pretrained(tmp_path / "m")
    folder = load_folder(set_tensors(tmp_path / "m", old))
    ours = build_model(folder)
    assert isinstance(ours, Encoder)
    assert off(seen(run(ours, batch, tokens), tokens), seen(expected, tokens)) < 1e-5
    assert set(folder.unused) == {
        "bert.embeddings.position_ids",
        *(f"cls.seq_relationship.{leaf}" for leaf in ("weight", "bias")),
        *(f"bert.pooler.dense.{leaf}" for leaf in ("weight", "bias")),
    }

    def twice(state: dict[str, Tensor]) -> None:
        gain = state["cls.predictions.transform.LayerNorm.gamma"].clone()
        state["cls.predictions.transform.LayerNorm.weight"] = gain

    with pytest.raises(CheckpointError, match="are two names of one tensor"):
        load_folder(set_tensors(tmp_path / "m", twice))


def test_the_one_bias_of_an_untied_file_may_have_its_old_name(tmp_path: Path) -> None:
    """Before version 5, transformers stored it as cls.predictions.bias alone, or under both names."""
    peer(Case("bert", "masked-lm", {"tie_word_embeddings": False})).save_pretrained(tmp_path / "m")
    loaded = load_folder(tmp_path / "m")
    expected = load_file(tmp_path / "m" / "model.safetensors")["cls.predictions.decoder.bias"]
    assert torch.equal(loaded.tensors["head.out.bias"], expected)
    assert loaded.unused == ()

    def one(state: dict[str, Tensor]) -> None:
        state["cls.predictions.bias"] = state.pop("cls.predictions.decoder.bias")

    assert torch.equal(load_folder(set_tensors(tmp_path / "m", one)).tensors["head.out.bias"], expected)


def test_a_folder_for_another_purpose(tmp_path: Path) -> None:
    peer(Case("bert", "answer")).save_pretrained(tmp_path / "m")
    folder = load_folder(tmp_path / "m", head=Head("states"))
    assert set(folder.unused) == {"qa_outputs.weight", "qa_outputs.bias"}
    with pytest.raises(CheckpointError, match=r"missing: cls\.predictions\.bias"):
        load_folder(tmp_path / "m", head=Head("masked-lm", dense="gelu"))
    with pytest.raises(ConfigError, match="a decoder is needed, but this model is"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"hidden_act": "gelu_13"}, "no activation 'gelu_13'"),
        ("bert", {"architectures": ["BertForNextSentencePrediction"]}, "BertForNextSentencePrediction"),
        ("bert", {"hiden_size": 48}, 'did you mean "hidden_size"'),
        ("roberta", {"pad_token_id": None}, "begin after this row"),
        ("roberta", {"pad_token_id": 19}, "must be in 0..18, .*; got 19"),
        ("roformer", {"rotary_value": "yes"}, "must be true or false"),
        ("roformer", {"headway": {"family": "bert"}}, "does not fit model_type 'roformer'"),
        ("modernbert", {"embedding_dropout": 0.1}, "embedding_dropout"),
    ],
)
def test_what_is_not_known_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    config = {
        **Case(family, "masked-lm").config.to_dict(),
        "architectures": [CLASSES[family] + "ForMaskedLM"],
    }
    assert spec_from_config(json.loads(json.dumps(config))).family == family
    with pytest.raises(ConfigError, match=message):
        spec_from_config({**config, **changes})


def test_a_roformer_in_halves_is_saved_in_adjacent_pairs(tmp_path: Path) -> None:
    halves = Rotary(pairing="halves")
    model = build(ModelSpec.of("roformer", **SMALL, positions=halves, trained_context=20), seed=1).eval()
    save_folder(tmp_path / "m", model)
    theirs = transformers.RoFormerForMaskedLM.from_pretrained(tmp_path / "m", attn_implementation="eager")
    batch, tokens = inputs(theirs)
    assert isinstance(model, Encoder)
    assert off(seen(run(model, batch, tokens), tokens), seen(theirs(**batch).logits, tokens)) < 1e-5

    turned = build(ModelSpec.of("roformer", **SMALL, positions=replace(halves, values=True)), seed=1).eval()
    with pytest.raises(ConfigError, match="keep pairing="):
        save_folder(tmp_path / "v", turned)
    save_folder(tmp_path / "v", turned, keep_pairing=True)
    ids = batch["input_ids"][:1]
    assert torch.equal(build_model(load_folder(tmp_path / "v"))(ids), turned(ids))


def test_projections_of_global_tokens_change_their_pairing_too() -> None:
    patterns = Window.around(2) | Global()
    spec = ModelSpec.of("longformer", **SMALL, positions=Rotary(pairing="halves"), patterns=patterns)
    model = build(spec, seed=1).eval()
    state, adjacent = change_pairing(model.state_dict(), spec, "adjacent")
    ids = torch.randint(0, 61, (1, 9), generator=torch.Generator().manual_seed(0))
    tokens = Tokens.range(9).with_global([[0, 4]])
    assert off(restore(adjacent, state)(ids, tokens=tokens), model(ids, tokens=tokens)) < 1e-5


def test_row_85_wobert_is_saved_as_the_bert_that_it_is(tmp_path: Path) -> None:
    spec = ModelSpec.of("wobert", **SMALL)
    model = build(spec, seed=1).eval()
    save_folder(tmp_path / "m", model)
    assert load_folder(tmp_path / "m").spec == spec
    assert unsupported_by_transformers(spec) is None
    theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path / "m", attn_implementation="eager")
    batch, tokens = inputs(theirs)
    assert isinstance(model, Encoder)
    assert off(seen(run(model, batch, tokens), tokens), seen(theirs(**batch).logits, tokens)) < 1e-5


def test_row_85_models_prints_the_comparison(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (*catalog.COMPARED, "bert-base-uncased")  # counting the parameters of all takes seconds
    assert set(names) < set(catalog.names())
    monkeypatch.setattr(catalog, "names", lambda: names)
    assert cli(["models"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    compared = {
        "bert": ("bert-base-chinese", "char", "Learned"),
        "wobert": ("wobert-chinese-base", "word", "Learned"),
        "nezha": ("nezha-cn-base", "char", "Relative"),
        "roformer": ("roformer-chinese-base", "word", "Rotary"),
    }
    for family, (name, unit, positions) in compared.items():
        assert [name, family, unit, positions] in [line[:4] for line in lines]
    assert cli(["models", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["family"] for row in report["compared"]] == [*compared]
    assert [row["name"] for row in report["models"]] == [*names]
    (bert,) = (row for row in report["models"] if row["name"] == "bert-base-uncased")
    assert (bert["parameters"], bert["kind"], bert["context"]) == (109_514_298, "encoder", 512)


def test_inspect_says_what_an_encoder_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Case("bert", "masked-lm").config
    transformers.BertForPreTraining(config).save_pretrained(tmp_path / "bert")
    peer(Case("roformer", "tag", {"embedding_size": 32})).save_pretrained(tmp_path / "roformer")
    assert cli(["inspect", str(tmp_path / "bert")]) == 0
    printed = capsys.readouterr().out
    for part in (
        "family         bert; transformers loads it",
        "kind           encoder; gives masked-lm: logits of the token that stands there",
        "order          post: norm(x + f(x)), no final norm, embedding norm",
        "norm           LayerNorm: (x - mean x) / sqrt(var x + eps), eps 1e-12, norm bias",
        "context        20 tokens; refuses more than 20",
        "keys, values   none are kept",
        "not used       bert.pooler.dense.bias, bert.pooler.dense.weight, cls.seq_relationship.bias",
        "positions      Learned(size=20)",
    ):
        assert part in printed, part
    assert cli(["inspect", str(tmp_path / "roformer")]) == 0
    printed = capsys.readouterr().out
    for part in (
        "vocab 61, embedding width 32, token types 2",
        "pairing adjacent (transformers' roformer rotates adjacent pairs)",
        "20 tokens; runs beyond it too",
        "labels         no, yes, perhaps",
    ):
        assert part in printed, part
    assert "not used" not in printed
    assert cli(["inspect", str(tmp_path / "roformer"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["kv_bytes_per_token"], report["unused"]) == ("encoder", None, [])


def test_inspect_says_what_an_encoder_decoder_keeps(tmp_path: Path) -> None:
    size: dict[str, Any] = {"vocab": 61, "width": 48, "layers": 2, "heads": 4, "hidden": 80}
    source = ModelSpec.of("transformer", **size, causal=False, patterns=Full(), head=Head("states"))
    spec = ModelSpec.of("transformer", **{**size, "layers": 3}, encoder=source, tied=True)
    save_folder(tmp_path / "m", build(spec, seed=0), dtype=torch.bfloat16)
    report = inspect(tmp_path / "m")
    assert report["kind"] == "encoder-decoder"
    assert report["kv_bytes_per_token"] == report["memory_bytes_per_token"] == 3 * 2 * 48 * 2
    model = build_model(load_folder(tmp_path / "m"))
    assert isinstance(model, EncoderDecoder)
    memory = model.memory_keys(model.encode(torch.zeros(1, 5, dtype=torch.long)))
    assert sum(keys.k.nbytes + keys.v.nbytes for keys in memory) == 5 * report["memory_bytes_per_token"]
    text = inspect_text(report)
    assert "576 B per token of the target, 576 B per token of the source" in text
    assert "encoder        2 layers of width 48" in text
