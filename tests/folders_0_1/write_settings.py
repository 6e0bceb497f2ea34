"""Writes `settings/`: the recipes as they are, and what they are read as. See README.md."""

import json
import shutil

from headway.train import TrainConfig
from headway.train.sources import read_settings
from headway.train.translation_config import TranslationConfig
from tests.folders_0_1.common import HERE


def write_settings() -> None:
    shutil.rmtree(HERE / "settings", ignore_errors=True)
    shutil.copytree(HERE.parents[1] / "recipes", HERE / "settings")
    resolved = {
        path.name: read_settings(
            TranslationConfig if path.stem == "translation" else TrainConfig, path
        ).model_dump(mode="json")
        for path in sorted((HERE / "settings").glob("*.yaml"))
    }
    (HERE / "settings" / "resolved.json").write_text(json.dumps(resolved, indent=1) + "\n", "utf-8")
