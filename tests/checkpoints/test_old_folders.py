"""Model folders and token files that headway 0.1.0 wrote go on to be read: tests/folders_0_1/README.md."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import headway
from headway.checkpoints import load_folder, load_model, save_folder
from headway.checkpoints.restore import build_model
from headway.data import TokenFile
from tests.folders_0_1.common import HERE, inputs, kernels
from tests.operators import plain

SAID = json.loads((HERE / "models.json").read_text("utf-8"))
LOGITS = load_file(HERE / "models.safetensors")
SAME_KERNELS = kernels() == SAID["kernels"]
FOLDERS = sorted(SAID["folders"])

ULPS = 512
"""A bound on what other kernels may change of a float32 result, in ulps of the largest logit: some 60 roundings follow
each other in these models (6 layers of ten), and norms over as few as 4 numbers magnify them. Kernels of AVX2 and
portable ones were measured at 43 or less. A wrong window, pairing or scale moves logits 100 times the bound."""


def logits(model: Any) -> torch.Tensor:
    args, options = inputs(model)
    with torch.no_grad():
        return model(*args, **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_0_1_computes_what_it_did_and_is_for_what_it_was(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formulas to the bit, where kernels are the same; fused operators up to rounding."""
    said, face = SAID["folders"][name], headway.load(HERE / "models" / name, dtype="float32")
    then = LOGITS[name]
    bound = ULPS * torch.finfo(torch.float32).eps * float(then.abs().max())
    torch.testing.assert_close(logits(face.model), then, rtol=0, atol=bound)
    plain(monkeypatch)
    torch.testing.assert_close(logits(face.model), then, rtol=0, atol=0 if SAME_KERNELS else bound)
    assert type(face).__name__ == said["face"]
    assert getattr(face, "independent", None) == said["independent"]
    assert list(face.spec.head.labels) == said["labels"]
    for spec, facts in ((face.spec, said["spec"]), (face.spec.encoder, said["encoder"])):
        if facts is not None:
            assert {fact: getattr(spec, fact) for fact in facts} == facts


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_0_1_is_written_again_as_it_was(name: str, tmp_path: Path) -> None:
    old = load_folder(HERE / "models" / name)
    assert dict(old.generation) == SAID["folders"][name]["generation"]
    one_stack = SAID["folders"][name]["face"] == "LanguageModel"
    model: Any = load_model(old.path) if one_stack else build_model(old)
    assert str(next(model.parameters()).dtype) == SAID["folders"][name]["dtype"]
    dtype = next(iter(old.tensors.forms.values())).dtype
    save_folder(tmp_path, model, dtype=dtype, keep_pairing=True, generation=old.generation)
    new = load_folder(tmp_path)
    assert new.spec == old.spec
    as_it_was = (
        old.config["model_type"] if name != "bert-embed" else "bert"
    )  # with files of sentence-transformers
    assert new.config["model_type"] == as_it_was
    assert old.tensors.keys() == new.tensors.keys()
    assert all(torch.equal(new.tensors[name], old.tensors[name]) for name in old.tensors)
    if old.config["model_type"] != "headway":  # whose fields are ours to name
        of_the_face = {"problem_type"}
        assert dict(new.config) == {k: v for k, v in old.config.items() if k not in of_the_face}
        assert set(new.stored) == set(old.stored)


def test_a_folder_of_0_1_that_a_save_moved_aside_is_found(tmp_path: Path) -> None:
    """A process that died between the two renames of a save."""
    shutil.copytree(HERE / "models" / "gpt2", tmp_path / ".model.previous")
    assert load_folder(tmp_path / "model").spec.family == "gpt2"


@pytest.mark.parametrize("name", ["uint16", "uint32"])
def test_a_token_file_of_0_1_holds_what_it_did(name: str) -> None:
    file = TokenFile(HERE / "tokens" / f"{name}.tokens")
    said = json.loads((HERE / "tokens" / "expected.json").read_text("utf-8"))[name]
    assert file.tokens.dtype == name
    assert (file.vocab, file.text_bytes, file.fingerprint.hex()) == (
        said["vocab"],
        said["text_bytes"],
        said["fingerprint"],
    )
    assert [file.document(i).tolist() for i in range(file.documents)] == said["documents"]
