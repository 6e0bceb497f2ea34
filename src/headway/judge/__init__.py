"""LLM as a judge: a model that compares and rates answers (Zheng et al. 2023), with measures of its biases."""

from headway.judge.judgments import Answers, Judgment, Question, ask, judgments, read_answers, read_questions
from headway.judge.report import Interval, Pairs, Ratings, pairs_of, ratings_of

__all__ = [
    "Answers",
    "Interval",
    "Judgment",
    "Pairs",
    "Question",
    "Ratings",
    "ask",
    "judgments",
    "pairs_of",
    "ratings_of",
    "read_answers",
    "read_questions",
]
