"""The commands of the laboratory, which `headway` finds through entry points."""

from headway.cli import Command

DEMO = Command("Three minutes: patterns drawn, a model trained, the claims verified", "headway_lab.cli.demo")
EXPLAIN = Command(
    "Answer a question about attention by a run",
    "headway_lab.cli.explain",
    offers={"ladder": "headway_lab.explain.ladders", "patterns": "headway_lab.draw"},
)
BENCH = Command("What attention costs on this machine, beside its peers", "headway_lab.cli.bench")
