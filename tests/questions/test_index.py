"""Questions in words: those of the documents find their topic first, paraphrases among three, others find nothing."""

import json
import math
import tomllib
from pathlib import Path

import pytest

from headway.cli import run
from headway.errors import ConfigError
from headway.language import LANGUAGES
from headway_lab.explain import TOPICS
from headway_lab.questions import Entry, Index, entries, language_of
from headway_lab.questions.text import least, stem, terms
from tests.command_lines import read_command

PARAPHRASES, DECLINED, BLIND = (
    tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))
    for name in ("paraphrases", "declined", "blind")
)
CAPTIONS = {
    "BN 与 LN 的区别": "norms",
    "BatchNorm against LayerNorm": "norms",
    "用 Abel 变换证明 RoPE 的远程衰减": "rotary-decay",
    "What is the Abel summation argument of rotary decay?": "rotary-decay",
    "FSDP 是什么": "training-time",
    "What is FSDP?": "training-time",
    "CAIL2019-SCM 上的长文本评测": "roformer",
    "RoFormer's results on CAIL": "roformer",
    "线性场景": "rotary-linear",
    "RoPE in the linear scenario": "rotary-linear",
    "teacher forcing 是什么": "translation",
    "What is teacher forcing?": "translation",
    "RoPE-2D 是什么": "positions",
    "Rotary positions in two dimensions (RoPE-2D)": "positions",
    "WoBERT 以词为单位还是以字为单位": "roformer",
    "Has WoBERT words or characters as units?": "roformer",
}
DOCUMENTS = {
    "自注意力机制消耗显存的原因是什么?": "memory",
    "使用滑窗注意力参数量会降低吗?": "memory",
    "为什么RoPE融入了绝对位置信息和相对位置信息?": "rotary-identity",
    "为什么不直接对Q向量或K向量进行旋转矩阵操作,而是要分成d/2份?": "rotary-frequencies",
    "为什么 v 不需要引入位置信息?": "rotary-values",
    "为什么只给q和k引入位置信息?": "rotary-values",
    "如果给v向量加入位置信息会怎样?": "rotary-values",
    "为什么使用RMS Norm?": "norms",
    "为什么叫旋转位置编码?": "rotary-identity",
    "rope的外推能力优于Sinusoidal吗?": "extrapolation",
    "其实我们不需要无限长度的外推性质?一个足够大的窗口已经可以满足需求": "extrapolation",
    "这种震荡会影响长序列位置建模的效果吗?": "rotary-decay",
    "这个曲线更加接近线性对长序列会更好吗": "extrapolation",
    "RoPE作为相对位置编码是否应该具有平移不变性": "rotary-shift",
    "这里的旋转矩阵Rm=R1^m,这样是不是可以直接用模型去训练R1": "rotary-trained",
    "选择的构成相对关系的组合维度是可以任意两两组合的吧?": "rotary-forms",
    "消融过 RoPE 在不同层插入的效果吗?比如只在第一层插入": "rotary-layers",
    "Q1*K2-Q2*K1的意义是什么呢": "rotary-expansion",
    "所有维度的角度freq都取1.0/base?": "rotary-frequencies",
    "对应的让Q=[Q*0.5, Q*0.5], K=[K,K]即可, 请问这种方式你觉得可行嘛?": "rotary-expansion",
    "为什么使用 self-attention!": "complexity",
    "如何理解 Layer Norm": "norms",
    "Transformer 的三个 multi-head attention 的原理和作用": "attention-uses",
    "Vanilla Transformer 与 LLaMa 的区别": "blocks",
    "为什么要除以根号d": "scale",
    "掩码矩阵和多头自注意力相加时的维度问题": "masks",
    "从公式和参数角度解释GQA工作原理": "heads",
    "RoPE attention相对标准attention的计算过程对比": "rotary-identity",
    "自注意力机制的工作原理为": "self-attention",
    "多头自注意力的优点有": "multi-head",
    "Attention + MLP": "feed-forward",
    "L2 归一化": "similarity",
    "下词预测任务": "next-token",
    "CoCA这个想法怎么看": "extrapolation",
    "在8张80G的A100上训练了3小时": "training-time",
    "使用Pytorch FSDP在8张A100上训练了一天": "training-time",
}


