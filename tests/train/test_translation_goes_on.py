"""Training a translation model further from a folder, and decoders whose heads share keys and values."""

from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway.checkpoints import save_folder
from headway.checkpoints.folder import load_folder
from headway.checkpoints.heads import repeat_kv_heads
from headway.checkpoints.restore import restore
from headway.errors import ConfigError
from headway.models import ModelSpec, build
from headway.surgery import pool_heads
from headway.train import train
from headway.train.metrics import read_metrics
from headway.train.tasks.translation import TranslationConfig
from tests.checkpoints.hf import off
from tests.train.translation import TINY, config, corpus


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    return train(config(folder, eval_at_start=True, eval_every=10), quiet=True).model


def go_on(folder: Path, start: Path, **changes: Any) -> list[dict[str, Any]]:
    """Trains three steps from the model in `start` and returns the metrics."""
    sizes = {key: value for key, value in TINY.items() if key in ("context", "batch_tokens", "dtype")}
    files = corpus(folder)
    held = {f"validation_{side}": path for side, path in files.items()}
    run = {"steps": 3, "warmup": 1, "lr_scale": 0.01, "eval_at_start": True, "out": str(folder / "run")}
    result = train(
        TranslationConfig.of({**sizes, **files, **held, **run, "model": str(start), **changes}), quiet=True
    )
    return read_metrics(result.metrics)


def test_it_begins_where_the_folder_ended(trained: Path, tmp_path: Path) -> None:
    before = [
        line["val_loss"] for line in read_metrics(trained.parent / "metrics.jsonl") if "val_loss" in line
    ]
    lines = go_on(tmp_path, trained)
    assert lines[0]["val_loss"] == pytest.approx(before[-1], rel=1e-6)
    first, second = (load_folder(folder) for folder in (trained, tmp_path / "run" / "final"))
    assert first.spec == second.spec
    assert any(not torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)
    tokenizers = [
        headway.load(folder, task="translation").need_tokenizer()
        for folder in (trained, tmp_path / "run" / "final")
    ]
    assert len({str(tokenizer.encode_batch(["red cat"])) for tokenizer in tokenizers}) == 1


def test_decoders_share_keys_and_encoders_do_not(tmp_path: Path) -> None:
    result = train(config(tmp_path, kv_heads=1, steps=2), quiet=True)
    spec = load_folder(result.model).spec
    assert (spec.kv_heads, spec.heads) == (1, 2)
    assert spec.encoder is not None
    assert spec.encoder.kv_heads == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 1}, "already fixes layers; leave those out"),
        ({"vocab": 300, "kv_heads": 1}, "already fixes kv_heads, vocab"),
        ({"model": "nowhere"}, "model nowhere: no such folder"),
    ],
    ids=str,
)
def test_what_a_folder_fixes_is_not_asked_for(
    changes: dict[str, Any], words: str, trained: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        go_on(tmp_path, trained, **changes)


def test_a_model_that_translates_nothing_is_refused(tmp_path: Path) -> None:
    save_folder(tmp_path / "lm", build(ModelSpec.of_depth(1, 300), seed=0))
    with pytest.raises(ConfigError, match=r"lm is not one"):
        go_on(tmp_path, tmp_path / "lm")


def test_heads_that_cannot_share_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="heads 2 is not a multiple of kv_heads 3"):
        config(tmp_path, kv_heads=3)


@torch.no_grad()
def test_keys_and_values_of_the_decoder_alone_are_pooled_and_repeated(trained: Path) -> None:
    """Pooled to one head and repeated to two, the model computes what the pooled one computes."""
    folder = load_folder(trained)
    pooled = pool_heads(folder.spec, folder.tensors, 1)
    repeated = repeat_kv_heads(pooled[1], pooled[0], 2)
    assert pooled[0].encoder == repeated[1].encoder == folder.spec.encoder
    changed = {name for name, value in pooled[1].items() if value.shape != folder.tensors[name].shape}
    assert {name.rpartition(".")[0] for name in changed} == {
        f"decoder.layers.0.{mixer}.{side}_proj" for mixer in ("self_attn", "cross_attn") for side in "kv"
    }
    pooled_model, repeated_model = restore(*pooled), restore(repeated[1], repeated[0])
    ids = torch.arange(5, 12)[None]
    assert off(pooled_model(ids, ids), repeated_model(ids, ids)) < 1e-6
