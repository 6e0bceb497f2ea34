"""`headway data`: published data sets are brought into form, and the table has all that recipes name."""

import gzip
import json
import zipfile
from pathlib import Path

import pytest

from headway.cli import run
from headway.data import loaders
from headway.data.datasets import DATASETS, made_by, prepare
from headway.data.record_kinds import Chat, Labelled, Question, Triplet
from headway.data.records import read_records
from headway.errors import ConfigError, DataError


def test_chapters_begin_where_they_say(tmp_path: Path) -> None:
    body = "话说天下大势，分久必合。" * 30
    text = f"三国\n第一回 目录\n第二回 目录\n\n第一回 宴桃园\n\n  {body}\n第二回 张翼德\n {body}\n"
    assert loaders.chapters(text) == [f"第一回 宴桃园\n{body}\n", f"第二回 张翼德\n{body}\n"]


def test_text8_is_letters_and_single_spaces() -> None:
    rule = loaders.text8
    assert rule("In 1987, the U.S.; naïve") == "in one nine eight seven the u s na ve"
    assert rule(rule("A b\n\nC 0")) == rule("A b\n\nC 0") == "a b c zero "


def test_reviews_are_split_by_their_numbers(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
        for name in ("neg/cv000_1.txt", "pos/cv799_2.txt", "neg/cv899_3.txt", "pos/cv900_4.txt", "README"):
            archive.writestr(f"movie_reviews/{name}", f"so {name}\nit  is\n")
    read = loaders.reviews
    records = {split: list(read([tmp_path / "m.zip"], split)) for split in ("train", "dev", "test")}
    assert records["train"] == [
        {"text": "so neg/cv000_1.txt it is", "label": "neg"},
        {"text": "so pos/cv799_2.txt it is", "label": "pos"},
    ]
    assert [len(records[split]) for split in ("dev", "test")] == [1, 1]


def test_a_sample_has_lines_of_the_file_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"i": {i}}}\n' for i in range(1000)))
    lines, again, other_seed = ([*loaders.sampled([tmp_path / "a.jsonl"], 100, seed)] for seed in (0, 0, 1))
    numbers = [json.loads(line)["i"] for line in lines]
    assert numbers == sorted({*numbers})
    assert len(numbers) == 100
    assert 300 < sum(numbers) / 100 < 700  # from the whole file
    assert lines == again != other_seed
    assert len([*loaders.sampled([tmp_path / "a.jsonl"], 2000)]) == 1000
    separators = '{"text": "one\u2028two\x85three"}\n'
    (tmp_path / "b.jsonl").write_text(separators, encoding="utf-8")
    assert [*loaders.sampled([tmp_path / "b.jsonl"], 5)] == [separators]


def test_articles_are_joined_with_their_labels(tmp_path: Path) -> None:
    texts, truth = tmp_path / "a.xml", tmp_path / "t.xml"
    texts.write_text(
        '<articles><article id="1" title="A &amp; B">one <p>two <a href="x">three</a></p></article>'
        '<article id="2" title="C"><p>four</p></article></articles>'
    )
    truth.write_text(
        '<articles><article id="2" hyperpartisan="false"/><article id="1" hyperpartisan="true"/></articles>'
    )
    assert list(loaders.articles([texts, truth])) == [
        {"text": "A & B one two three", "label": "true"},
        {"text": "C four", "label": "false"},
    ]


MEETING = {
    "specific_query_list": [
        {"query": "why ?", "answer": "so", "relevant_text_span": [["1", "2"], ["0", "0"]]},
        {"query": "when ?", "answer": "then", "relevant_text_span": []},
    ],
    "meeting_transcripts": [
        {"speaker": "A", "content": "well {vocalsound} yes"},
        {"speaker": "B", "content": "no"},
        {"speaker": "A", "content": "yes"},
    ],
}


def test_evidence_of_meetings_are_answers(tmp_path: Path) -> None:
    """Files of one JSON object, as published, and of one object a line are read; `train` reads what is written."""
    (tmp_path / "one.json").write_text(json.dumps(MEETING))
    (tmp_path / "two.jsonl").write_text(f"{json.dumps(MEETING)}\n{json.dumps(MEETING)}\n")
    (record,) = loaders.questions(MEETING)
    assert list(loaders.meetings([tmp_path / "one.json"])) == [record]
    assert list(loaders.meetings([tmp_path / "two.jsonl", tmp_path / "one.json"])) == [record] * 3
    assert record["context"] == "A: well yes\nB: no\nA: yes"
    (tmp_path / "q.jsonl").write_text(json.dumps(record))
    (read,) = read_records(tmp_path / "q.jsonl", Question)
    assert isinstance(read, Question)
    assert [answer.text for answer in read.answers] == ["A: well yes", "B: no", "A: yes"]


