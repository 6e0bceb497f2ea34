"""Toy versions of what commands in the docs read: models, runs, texts and records, under the names used there."""

import csv
import gzip
import json
import random
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import chdir
from pathlib import Path
from typing import Any

from headway.checkpoints import load_folder, save_adapter, save_folder
from headway.checkpoints.bases import Base, fingerprint
from headway.data.pairs import END, START, joint_tokenizer
from headway.models import Head, ModelSpec, build
from headway.nn import Adapter, Lora
from headway.text import Tokenizer, train_bpe, train_words
from headway.train import TextConfig, config_yaml, train
from headway.train.tasks.translation import TranslationConfig, translation_spec
from tests.command_lines import ROOT
from tests.data import data_path
from tests.endpoints.scripted import Answer, completion
from tests.recipes import toys
from tests.text.test_chat import TURNS, with_template
from tests.train.conftest import WORDS, documents
from tests.train.test_chat import SHORT

TEXT = documents(0, 400)
SIZE: dict[str, Any] = {"width": 32, "layers": 2, "heads": 8, "hidden": 64, "init_std": 0.3}
TALK = [{"from": "human", "value": "one two"}, {"from": "gpt", "value": "three"}]
PAIR = ("a man rides a horse .", "ein mann reitet ein pferd .")


def write(path: Path, text: str) -> None:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def json_lines(records: Iterable[Any]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def text(path: Path) -> None:
    """Writes one long document."""
    write(path, "".join(TEXT))


def texts(path: Path) -> None:
    path.mkdir()
    for i in range(2):
        write(path / f"{i}.txt", "".join(TEXT[200 * i :][:200]))


def sentences(path: Path) -> None:
    write(path, f"{PAIR['.de' in path.name]}\n" * 40)


def chats(path: Path) -> None:
    """Writes conversations in ShareGPT's format."""
    records = [{"conversations": TALK * (1 + i % 3)} for i in range(20)]
    write(path, json.dumps(records) if ".json" in path.suffixes else json_lines(records))


def talks(path: Path) -> None:
    """Writes questions in QLoRA's format of OASST1."""
    texts = [f"what is it that you and the {n} have to do with this?" for n in ("cat", "dog", "owl")]
    write(
        path, json_lines([{"input": f"### Human: {t} ### Assistant:", "output": f"It is {t}"} for t in texts])
    )


def instructions(path: Path) -> None:
    """Writes instructions in Alpaca's format."""
    texts = zip(documents(4, 20), documents(5, 20), strict=True)
    records = [
        {"instruction": f"{i}: {first}", "input": "", "output": second}
        for i, (first, second) in enumerate(texts)
    ]
    write(path, json.dumps(records) if ".json" in path.suffixes else json_lines(records))


def questions(path: Path) -> None:
    """Writes questions in MT-bench's format, with reference answers."""
    turns = ["one two?", "three?"]
    write(
        path,
        json_lines([{"question_id": 7, "category": "math", "turns": turns, "choices": [{"turns": turns}]}]),
    )


def titles(path: Path) -> None:
    write(path, "".join(f"{title.strip()}\t{i % 2}\n" for i, title in enumerate(documents(1, 20, most=8))))


def symbols(path: Path) -> None:
    toys.letters(path.parent)


def chapters(path: Path) -> None:
    toys.chinese(path.parent)


def novel(path: Path) -> None:
    body = "话说天下大势，分久必合，合久必分。" * 20
    write(path, "".join(f"第{i}回 {i}\n\n  {body}\n" for i in "一二三"))


def triplets(path: Path) -> None:
    records = [dict(zip("ABC", documents(i, 3, most=9), strict=True), label="BC"[i % 2]) for i in range(12)]
    write(path, json_lines(records))


def reviews(path: Path) -> None:
    records = [{"text": review, "label": str(i % 2)} for i, review in enumerate(documents(2, 24, most=90))]
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, ["text", "label"])
            table.writeheader()
            table.writerows(records)
    else:
        write(path, json_lines(records))


