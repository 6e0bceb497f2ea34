"""python recipes/ray_train.py 2 run.yaml key=value ...: a run that so many workers of Ray Train share.

The folder that it is started in, that of the run and its data are ones that all nodes see. Each worker calls
`headway.train.train`, which takes torch.distributed as Ray has initialized it; workers that fail are started again, and
resume from the last checkpoint.
"""

import os
import sys
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from headway.train import read_config, train


def work(given: dict[str, Any]) -> None:
    os.chdir(given["folder"])
    train(read_config(given["file"], given["overrides"], {}, {}), resume="auto")


def main(workers: str, file: str, *overrides: str) -> None:
    TorchTrainer(
        work,
        train_loop_config={"folder": os.getcwd(), "file": file, "overrides": overrides},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=int(workers)),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
