"""Broken GGUF files: every truncation is reported, and a flipped byte is reported or read as what it then says; nothing
else happens, and no more memory is allocated than the file has."""

import struct
import tempfile
import tracemalloc
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.checkpoints.folder import load_folder
from headway.checkpoints.formats.gguf.model import write_model
from headway.checkpoints.formats.gguf.writer import write_gguf
from headway.errors import CheckpointError, HeadwayError
from headway.storage.gguf import MAGIC, read_gguf
from headway.storage.gguf_blocks import Q4_0
from headway.text import Tokenizer
from tests.checkpoints.gguf_files import SPECS, weights
from tests.text.conftest import sentencepiece

MOST = 4 << 20
"""Bytes that reading may allocate in Python beyond the size of the file."""


@cache
def small() -> bytes:
    """Returns a file of one layer with a tokenizer."""
    spec = replace(SPECS["llama"], layers=1, patterns=SPECS["llama"].patterns[:1], vocab=288)
    keys = sentencepiece().gguf_metadata(spec.vocab)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        write_model(path, spec, weights(spec), Q4_0, tokenizer=keys)
        return path.read_bytes()


@cache
def table_ends() -> int:
    """Returns the offset of the first tensor's values."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "m.gguf").write_bytes(small())
        return min(entry.at for entry in read_gguf(Path(folder) / "m.gguf").tensors.values())


def read_whole(path):
    """Reads everything in a file, and checks that shapes are those that the table promises."""
    model = load_folder(path)
    for name, form in model.tensors.forms.items():
        assert tuple(model.tensors[name].shape) == form.shape
    Tokenizer.load(path).encode("the cat")


def fails_well(path, raw):
    path.write_bytes(raw)
    message = str(path)
    tracemalloc.start()
    try:
        read_whole(path)
    except HeadwayError as error:
        message = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert str(path) in message
    assert len(message) < 4000
    assert peak < len(raw) + MOST


def test_the_whole_file_is_read(tmp_path):
    (tmp_path / "m.gguf").write_bytes(small())
    read_whole(tmp_path / "m.gguf")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_truncation_is_named(tmp_path_factory, data):
    raw = small()
    length = data.draw(st.one_of(st.integers(0, table_ends()), st.integers(0, len(raw) - 32)))
    path = tmp_path_factory.mktemp("cut") / "m.gguf"
    path.write_bytes(raw[:length])
    with pytest.raises(CheckpointError, match=r"truncated|is empty|damaged") as error:
        read_gguf(path)
    assert str(path) in str(error.value)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_flipped_bytes_are_named_or_read_as_what_they_say(tmp_path_factory, data):
    raw = bytearray(small())
    places = st.one_of(st.integers(0, 23), st.integers(0, table_ends()), st.integers(0, len(raw) - 1))
    for position in data.draw(st.lists(places, min_size=1, max_size=4)):
        raw[position] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 127, 128, 255])))
    fails_well(tmp_path_factory.mktemp("flip") / "m.gguf", bytes(raw))


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_behind_the_magic_are_named(tmp_path_factory, tail):
    fails_well(tmp_path_factory.mktemp("tail") / "m.gguf", MAGIC + struct.pack("<I", 3) + tail)


def by_hand(keys=b"", tensors=b"", counts=(0, 0), version=3, magic=MAGIC, values=b""):
    head = magic + struct.pack("<IQQ", version, *counts) + keys + tensors
    return head + bytes(-len(head) % 32) + values


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def entry(name, sizes, kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


U32 = struct.Struct("<I").pack
FAULTS = {
    "begins with b'ggjt'": by_hand(magic=b"ggjt"),
    "version 1 is unsupported": by_hand(version=1),
    "version 50331648 .its bytes are those of a big-endian": by_hand(version=3 << 24),
    "claims 18,446,744,073,709,551,615 keys": by_hand(counts=(0, 2**64 - 1)),
    "claims 1,000 tensors": by_hand(counts=(1000, 0)),
    "a key has no name": by_hand(key("", 4, U32(1)) + bytes(64), counts=(0, 1)),
    "the key a occurs twice": by_hand(key("a", 4, U32(1)) * 2, counts=(0, 2)),
    "a is of kind 13, which is unknown": by_hand(key("a", 13, U32(1)), counts=(0, 1)),
    "a must be true or false": by_hand(key("a", 7, b"\2"), counts=(0, 1)),
    "is not UTF-8": by_hand(key("a", 8, text(b"\xff\xfe")), counts=(0, 1)),
    "is unprintable or over 500": by_hand(key("a\nb", 4, U32(1)), counts=(0, 1)),
    "an array of kind 9, which is unknown or unsupported": by_hand(
        key("a", 9, struct.pack("<IQ", 9, 1)) + bytes(32), counts=(0, 1)
    ),
    "a claims 4,611,686,018,427,387,904 items": by_hand(
        key("a", 9, struct.pack("<IQ", 8, 2**62)) + bytes(32), counts=(0, 1)
    ),
    "general.alignment must be a power of two": by_hand(key("general.alignment", 4, U32(24)), counts=(0, 1)),
    "tensor t has 9 axes": by_hand(tensors=entry("t", [1] * 9), counts=(1, 0)),
    "no tensor is that large": by_hand(tensors=entry("t", [2**40, 2**40]), counts=(1, 0)),
    "tensor t is of type IQ4_NL, which is unsupported": by_hand(tensors=entry("t", [32], 20), counts=(1, 0)),
    "tensor t is of type 77, which is unknown": by_hand(tensors=entry("t", [32], 77), counts=(1, 0)),
    "rows of Q8_0 hold multiples of 32": by_hand(tensors=entry("t", [33, 2], 8), counts=(1, 0)),
    "tensor t has sizes .0, 2.": by_hand(tensors=entry("t", [0, 2]), counts=(1, 0)),
    "tensor t is at byte 64 of the values, but should be at 0": by_hand(
        tensors=entry("t", [8], 0, 64), counts=(1, 0), values=bytes(96)
    ),
    "the tensor t occurs twice": by_hand(
        tensors=entry("t", [8]) + entry("t", [8], 0, 32), counts=(2, 0), values=bytes(64)
    ),
    "is truncated: it has": by_hand(tensors=entry("t", [2**30]), counts=(1, 0), values=bytes(32)),
    "32 bytes follow the last tensor": by_hand(tensors=entry("t", [8]), counts=(1, 0), values=bytes(64)),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_is_named(tmp_path, message):
    (tmp_path / "m.gguf").write_bytes(FAULTS[message])
    with pytest.raises(CheckpointError, match=message) as error:
        read_gguf(tmp_path / "m.gguf")
    assert str(tmp_path / "m.gguf") in str(error.value)


def test_other_files_are_named(tmp_path):
    for raw, message in [
        (b"", "it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        (b"<!DOCTYPE html><html>", "HTML page"),
        (b"anything else", "not a GGUF file"),
    ]:
        (tmp_path / "m.gguf").write_bytes(raw)
        for reader in (read_gguf, load_folder):
            with pytest.raises(CheckpointError, match=message):
                reader(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="cannot read"):
        read_gguf(tmp_path / "none.gguf")


def test_all_kinds_of_values_are_read(tmp_path):
    """In little-endian files, versions 2 and 3 have the same layout."""
    codes = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
    keys = b"".join(key(f"k{kind}", kind, struct.pack(f"<{code}", 7)) for kind, code in codes.items())
    keys += b"".join(
        key(f"a{kind}", 9, struct.pack(f"<IQ3{code}", kind, 3, 1, 2, 3)) for kind, code in codes.items()
    )
    keys += key("yes", 7, b"\1") + key("text", 8, text("naïve ▁猫"))
    keys += key("texts", 9, struct.pack("<IQ", 8, 2) + text("") + text("b")) + key(
        "none", 9, struct.pack("<IQ", 5, 0)
    )
    for version in (2, 3):
        (tmp_path / "m.gguf").write_bytes(by_hand(keys, counts=(0, 2 * len(codes) + 4), version=version))
        metadata = read_gguf(tmp_path / "m.gguf").metadata
        assert all(metadata[f"k{kind}"] == 7 and list(metadata[f"a{kind}"]) == [1, 2, 3] for kind in codes)
        assert (metadata["yes"], metadata["text"], metadata["texts"]) == (True, "naïve ▁猫", ["", "b"])
        assert len(metadata["none"]) == 0


@pytest.mark.parametrize("value", [-1, 2**32, 1e300, [], [1, "a"], None, [2**31]])
def test_values_that_a_file_cannot_hold_are_refused(tmp_path, value):
    with pytest.raises(CheckpointError, match="a "):
        write_gguf(tmp_path / "m.gguf", {"a": value}, {}, {})
    assert not (tmp_path / "m.gguf").exists()