def test_triplets_have_the_form_of_cail(tmp_path: Path) -> None:
    chapters = ["a" * 40 + "b" * 40, "c" * 45, "d" * 9]
    triplets = list(loaders.triplets(chapters, 20))
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(triplet) + "\n" for triplet in triplets))
    read = [r for r in read_records(tmp_path / "t.jsonl", Triplet) if isinstance(r, Triplet)]
    kinds = [(r.anchor[0], r.positive[0], str(r.negative)[0]) for r in read]
    assert kinds == [("a", "a", "c"), ("b", "b", "c"), ("c", "c", kinds[2][2])]
    assert {len(text) for r in read for text in (r.anchor, r.positive, str(r.negative))} == {20}
    assert triplets == list(loaders.triplets(chapters, 20))


NOVEL = "".join(f"第{number}回\n{letter * 800}\n" for number, letter in zip("一二三", "甲乙丙", strict=True))


@pytest.fixture
def given(tmp_path: Path) -> dict[str, list[Path]]:
    """Returns small files in the published forms, by the data set that is made of them."""
    files = {
        "a.txt": "In 1987, the U.S.",
        "alpaca.in": json.dumps([{"instruction": "go", "input": "", "output": "gone"}]),
        "chats.in": json.dumps(
            [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
        ),
        "talks.in": json.dumps({"input": "### Human: is it a cat? ### Assistant:", "output": "it is"}) + "\n",
        "novel.txt": NOVEL,
        "cail.json": json.dumps({"A": "a", "B": "b", "C": "c", "label": "B"}) + "\n",
        "titles.in": "one\t0\ntwo\t1\n",
        "imdb.in": "".join(json.dumps({"text": f"film {i}", "label": "pos"}) + "\n" for i in range(5)),
        "texts.xml": '<articles><article id="1" title="A">one</article></articles>',
        "truth.xml": '<articles><article id="1" hyperpartisan="true"/></articles>',
        "meetings.jsonl": json.dumps(MEETING),
    }
    for name, text in files.items():
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".in") else text.encode())
    with zipfile.ZipFile(tmp_path / "movies.zip", "w") as archive:
        for name in ("neg/cv000_1.txt", "pos/cv900_2.txt"):
            archive.writestr(name, "so it is\n")
    sources = {
        "text": ["a.txt"], "text8": ["a.txt"], "alpaca": ["alpaca.in"], "sharegpt": ["chats.in"],
        "oasst": ["talks.in"],
        "chapters": ["novel.txt"], "triplets": ["novel.txt"], "triplets-held": ["cail.json"],
        "titles": ["titles.in"], "reviews": ["movies.zip"], "imdb": ["imdb.in"],
        "hyperpartisan": ["texts.xml", "truth.xml"], "qmsum": ["meetings.jsonl"],
    }  # fmt: skip
    return {
        name: [tmp_path / file for file in sources.get(Path(name).stem) or sources[name.partition("-")[0]]]
        for name in DATASETS
    }


@pytest.mark.parametrize("name", DATASETS)
def test_every_set_is_made_of_its_files_and_is_read(name: str, given: dict[str, list[Path]]) -> None:
    """Records are of the kind that the recipe's task reads; texts have the content of their files."""
    out = given[name][0].parent / "made" / name
    out.parent.mkdir()
    assert prepare(name, given[name], out) == out.stat().st_size > 0
    kinds = {
        "alpaca": Chat, "sharegpt": Chat, "oasst": Chat, "triplets": Triplet, "titles": Labelled, "reviews": Labelled,
        "imdb": Labelled, "hyperpartisan": Labelled, "qmsum": Question,
    }  # fmt: skip
    kind = kinds.get(out.stem.partition("-")[0])
    if kind is None:
        assert out.read_text(encoding="utf-8")[:2] in ("In", "in", '{"')
    else:
        records = list(read_records(out, kind))
        assert records
        assert all(isinstance(record, kind) for record in records)


