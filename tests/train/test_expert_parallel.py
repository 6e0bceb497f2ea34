"""Runs whose experts several processes share are those of one process, and go on at any mesh."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.errors import ConfigError
from headway.parallel import Mesh
from headway.train import TextConfig, train
from headway.train.start import checked
from tests.train.test_resume import weights
from tests.train.test_tensor_parallel import assert_close, by, open_state

Make = Callable[..., TextConfig]
SPARSE: dict[str, Any] = {
    "family": "qwen3_moe", "patterns": None, "micro_batch": 4, "steps": 6, "save_every": 2, "keep_last": 9,
    "clip": 0.3, "validation_share": 0.1, "eval_every": 3,
}  # fmt: skip
TWO = Mesh(expert=2)


def same(out: str, reference: str) -> bool:
    return all(torch.equal(t, weights(reference)[name]) for name, t in weights(out).items())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_row_45_a_run_of_shared_experts_goes_on_at_any_mesh(
    settings: Make, tmp_path: Path, optimizer: str
) -> None:
    """Folders and shards have the bits of all weights and moments; two read one's, one reads two's, prompts are
    completed by all experts. Updates of Muon are computed in bfloat16: a sum that is rounded otherwise turns numbers of
    them by 2^-8."""
    rtol = {"adamw": 1e-4, "muon": 2.0**-8}[optimizer]
    config = settings(**SPARSE, optimizer=optimizer, sample_prompts=["one"], sample_tokens=3, sample_every=2)
    train(config, quiet=True)
    shared = by(TWO, config, tmp_path / "shared")
    assert_close(shared.out, config.out, after=0, rtol=rtol)
    shards = by(TWO, config.model_copy(update={"checkpoints": "shards"}), tmp_path / "shards")
    parts = Path(shards.out) / "checkpoint-4"
    assert len(list(parts.glob("model-shard-*"))) == len(list(parts.glob("optimizer-shard-*"))) == 2
    files = [open_state(Path(out) / "checkpoint-4") for out in (shards.out, shared.out, config.out)]
    assert files[0].keys() == files[1].keys() == files[2].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    for there in (parts, f"{shared.out}/checkpoint-2"):
        again = by(TWO, config, tmp_path / f"again {Path(there).name}", str(there))
        assert same(again.out, shared.out)
        alone = config.model_copy(update={"out": str(tmp_path / f"alone {Path(there).name}")})
        train(alone, resume=str(there), quiet=True)
        assert_close(alone.out, config.out, after=4, rtol=rtol)
    last = by(TWO, config, tmp_path / "last", f"{config.out}/checkpoint-4")
    assert_close(last.out, config.out, after=4, rtol=rtol)


def test_a_mesh_that_does_not_fit_is_refused_before_data_is_read(settings: Make) -> None:
    with pytest.raises(
        ConfigError, match="8 experts cannot be shared evenly by 3 processes; expert must divide 8"
    ):
        checked(settings(**SPARSE, mesh="expert=3"), 3)
    with pytest.raises(ConfigError, match="has no experts that ranks could share; leave expert out"):
        checked(settings(mesh="expert=2"), 2)
