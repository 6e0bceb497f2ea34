"""Writes everything in this folder. It runs with headway 0.1.0 of commit 6bd5074 only: see README.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.folders_0_1.write_models import write_models, write_tokens
from tests.folders_0_1.write_runs import write_runs
from tests.folders_0_1.write_settings import write_settings

torch.set_num_threads(1)
write_models()
write_tokens()
write_runs()
write_settings()
