"""Folders of a small language model: one that talks, and one without a chat template."""

import pytest

from headway.checkpoints.saving import save_folder
from tests.generate.conftest import small
from tests.text.conftest import byte_level
from tests.text.test_chat import TURNS, with_template


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "small"
    save_folder(path, small(context=512), tokenizer=with_template(byte_level(), TURNS))
    return str(path)


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "bare"
    save_folder(path, small(), tokenizer=byte_level())
    return str(path)