@pytest.mark.parametrize(("question", "topic"), [*DOCUMENTS.items(), *CAPTIONS.items()])
def test_rows_112_113_114_115_a_question_of_the_documents_finds_its_topic_first(
    question: str, topic: str
) -> None:
    assert Index(entries(language_of(question))).find(question)[0].entry.topic == topic


def test_paraphrases_are_apart_from_the_index_and_nine_of_ten_find_their_topic_among_three() -> None:
    index = {language: Index(entries(language)) for language in LANGUAGES}
    questions = [
        (q, topic)
        for language in LANGUAGES
        for topic, phrasings in PARAPHRASES[language].items()
        for q in phrasings
    ]
    known = {q for language in LANGUAGES for entry in entries(language) for q in entry.ask}
    assert len(questions) == 60
    assert known.isdisjoint(q for q, _ in questions)
    hits = [topic in {m.entry.topic for m in index[language_of(q)].find(q)} for q, topic in questions]
    assert sum(hits) >= 0.9 * len(questions)


def test_a_set_by_someone_who_had_not_seen_the_index() -> None:
    """91.7 % first, 96.7 % among three, all declined; it was run once, and the index has not been changed since."""
    index = {language: Index(entries(language)) for language in LANGUAGES}
    known = {
        question
        for language_index in index.values()
        for entry in language_index.entries
        for question in entry.ask
    }
    questions = [(q, [topic]) for language in LANGUAGES for topic, qs in BLIND[language].items() for q in qs]
    questions += [(either["question"], either["topics"]) for either in BLIND["either"]]
    answers = [
        ([match.entry.topic for match in index[language_of(q)].find(q)], topics) for q, topics in questions
    ]
    unrelated = [q for kind in ("unrelated", "near") for language in LANGUAGES for q in BLIND[kind][language]]
    assert (len(questions), len(unrelated)) == (120, 50)
    assert known.isdisjoint(question for question, _ in questions)
    assert sum(bool(best) and best[0] in topics for best, topics in answers) == 110
    assert sum(not {*best}.isdisjoint(topics) for best, topics in answers) == 116
    assert [q for q in unrelated if index[language_of(q)].find(q)] == []


def test_what_no_entry_answers_is_declined() -> None:
    index = {language: Index(entries(language)) for language in LANGUAGES}
    tables = (DECLINED, PARAPHRASES["unrelated"])
    questions = [question for table in tables for language in LANGUAGES for question in table[language]]
    assert len(questions) >= 900
    answered = [question for question in questions if index[language_of(question)].find(question)]
    assert answered == ["GPT-4 到底有多少参数?"]  # answered by the sizes of LLaMA


def test_no_sentence_of_the_index_names_what_lies_beside_its_subject() -> None:
    sentences = [
        text for language in LANGUAGES for entry in entries(language) for text in (*entry.ask, *entry.says)
    ]
    assert [text for text in sentences if least(text) == math.inf] == []


def test_a_question_needs_less_the_more_it_has_of_the_subject() -> None:
    needed = {
        "softmax": 0.3,
        "a head": 0.42,
        "a head and a key": 0.36,
        "the softmax of a head": 0.24,
        "a single owl": 0.42,
    }
    needed |= {
        "窗口": 0.42,
        "窗口和位置": 0.36,
        "残差": 0.3,
        "残差的归一化": 0.2,
        "软件": math.inf,
        "price of a head": math.inf,
    }
    assert {question: least(question) for question in needed} == pytest.approx(needed)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_question_of_the_index_finds_its_own_topic_first(language: str) -> None:
    index = Index(entries(language))
    wrong = [q for entry in index.entries for q in entry.ask if index.find(q)[0].entry is not entry]
    assert wrong == []
    assert all(language_of(q) == language for entry in index.entries for q in entry.ask)


