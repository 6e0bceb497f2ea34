"""Embeddings over HTTP beside sentence-transformers: the same vectors, and a row that says how long they take."""

import json
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

from headway_lab.bench.embeddings import PEER, _sentence_transformer
from headway_lab.bench.inputs import OURS, UnsupportedCase
from tests.serve.others import python_of

ROOT = Path(__file__).parents[2]


def test_a_peer_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(UnsupportedCase, match="pip install sentence-transformers"):
        _sentence_transformer(Path("model"))


@pytest.mark.slow
def test_rows_of_embeddings() -> None:
    """sentence-transformers is alone in an environment of its own, behind our packages."""
    python = python_of("sentences", "--no-deps", "sentence-transformers==6.2.*")
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *site.getsitepackages()])}
    arguments = ["bench", "serve", "--model", "minilm", "--clients", "2", "--rounds", "1", "--threads", "1"]
    done = subprocess.run(
        [python, "-m", "headway", *arguments, "--json"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = map(json.loads, done.stdout.splitlines())
    assert (row["case"], row["dtype"], row["machine"]["notes"]) == ("minilm clients=2", "float32", [])
    assert [*row["figures"]] == [OURS, PEER] == [OURS, *row["peers"]]
    assert min(side["tokens_per_second"] for side in row["figures"].values()) > 0
    assert 0 < row["share_of_limit"] < 1