def pairs(path: Path) -> None:
    """Writes preference pairs: two answers to each prompt."""
    write(path, json_lines({"prompt": "one two", "chosen": "three", "rejected": "four"} for _ in range(8)))


def meetings(path: Path) -> None:
    """Writes meetings with questions, each answered by a word of its text."""
    toys.meetings(path.parent)
    path.with_name("q.jsonl").rename(path)


def endings(path: Path) -> None:
    """Writes the task of docs/evaluation.md, and its data."""
    path.mkdir()
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    write(path / "endings.yaml", page.partition("```yaml\n")[2].partition("```")[0])
    story = {"story": "one two", "endings": [" three", " while"], "answer": 0}
    write(path.with_name("endings.jsonl"), json_lines([story] * 8))


def answer(path: str, body: Any) -> Answer:
    """Returns an endpoint's reply: a new instruction if the prompt is a list to be continued, else a judgment."""
    prompt = body["messages"][-1]["content"]
    number = re.search(r"(\d+)\. Instruction:\s*$", prompt)
    if number is None:
        return completion("Rating: [[7]], that is [[A]]")
    task = " ".join(random.Random(prompt + str(body.get("seed"))).choices(WORDS, k=9))
    return completion(f" Say {task}\n{number[1]}. Input:\n<noinput>\n{number[1]}. Output:\n{task}\n")


def letters(template: str = TURNS) -> Tokenizer:
    return with_template(train_bpe(TEXT, 280), template)


def chatter(path: Path) -> None:
    """Writes a decoder with a chat template that marks the tokens of answers."""
    decoder(path, SHORT)


def decoder(path: Path, template: str = TURNS) -> None:
    spec = ModelSpec.of(
        "llama", vocab=280, kv_heads=8, trained_context=2048, tied=True, **{**SIZE, "layers": 4}
    )
    save_folder(path, build(spec, seed=0), tokenizer=letters(template))


def encoder(head: Head, family: str = "bert") -> Callable[[Path], None]:
    def made(path: Path) -> None:
        words = train_words([*TEXT, toys.HAN], 300)
        spec = ModelSpec.of(family, vocab=words.vocab_size, **SIZE).with_head(head)
        save_folder(path, build(spec, seed=0), tokenizer=words)

    return made


def translator(path: Path) -> None:
    words = joint_tokenizer(iter(PAIR), 280)
    size = {"source": "a", "target": "b", "layers": 1, "width": 16, "heads": 2, "hidden": 32, "context": 64}
    model = build(translation_spec(TranslationConfig.of(size), words.vocab_size), seed=2)
    save_folder(
        path, model, tokenizer=words, generation={"decoder_start_token_id": START, "eos_token_id": END}
    )


def languages(path: Path) -> None:
    """Writes a many-language translator, beside its tokenizer."""
    from tests.text.nllb import write_nllb  # transformers takes a second to import

    write_nllb(path.with_name("words"), path)


def config(path: Path, **settings: Any) -> TextConfig:
    """Writes the settings of a run to a file, and its data beside it."""
    texts(path.parent / "text")
    defaults: dict[str, Any] = {
        "data": "text", "vocab": 280, "depth": 2, "width": 16, "heads": 4, "kv_heads": 4, "hidden": 32, "context": 16,
        "batch_tokens": 128, "micro_batch": 2, "steps": 2, "validation_share": 0.1, "out": "runs/run",
    }  # fmt: skip
    settings_made = TextConfig.of({**defaults, **settings})
    write(path, config_yaml(settings_made))
    return settings_made


def run(path: Path) -> None:
    """Trains a run to its end, of which `path` is a part."""
    settings = config(path.parents[2] / "run.yaml", out="runs/mine", checkpoints="shards")
    with chdir(path.parents[2]):
        train(settings, quiet=True)
    if not path.exists():
        path.with_name("checkpoint-2").rename(path)


