"""The demo's corpus: held-out text is never trained on, and compressors are measured as stated."""

import gzip
import io
import lzma
import math
from pathlib import Path

import pytest

from headway.errors import DataError
from headway_lab.demo import corpus


def fill(root: Path, names: list[str], size: int = 3000) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n" + "value = 1\n" * (size // 10))


def test_the_standard_library_is_split_by_top_level_package() -> None:
    split = corpus.standard_library()
    trained, held = ({document.group for document in part} for part in (split.train, split.held_out))
    assert not trained & held
    assert all(corpus.is_held_out(group) for group in held)
    assert not any(corpus.is_held_out(group) for group in trained)
    assert split.train_bytes > 5_000_000
    assert 0.02 < len(split.held_out_bytes) / split.train_bytes < 0.2
    assert {"argparse", "typing", "asyncio"} <= trained | held


def test_tests_tables_and_other_peoples_packages_are_left_out() -> None:
    split = corpus.standard_library()
    parts = {part for document in (*split.train, *split.held_out) for part in Path(document.name).parts}
    assert not parts & {
        "test",
        "tests",
        "idle_test",
        "encodings",
        "pydoc_data",
        "site-packages",
        "lib-dynload",
    }
    assert not any(part.startswith(("_sysconfigdata", "config-")) for part in parts)


def test_the_split_is_a_pure_function_of_the_name() -> None:
    assert [name for name in ("json", "html", "pdb", "email", "abc", "re") if corpus.is_held_out(name)] == [
        "json",
        "html",
        "pdb",
    ]


def test_a_file_is_in_the_corpus_with_its_text(tmp_path: Path) -> None:
    fill(
        tmp_path,
        [f"module_{i}.py" for i in range(40)] + ["test/x.py", "package/tests/y.py", "_sysconfigdata_z.py"],
    )
    (tmp_path / "broken.py").write_bytes(b"\xff\xfe\x00")
    split = corpus.standard_library(tmp_path)
    documents = {document.name: document for document in (*split.train, *split.held_out)}
    assert set(documents) == {f"module_{i}.py" for i in range(40)}
    assert documents["module_7.py"].text == (tmp_path / "module_7.py").read_text()
    assert documents["module_7.py"].group == "module_7"


def test_a_library_that_is_not_there_as_files_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="0 bytes in 0 files, 0 of them held out, are too few; run with a Python"
    ):
        corpus.standard_library(tmp_path)


def test_compressors_are_measured_as_the_commands_would() -> None:
    data = Path(io.__file__).read_bytes() * 8
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=9, mtime=0) as file:
        file.write(data)
    assert corpus.gzip_bits(data) == 8 * len(buffer.getvalue()) / len(data)
    assert corpus.xz_bits(data) == 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)
    assert corpus.xz_bits(data) < corpus.gzip_bits(data) < corpus.unigram_bits(data)


def test_unigram_bits_is_the_entropy_of_the_bytes() -> None:
    assert corpus.unigram_bits(b"ab" * 50) == 1.0
    assert corpus.unigram_bits(b"aaab") == pytest.approx(-(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25)))
    assert corpus.unigram_bits(bytes(range(256))) == 8.0
