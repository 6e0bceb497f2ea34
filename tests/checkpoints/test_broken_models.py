"""A broken folder at the command line: for an encoder, an encoder-decoder and a decoder, each fault is reported with
its file and a remedy, exit code 1 and no traceback."""

import json
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headway.checkpoints import save_folder
from headway.cli import run
from headway.models import ModelSpec, build
from headway.text import train_bpe
from tests.checkpoints.broken_tokenizers import BERT, UNIGRAM, WORDS, sentencepiece
from tests.checkpoints.edits import set_keys, set_tensors
from tests.checkpoints.mutations import IMPOSTORS

SIZE = {"width": 16, "layers": 2, "heads": 2, "hidden": 24}
LFS, HTML = IMPOSTORS[1:3]
COMMANDS = {
    "gpt2": ("generate", "the cat", "--max-new-tokens", "2"),
    "bert": ("fill-mask", "a [MASK] b"),
    "marian": ("translate", "a b"),
}
# name of the embedding, name of the tied matrix, config key of the width, of the number of layers, tokenizer file
NAMES = {
    "gpt2": ("transformer.wte.weight", "lm_head.weight", "n_embd", "n_layer", "tokenizer.json"),
    "bert": (
        "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight", "hidden_size",
        "num_hidden_layers", "vocab.txt",
    ),
    "marian": ("model.shared.weight", "lm_head.weight", "d_model", "decoder_layers", "source.spm"),
}  # fmt: skip
Break = Callable[[Path, str], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with an intact folder of each kind and its tokenizer."""
    root = tmp_path_factory.mktemp("whole")
    tokenizer = train_bpe(["the cat sat on the mat\n" * 3], 262)
    gpt2 = build(ModelSpec.of("gpt2", vocab=262, **SIZE), seed=0)
    save_folder(root / "gpt2", gpt2, tokenizer=tokenizer)
    save_folder(root / "shards", gpt2, tokenizer=tokenizer, shard_bytes=6000)
    save_folder(root / "bert", build(ModelSpec.of("bert", vocab=len(BERT), **SIZE), seed=0))
    (root / "bert" / "vocab.txt").write_text("\n".join(BERT))
    pair = ModelSpec.of_pair("marian", vocab=10, encoder={"layers": 1}, **SIZE)
    save_folder(
        root / "marian", build(pair, seed=0), generation={"eos_token_id": 0, "decoder_start_token_id": 9}
    )
    for side in ("source", "target"):
        (root / "marian" / f"{side}.spm").write_bytes(sentencepiece(UNIGRAM))
    ids = {name: i for i, name in enumerate(["</s>", "<unk>", *WORDS, "<pad>"])}
    (root / "marian" / "vocab.json").write_text(json.dumps(ids))
    return root


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def bytes_of(change: Callable[[bytes], bytes]) -> Break:
    return lambda folder, kind: weights(folder).write_bytes(change(weights(folder).read_bytes()))


def tensors_of(change: Callable[[dict[str, Tensor], str], object]) -> Break:
    return lambda folder, kind: set_tensors(folder, lambda stored: change(stored, kind))


def config_of(**changes: object) -> Break:
    """Changes keys of `config.json`; "width" and "layers" stand for the family's own keys."""

    def broken(folder: Path, kind: str) -> None:
        family_keys = {"width": NAMES[kind][2], "layers": NAMES[kind][3]}
        set_keys(folder, **{family_keys.get(key, key): value for key, value in changes.items()})

    return broken


def tied(stored: dict[str, Tensor], kind: str, change: float) -> None:
    first, second, *_ = NAMES[kind]
    stored[second] = stored[first] + change


def renamed(stored: dict[str, Tensor], kind: str) -> None:
    stored[NAMES[kind][0] + "x"] = stored.pop(NAMES[kind][0])


def pickled(folder: Path, kind: str) -> None:
    torch.save(load_file(weights(folder)), folder / "pytorch_model.bin")
    weights(folder).unlink()


FAULTS_OF_FILES: dict[str, tuple[Break, str]] = {
    "cut": (bytes_of(lambda raw: raw[:-100]), r"model\.safetensors is truncated: .* repeat it"),
    "cut header": (bytes_of(lambda raw: raw[:50]), r"model\.safetensors is truncated: .* copy it again"),
    "lfs": (bytes_of(lambda raw: LFS), r"model\.safetensors is .* git-lfs pointer.*run `git lfs pull`"),
    "html": (bytes_of(lambda raw: HTML), r"model\.safetensors is .* an HTML page.*fetch the file again"),
    "empty": (bytes_of(lambda raw: b""), r"model\.safetensors is .* empty \(0 bytes\).*fetch it again"),
    "long header": (
        bytes_of(lambda raw: struct.pack("<Q", 10**10) + raw[8:]),
        r"model\.safetensors has a damaged safetensors header: it claims 10,000,000,000 bytes",
    ),
    "pickle": (pickled, r"pytorch_model\.bin is a pickle .*--allow-pickle"),
    "hidden pickle": (
        bytes_of(lambda raw: pickle.dumps({"a": 1})),
        r"model\.safetensors is a pickle .*--allow-pickle",
    ),
}
FAULTS: dict[str, tuple[Break, str]] = {
    "no weights": (lambda folder, kind: weights(folder).unlink(), r"holds no weights: expected model\.safetensors"),
    "no config": (lambda folder, kind: (folder / "config.json").unlink(), r"has no config\.json"),
    "tied, different": (
        tensors_of(lambda stored, kind: tied(stored, kind, 1.0)),
        r"are tied in config.json, but differ in the file: .*tie_word_embeddings",
    ),
    "untied": (
        config_of(tie_word_embeddings=False),
        r"\(\d+ differences?\)(.|\n)*missing: .*config\.json must say tie_word_embeddings: true",
    ),
    "renamed": (
        tensors_of(renamed),
        r"missing: (\S+) \(nearest there: \"\1x\"\)(.|\n)*unexpected: \1x \(did you mean \"\1\"\?\)",
    ),
    "shape": (
        tensors_of(lambda stored, kind: stored.update({NAMES[kind][0]: torch.zeros(3, 5)})),
        r"\(1 difference\)(.|\n)*shape: \S+ is \[3, 5\], the config says \[\d+, 16\]",
    ),
    "huge width": (config_of(width=10**12), r"config\.json: \w+ is 1,000,000,000,000; at most"),
    "one layer more": (config_of(layers=3), r"\(\d+ differences\)(.|\n)*missing: "),
    "unknown key": (config_of(hiden_size=1), r"config\.json: unknown key \"hiden_size\".* remove it if"),
    "unknown family": (config_of(model_type="bertt"), r"headway knows no model_type 'bertt'.*did you mean \"bert\""),
    "another class": (config_of(architectures=["A"]), r"config\.json: architectures \['A'\] .*known are"),
    "tokenizer": (
        lambda folder, kind: (folder / NAMES[kind][4]).write_bytes(b"\x00garbage"),
        r"(tokenizer\.json|vocab\.txt|source\.spm): (not a|the unk token)",
    ),
    "tokenizer lfs": (
        lambda folder, kind: (folder / NAMES[kind][4]).write_bytes(LFS),
        r"(tokenizer\.json|vocab\.txt|source\.spm) is not a .*: it is a git-lfs pointer.*run `git lfs pull`",
    ),
}  # fmt: skip


def said(folder: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    command, *arguments = COMMANDS[kind]
    code = run([command, str(folder), *arguments])
    return code, " ".join(capsys.readouterr().err.split("\n"))


@pytest.mark.parametrize(("fault", "kind"), [*product(FAULTS, COMMANDS), *product(FAULTS_OF_FILES, ["bert"])])
def test_a_fault_is_named(
    fault: str, kind: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(whole / kind, tmp_path / "m")
    breaks, message = (FAULTS | FAULTS_OF_FILES)[fault]
    breaks(folder, kind)
    code, text = said(folder, kind, capsys)
    assert code == 1
    assert str(folder) in text
    assert re.search(message, text), text


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("how", ["whole", "tied twice", "tied under the other name"])
def test_what_is_whole_runs(
    how: str, kind: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(whole / kind, tmp_path / "m")
    first, second, *_ = NAMES[kind]
    if how == "tied twice":
        tensors_of(lambda stored, kind: tied(stored, kind, 0.0))(folder, kind)
    if how == "tied under the other name":
        tensors_of(lambda stored, kind: stored.update({second: stored.pop(first)}))(folder, kind)
    code, text = said(folder, kind, capsys)
    assert code == 0, text


SHARDS: dict[str, tuple[Break, str]] = {
    "cut": (
        lambda folder, kind: os.truncate(sorted(folder.glob("model-*"))[1], 300),
        r"model-00002-of\S+ is truncated: it has 300 of [\d,]+ bytes",
    ),
    "missing": (
        lambda folder, kind: sorted(folder.glob("model-*"))[1].unlink(),
        r"names 1 of \d files that are not in .*model-00002-of.*incomplete",
    ),
    "no index": (
        lambda folder, kind: (folder / "model.safetensors.index.json").unlink(),
        r"holds shards .* but no model\.safetensors\.index\.json: the copy is incomplete",
    ),
    "two sets": (
        lambda folder, kind: shutil.copy(sorted(folder.glob("model-*"))[0], weights(folder)),
        r"holds two sets of weights, .* remove the one that is out of date",
    ),
}


@pytest.mark.parametrize("fault", SHARDS)
def test_a_fault_of_shards_is_named(
    fault: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(whole / "shards", tmp_path / "m")
    breaks, message = SHARDS[fault]
    breaks(folder, "gpt2")
    code, text = said(folder, "gpt2", capsys)
    assert code == 1
    assert str(folder) in text
    assert re.search(message, text), text
