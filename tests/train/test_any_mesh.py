"""A run resumes on any mesh: checkpoints of one mesh, in folders or in shards, are read by every other."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

import headway
from headway.errors import ConfigError
from headway.parallel import Mesh
from headway.train import train
from headway.train.start import checked
from tests.train.runs import RUNS, Make, llama
from tests.train.test_resume import assert_equal, state, weights
from tests.train.test_tensor_parallel import BOTH, SHARED, assert_close, by

HELD: dict[str, Any] = {"validation_share": 0.1, "eval_every": 3}
SAMPLED: dict[str, Any] = {"sample_prompts": ["one"], "sample_tokens": 3, "sample_every": 2}
SPARSE: dict[str, Any] = {
    "family": "qwen3_moe", "patterns": None, "micro_batch": 4, "steps": 6, "save_every": 2, "keep_last": 9,
    "clip": 0.3, **HELD, **SAMPLED,
}  # fmt: skip
ADAPTED: dict[str, Any] = {
    "lr": 0.01, "micro_batch": 4, "workers": 1, "clip": 0.3, "save_every": 2, "keep_last": 9, **HELD, **SAMPLED
}  # fmt: skip
WIDE: dict[str, Any] = {"width": 128, "heads": 4, "kv_heads": 2, "hidden": 128, "init_std": 0.1}
"""Sizes of a base model whose shards have whole blocks of nf4."""
BESIDE = Mesh(dp=2, tp=2)
MUON = 2.0**-8
"""Muon computes updates in bf16: a sum that is rounded otherwise changes an update by up to this factor."""


class Case(NamedTuple):
    """Processes of the meshes `alike` go on with the bits of `mesh`, those of `others` with its values to `rtol`."""

    run: str
    how: dict[str, Any]
    mesh: Mesh
    alike: tuple[Mesh, ...] = ()
    others: tuple[Mesh, ...] = (Mesh(),)
    rtol: float = 1e-4


CASES = {
    "layers": Case("causal-lm", {**SHARED, **HELD, "optimizer": "muon"}, Mesh(tp=2)),
    "parts of layers": Case(
        "causal-lm", {**SHARED, **HELD, "hidden": 22, "optimizer": "muon"}, BOTH, (BESIDE,),
        (Mesh(), Mesh(tp=2), Mesh(fsdp=2)),
    ),
    "experts, adamw": Case("causal-lm", {**SPARSE, "optimizer": "adamw"}, Mesh(expert=2)),
    "experts, muon": Case("causal-lm", {**SPARSE, "optimizer": "muon"}, Mesh(expert=2), rtol=MUON),
    "lora": Case("adapter", {**ADAPTED, "adapter_dropout": 0.2}, Mesh(tp=2)),
    "dora": Case("adapter", {**ADAPTED, "adapter": "dora", "optimizer": "muon", "matrix_lr": 0.002}, Mesh(tp=2)),
    "qlora": Case("adapter", {**ADAPTED, "base": "nf4"}, Mesh(tp=2)),
    "bf16": Case("adapter", {**ADAPTED, "adapter": "dora", "base": "nf4", "dtype": "bf16"}, Mesh(tp=2), rtol=2e-2),
    "sharded lora": Case("adapter", {**ADAPTED, "rank": 3}, Mesh(fsdp=2), (Mesh(),)),
    "parts of lora": Case("adapter", {**ADAPTED, "rank": 3}, BOTH, (BESIDE,)),
    "parts of dora": Case("adapter", {**ADAPTED, "adapter": "dora", "rank": 3}, BOTH, (BESIDE,)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "layers" else pytest.mark.slow) for name in CASES]
)
def test_row_45_a_run_goes_on_at_any_mesh(name: str, settings: Make, tmp_path: Path) -> None:
    """Folders of whole tensors, and shards written in the background, have the same bits of weights and moments. From
    both, `mesh` and the meshes `alike` go on bit for bit; one process reads them, and `mesh` reads its checkpoints."""
    run, changes, mesh, alike, other_meshes, rtol = CASES[name]
    if run == "adapter":
        llama(tmp_path / "base", **WIDE)
    config = RUNS[run](settings, tmp_path, **changes)
    train(config, quiet=True)
    folders, shards = (
        by(mesh, config.model_copy(update=form), tmp_path / str(form["checkpoints"]))
        for form in ({"checkpoints": "folder"}, {"checkpoints": "shards", "save_in_background": True})
    )
    assert_close(folders.out, config.out, after=0, rtol=rtol)
    whole, parts = (Path(run_config.out) / "checkpoint-4" for run_config in (folders, shards))
    assert len(list(parts.glob("*-shard-*"))) == 2 * mesh.ranks
    assert_equal(state(parts), state(whole))
    shapes = (
        {n: t.shape for n, t in state(path).items()} for path in (whole, Path(config.out) / "checkpoint-4")
    )
    assert next(shapes) == next(shapes)
    assert headway.load(Path(folders.out) / "final").generate("one two", max_new_tokens=3).ids
    for same in (mesh, *alike):
        for source in (whole, parts):
            again = by(same, config, tmp_path / f"{same} {source.parents[1].name}", str(source))
            assert_equal(weights(again.out), weights(folders.out))
    for other, source in (
        *((other_mesh, parts) for other_mesh in other_meshes),
        (mesh, Path(config.out) / "checkpoint-4"),
    ):
        again = by(other, config, tmp_path / f"{other} from {source.parents[1].name}", str(source))
        assert_close(again.out, config.out, after=4, rtol=rtol)


def test_a_mesh_that_does_not_fit_is_refused_before_data_is_read(settings: Make) -> None:
    with pytest.raises(
        ConfigError, match="8 experts cannot be shared evenly by 3 processes; expert must divide 8"
    ):
        checked(settings(**SPARSE, mesh="expert=3"), 3)
    with pytest.raises(ConfigError, match="this model has no experts; leave expert out"):
        checked(settings(mesh="expert=2"), 2)
