"""Checkpoints of sharded tensors: the processes together write every number once, however it is sharded."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from headway.parallel import joined
from headway.parallel.sharded import fill, own_parts
from headway.storage.shards import write_shard
from headway.storage.tensors import open_tensors
from tests.train.processes import together

PLACEMENTS: dict[str, tuple[Placement, Placement]] = {
    "rows": (Shard(0), Replicate()),
    "columns": (Replicate(), Shard(1)),
    "both": (Shard(0), Shard(1)),
    "rows of rows": (Shard(0), Shard(0)),
    "everywhere": (Replicate(), Replicate()),
}
SHAPES = {"even": (8, 4), "uneven": (7, 3), "fewer than processes": (1, 3), "of three axes": (3, 5, 2)}


def test_every_number_is_written_once_and_read_by_whoever_has_it(tmp_path: Path) -> None:
    """Four processes in a mesh of 2 x 2 write; then each reads what any other placement gives it."""
    whole = {
        f"{placed}, {shape}": torch.arange(float(torch.Size(size).numel())).reshape(size)
        for placed in PLACEMENTS
        for shape, size in SHAPES.items()
    }
    whole |= {"step": torch.tensor(3.0), "plain": torch.arange(5.0), "of rank 2 alone": torch.arange(6.0)}

    def rank(number: int) -> None:
        with joined("dp=4") as parallel:
            mesh = init_device_mesh("cpu", (2, 2))

            def placed(placement_name: str) -> dict[str, torch.Tensor]:
                def place(name: str) -> torch.Tensor:
                    placement = PLACEMENTS.get(placement_name or name.partition(",")[0])
                    return (
                        whole[name] if placement is None else distribute_tensor(whole[name], mesh, placement)
                    )

                names = [n for n in whole if "alone" not in n or parallel.rank == 2]
                return {n: place(n) if "," in n else whole[n] for n in names}

            parts = own_parts(placed(""), parallel)
            write_shard(tmp_path, "model", parallel.rank, 4, parts)
            dist.barrier()
            tensors = open_tensors(tmp_path)
            assert tensors.keys() == whole.keys()
            assert all(torch.equal(tensors[name], value) for name, value in whole.items())
            for placement_name in PLACEMENTS:
                for name, target in placed(placement_name).items():
                    expected = target.clone()
                    fill(target.zero_() if "," in name else target, tensors, name)
                    actual_local, expected_local = (
                        t.to_local() if "," in name else t for t in (target, expected)
                    )
                    assert torch.equal(actual_local, expected_local)
            written = parallel.gather(sum(part.value.numel() for part in parts.values()))
            assert sum(written) == sum(value.numel() for value in whole.values())
            assert max(written) < 2 * min(written)

    together(4, rank, tmp_path / "said")
