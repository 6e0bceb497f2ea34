"""The commands of the laboratory, which `headway` finds through entry points."""

from headway.cli import Command

DEMO = Command(
    "Take a tour in three minutes: draw patterns, train a model, verify the claims", "headway_lab.cli.demo"
)
EXPLAIN = Command(
    "Answer a question about attention by a run",
    "headway_lab.cli.explain",
    offers={"ladder": "headway_lab.explain.ladders", "patterns": "headway_lab.draw"},
)
BENCH = Command("Measure attention and models on this machine, beside their peers", "headway_lab.cli.bench")
