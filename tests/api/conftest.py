"""A small language model and its folder."""

from pathlib import Path

import pytest

import headway
from headway.api import LanguageModel
from headway.checkpoints.saving import save_folder
from tests.generate.conftest import small
from tests.text.conftest import byte_level
from tests.text.test_chat import TURNS, with_template


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    save_folder(path, small(), tokenizer=with_template(byte_level(), TURNS))
    return path


@pytest.fixture(scope="module")
def lm(folder: Path) -> LanguageModel:
    return headway.load(folder)
