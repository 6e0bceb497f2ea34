"""A model that compares and rates answers (Zheng et al. 2023), with its biases measured beside its verdicts."""

from headway.judge.match import Match, Rating, Verdict, compare, rate
from headway.judge.questions import Answers, Question, ask, read_answers, read_questions
from headway.judge.report import Interval, Pairs, Ratings, pairs_of, ratings_of

__all__ = [
    "Answers",
    "Interval",
    "Match",
    "Pairs",
    "Question",
    "Rating",
    "Ratings",
    "Verdict",
    "ask",
    "compare",
    "pairs_of",
    "rate",
    "ratings_of",
    "read_answers",
    "read_questions",
]
