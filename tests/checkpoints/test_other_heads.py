"""An encoder in a folder of headway's own type, taken for another purpose than it was saved for."""

from pathlib import Path

import pytest
import torch

from headway.checkpoints import inspect, load_folder, save_folder
from headway.checkpoints.restore import build_model
from headway.errors import CheckpointError
from headway.models import Head, ModelSpec, build
from tests.checkpoints.encoders import SMALL

NEZHA = ModelSpec.of("nezha", **SMALL)  # which transformers has no class for
IDS = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))


def test_another_head_s_tensors_are_not_needed(tmp_path: Path) -> None:
    model = build(NEZHA, seed=0).eval()
    save_folder(tmp_path / "m", model)
    folder = load_folder(tmp_path / "m", head=Head("embed", pool="mean"))
    with torch.no_grad():
        states = build(NEZHA.with_head(Head("states")), seed=0).eval()
        states.load_state_dict(model.state_dict(), strict=False)
        assert torch.equal(build_model(folder)(IDS), states(IDS).mean(1))
    left = {name for name in model.state_dict() if name.startswith("head.")}
    assert left
    assert set(folder.unused) == left
    assert inspect(tmp_path / "m")["unused"] == ()


def test_a_head_that_is_not_there_is_missing_and_others_are_not_spare(tmp_path: Path) -> None:
    save_folder(tmp_path / "m", build(NEZHA, seed=0))
    with pytest.raises(CheckpointError, match=r"missing: head\.out\.weight") as caught:
        load_folder(tmp_path / "m", head=Head("tag", labels=("a", "b")))
    assert "unexpected" not in str(caught.value)
    config = tmp_path / "m" / "config.json"
    config.write_text(config.read_text().replace('"dense": "gelu"', '"dense": null'))
    with pytest.raises(CheckpointError, match=r"unexpected: head\.dense"):
        load_folder(tmp_path / "m")