def test_talks_in_english_are_cut_into_turns_and_kept_once(tmp_path: Path) -> None:
    first, second = (
        "### Human: is the sky blue? ### Assistant:",
        " it is ### Human: and the sea? ### Assistant:",
    )
    rows = [
        {"input": first, "output": "it is"},
        {"input": first + second, "output": "so is the sea"},
        {"input": "### Human: и небо? ### Assistant:", "output": "the sky is"},
        {"input": "### Human: is it a cat? ### Assistant:", "output": ""},
        {"input": "### Human: a ### Human: is the b ### Assistant:", "output": "of the c"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    turns = [
        ("human", "is the sky blue?"),
        ("gpt", "it is"),
        ("human", "and the sea?"),
        ("gpt", "so is the sea"),
    ]
    (talk,) = loaders.talks([path])
    assert talk["conversations"] == [{"from": role, "value": text} for role, text in turns]
    path.write_text('{"input": "### Human: a"}')
    with pytest.raises(DataError, match=r"rows.jsonl"):
        list(loaders.talks([path]))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("alpaca.json", "[1, 2]", "must be a JSON list of records, each with"),
        ("oasst.jsonl", "[1]", "list indices must be integers"),
        ("qmsum-test.jsonl", '{"a": 1}', "not a meeting of QMSum: 'meeting_transcripts'"),
        ("imdb-test.jsonl", "no record", "line 1: Expecting value"),
        ("imdb-test.jsonl", "[1]", "line 1: must be a JSON object, got"),
        (
            "triplets.jsonl",
            f"第一回\n{'字' * 800}\n",
            "two or more chapters of at least 700 characters, but only 1 of 1 are that long",
        ),
    ],
)
def test_files_of_another_form_are_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    source = tmp_path / "file.jsonl"
    source.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        prepare(name, [source], tmp_path / name)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["text.txt", "text8.txt"])
def test_english_is_there_without_a_file(name: str, tmp_path: Path) -> None:
    count = prepare(name, [], tmp_path / name)
    text = (tmp_path / name).read_text(encoding="utf-8")
    assert count == len(text.encode()) > 200_000
    assert "statement" in text
    assert (name == "text8.txt") == ({*text} <= {*"abcdefghijklmnopqrstuvwxyz "})


def test_what_cannot_be_made_says_what_is_asked_for(tmp_path: Path) -> None:
    out, empty = tmp_path / "out", tmp_path / "empty.txt"
    empty.write_text("no chapter")
    with pytest.raises(ConfigError, match=r"there is no data set 'text9'"):
        prepare("text9", [], out)
    with pytest.raises(ConfigError, match=r"qmsum-test.jsonl: pass the published files .*: QMSum .*MIT"):
        prepare("qmsum-test.jsonl", [], out)
    with pytest.raises(DataError, match=r"no records in .*empty.txt; expected NOVEL"):
        prepare("chapters.jsonl", [empty], out)
    with pytest.raises(DataError, match=r"empty.txt, line 1: must be text TAB label"):
        prepare("titles-test.txt", [empty], out)
    with pytest.raises(DataError, match=r"empty.txt: .*zip"):
        prepare("reviews-test.jsonl", [empty], out)
    with pytest.raises(DataError, match=r"two files, the articles and then their labels; got 1"):
        prepare("hyperpartisan.jsonl", [empty], out)
    empty.write_text('<articles><article id="1" hyperpartisan="true"/></articles>')
    (texts := tmp_path / "texts.xml").write_text('<articles><article id="1"/><article id="2"/></articles>')
    for files, unlabelled in (([texts, empty], "2"), ([empty, texts], "1")):
        with pytest.raises(
            DataError, match=rf"no label \(hyperpartisan\) for the article of id: '{unlabelled}'"
        ):
            prepare("hyperpartisan.jsonl", files, out)
    empty.write_text("[{}]")
    with pytest.raises(DataError, match=r"must be a JSON list of records, each with instruction, output"):
        prepare("alpaca.json", [empty], out)
    assert not out.exists()
    out.write_text("mine")
    with pytest.raises(ConfigError, match="exists already; remove it, or choose another --out"):
        prepare("text.txt", [], out)
    assert out.read_text() == "mine"


def test_the_command_lists_and_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert list(listing) == list(DATASETS)
    assert all(entry["licence"] and entry["size"] and entry["source"] for entry in listing.values())
    assert run(["data"]) == 0
    output = capsys.readouterr().out
    assert [name for name in DATASETS if f"{name}: " not in output] == []
    assert run(["data", "text8.txt", "--out", str(tmp_path / "t.txt"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == (tmp_path / "t.txt").stat().st_size
    assert "PSF" in report["licence"]
    assert run(["data", "--out", "x"]) == 1
    assert "--out needs the NAME of a data set" in capsys.readouterr().err


def test_a_file_that_recipes_name_has_its_command() -> None:
    assert made_by(Path("somewhere/qmsum-train.jsonl")).startswith(
        "; `headway data qmsum-train.jsonl train.jsonl"
    )
    assert made_by(Path("text8.txt")).startswith("; `headway data text8.txt` makes it")
    assert made_by(Path("mine.txt")) == ""
