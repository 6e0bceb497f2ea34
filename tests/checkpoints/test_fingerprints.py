"""Fingerprints of models, by which an adapter recognizes its base model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.checkpoints import change_pairing, load_folder, save_folder, save_state
from headway.checkpoints.bases import SAMPLE, fingerprint
from headway.models.quantize import quantize_model
from headway.surgery.quantize import quantize_folder
from tests.checkpoints.adapters import small


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_has_one_fingerprint_however_its_weights_are_kept(family: str, tmp_path: Path) -> None:
    """Folders share it if an adapter of one fits the other: float32 and bfloat16, either pairing, quantized to int4."""
    model = small(family, width=64)
    save_folder(tmp_path / "m", model)
    save_folder(tmp_path / "bf16", model, dtype=torch.bfloat16)
    folders = ["m", "bf16"]
    if family == "llama":
        quantize_folder(load_folder(tmp_path / "bf16"), tmp_path / "int4", "int4")
        adjacent, spec = change_pairing(dict(model.state_dict()), model.spec, "adjacent")
        save_state(tmp_path / "adjacent", spec, adjacent, keep_pairing=True)
        folders += ["int4", "adjacent"]
    assert len({fingerprint(load_folder(tmp_path / name)) for name in folders}) == 1


@pytest.mark.parametrize(
    ("leaf", "change"),
    [
        ("mlp.up_proj.weight", lambda w: w * 1.01),
        ("self_attn.q_proj.weight", lambda w: w.roll(1, 0)),
        ("mlp.down_proj.weight", lambda w: w + 0.01 * torch.eye(*w.shape)),
    ],
)
def test_other_weights_have_another_fingerprint(leaf: str, change: Any, tmp_path: Path) -> None:
    """So has a quantized folder whose origin is unknown."""
    model = small("llama", width=64)
    save_folder(tmp_path / "m", model)
    state = dict(model.state_dict())
    name = f"model.layers.1.{leaf}"
    save_state(tmp_path / "other", model.spec, state | {name: change(state[name])})
    quantize_model(model, "int4")
    save_folder(tmp_path / "int4", model)
    assert len({fingerprint(load_folder(tmp_path / name)) for name in ("m", "other", "int4")}) == 3


def test_a_fingerprint_reads_some_rows_of_a_large_tensor(tmp_path: Path) -> None:
    """The rows are evenly spaced from the first one, so that a change of all rows is noticed."""
    model = small("llama", vocab=3 * SAMPLE // 32)
    save_folder(tmp_path / "m", model)
    known = {fingerprint(load_folder(tmp_path / "m"))}
    table = model.state_dict()["model.embed_tokens.weight"]
    for row, noticed in ((1, False), (0, True), (3 * (len(table) // 6), True)):
        table[row] += 1
        save_folder(tmp_path / "m", model, overwrite=True)
        assert (fingerprint(load_folder(tmp_path / "m")) not in known) == noticed
        known.add(fingerprint(load_folder(tmp_path / "m")))