def adapter(path: Path) -> None:
    """Writes an adapter beside its model `stories`, with the tokenizer."""
    decoder(path.parent / "stories")
    folder = load_folder(path.parent / "stories")
    fresh = Adapter.fresh(build(folder.spec, seed=0), Lora(rank=2))
    base = Base(Path("stories"), fingerprint(folder))
    save_adapter(path, fresh, folder.spec, base=base, tokenizer=letters())


def recipes(path: Path) -> None:
    path.symlink_to(ROOT / "recipes")


def stories(path: Path) -> None:
    shutil.copy(data_path(f"weights/stories260K/{path.name}"), path)


MASKED = Head("masked-lm", dense="gelu")
CLASSES = Head("classify", labels=("0", "1"), dense="tanh")
KINDS: dict[Callable[[Path], Any], str] = {
    text: """my-text.txt text.txt train.txt held-out.txt held.txt austen.txt long.txt other.txt other-text.txt
        wikitext2.txt""",
    texts: "my-text text texts books",
    symbols: "text8.txt",
    chapters: "chapters.jsonl",
    novel: "hongloumeng.txt.gz xiyouji.txt.gz sanguoyanyi.txt.gz shuihuzhuan.txt.gz",
    triplets: "triplets.jsonl triplets-held.jsonl",
    reviews: """reviews.jsonl reviews-train.jsonl reviews-test.jsonl imdb-train.jsonl imdb-test.jsonl
        hyperpartisan.jsonl reviews.csv""",
    pairs: "pairs.jsonl",
    titles: "titles-train.txt titles-test.txt",
    meetings: "qmsum-train.jsonl qmsum-test.jsonl",
    chats: """chats.jsonl sharegpt.json oasst.jsonl dummy_conversation.json glaive_toolcall_en_sharegpt.json
        glaive_toolcall_en_sharegpt.json.gz""",
    talks: "oa_questions.jsonl",
    instructions: "alpaca.json alpaca_5000.json.gz seeds.jsonl seed_tasks.jsonl",
    questions: "questions.jsonl mt_bench_question.jsonl mt_bench_reference_gpt-4.jsonl",
    sentences: """train.en.gz train.de.gz multi30k/train.en.gz multi30k/train.de.gz multi30k/val.en.gz
        multi30k/val.de.gz val.en.gz val.de.gz test.en test.de test_2016_flickr.en.gz test_2016_flickr.de.gz
        multi30k/test_2016_flickr.en.gz multi30k/test_2016_flickr.de.gz""",
    endings: "tasks",
    stories: "stories260K.bin tok512.bin",
    decoder: """MODEL MODEL-A MODEL-B A B stories stories260K runs/demo runs/small runs/mine/final runs/llama/final
        mha-0/final llama2""",
    chatter: "runs/chat/final runs/preference/final",
    adapter: "ADAPTER other run/final",
    run: "runs/mine/config.yaml runs/mine/checkpoint-1000",
    translator: "runs/translation/final",
    languages: "nllb",
    encoder(MASKED): "ENCODER bert-base-uncased bert-base-chinese runs/mlm/final runs/roformer/final",
    encoder(CLASSES): "runs/titles/final runs/classify/final",
    encoder(Head("answer")): "runs/answers/final",
    config: "run.yaml",
    recipes: "recipes",
}
THINGS = {name: make for make, names in KINDS.items() for name in names.split()}


class Store:
    """Makes each thing once, in its own folder; `put` copies what is needed."""

    def __init__(self, root: Path, endpoint: str) -> None:
        self.root, self.endpoint = root, endpoint

    def put(self, names: Iterable[str], folder: Path) -> None:
        """Copies into `folder` those of `names` that are in THINGS and missing there."""
        for name in names:
            if name in THINGS and not (folder / name).exists():
                home = self.root / name.replace("/", "-")
                if not home.exists():
                    (home / name).parent.mkdir(parents=True)
                    THINGS[name](home / name)
                shutil.copytree(home, folder, symlinks=True, dirs_exist_ok=True)
