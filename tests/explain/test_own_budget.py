"""Topics that train, at their own budget and seeds: the claims that docs/positions.md reports as seen."""

import pytest

from headway_lab.explain import explain

SEEN = {
    "positions": ("rotary ends below what is added to embeddings", "and below no positions"),
    "extrapolation": ("and ends lower than by any rescaling",),
    "rotary-layers": ("turning the first layer only ends higher than turning all", "turning none does"),
    "rotary-switches": ("equal frequencies end higher than powers",),
    "rotary-trained": (
        "some frequency moves by more than 0.5 radians over a row",
        "putting them back raises the trained model's loss",
    ),
    "blocks": ("LLaMA's block ends below that of 2017", "rotary ends below sinusoids"),
    "linear-training": (
        "its loss falls below that of guessing without context",
        "rotary lowers it",
        "bytes kept grow linearly",
        "it ends above softmax",
    ),
}
NOT_SEEN = {"extrapolation": ("rotary reads rows of 8 L as well as rows of L, within 0.05",)}


@pytest.mark.slow
@pytest.mark.parametrize("topic", SEEN)
def test_what_the_documents_report_is_seen_again(topic: str) -> None:
    report = explain(topic)
    lost = [claim for claim in SEEN[topic] if not report.claims[claim]]
    wrong = [claim for claim in NOT_SEEN.get(topic, ()) if report.claims[claim]]
    assert not lost + wrong, report.verdict