def test_both_languages_have_the_same_entries_and_every_topic_is_one() -> None:
    english, chinese = ({entry.topic: entry.command for entry in entries(language)} for language in LANGUAGES)
    assert english == chinese
    assert set(TOPICS) <= set(english)
    for topic, command in english.items():
        read_command(command)
        assert (command == f"headway explain {topic}") == (topic in TOPICS)


def test_scores_are_those_of_the_formula() -> None:
    index = Index(
        [
            Entry("a", "", "", ("red ink",), ""),
            Entry("b", "", "", ("red pen",), ""),
            Entry("c", "", "", ("owl",), ""),
        ]
    )
    first = index.find("red ink softmax")[0]
    weight = {term: index.idf(term) for term in ("red", "ink", stem("softmax"))}
    assert index.idf("red") == pytest.approx(0.7 * math.log(4 / 2.5))
    assert index.idf("softmax") == pytest.approx(math.log(4 / 0.5))
    whole, matched = sum(weight.values()), weight["red"] + weight["ink"]
    assert first.entry.topic == "a"
    assert first.score == pytest.approx((matched / (whole * matched) ** 0.5 + matched / whole / 1.5) / 2)
    assert first.terms == ("ink", "red")


def test_numbers_and_single_characters_are_no_reason_to_answer() -> None:
    """Unknown subjects are declined, whatever small words they share with entries."""
    index = Index([Entry("a", "", "", ("8 heads of q", "多"), ""), Entry("b", "", "", ("owl",), "")])
    assert index.find("8 attention") == ()
    assert index.find("注意力多") == ()
    assert [match.entry.topic for match in index.find("8 heads")] == ["a"]
    assert [match.entry.topic for match in index.find("q of attention")] == ["a"]
    assert Index(entries("en")).find("How much does an A100 cost?") == ()


def test_one_term_among_strange_ones_and_unknown_names_are_no_reason_to_answer() -> None:
    index = Index([Entry("a", "", "", ("the softmax of a head",), ""), Entry("b", "", "", ("owl",), "")])
    assert [match.entry.topic for match in index.find("softmax")] == ["a"]
    assert index.find("softmax zebra") == ()
    assert [match.entry.topic for match in index.find("the softmax of a head zebra")] == ["a"]
    assert index.find("the softmax, head of Zebra") == ()


@pytest.mark.parametrize(
    "question", ["8 x A100", "在8张80G的A100上训练了多久", "Was Alpaca trained on 8 x A100 in 3 hours?"]
)
def test_what_the_documents_trained_on_is_answered_by_the_plan_of_devices(question: str) -> None:
    best = Index(entries(language_of(question))).find(question)[0]
    assert best.entry.topic == "training-time"
    assert "--device A100-80G" in best.entry.command


def test_terms_have_no_endings_and_chinese_has_neighbours() -> None:
    assert terms("Padded, padding!") == terms("pad") == {"pad"}
    assert terms("为什么要旋转") == {"旋转", "旋", "转"}
    assert terms("BN") == terms("batch normalization") == {"bnorm"}
    assert terms("批归一化和 BN") == {"bnorm"}
    assert terms("???") == frozenset()
    assert Index(entries("en")).find("???") == ()


def test_another_language_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be one of en, zh, got 'fr'"):
        entries("fr")


def test_the_command_answers_in_the_language_of_the_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "--question", "为什么要除以根号d"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("scale: q 与 k")
    assert "运行: headway explain scale" in text
    assert run(["explain", "--question", "Why divide by the square root of d?", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["found"][0]["entry"]["topic"] == "scale"
    assert run(["explain", "--question", "how is coffee brewed"]) == 1
    assert "no topic answers 'how is coffee brewed'" in capsys.readouterr().err


@pytest.mark.parametrize("others", [["scale"], ["--quick"], ["--heads", "4"], ["--seeds", "0,1"]])
def test_what_a_question_would_ignore_is_refused(
    others: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", *others, "--question", "why divide by the square root of d"]) == 1
    assert "--question takes no topic and no setting; give it alone" in capsys.readouterr().err
