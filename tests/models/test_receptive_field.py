"""Patterns change which tokens are seen, and never which parameters are trained (rows 103, 104, 105, 14)."""

import pytest
import torch

from headway.models import Decoder, ModelSpec, build, cost
from headway.patterns import Causal, Pattern, Sink, Window, visible
from headway.tokens import Tokens

VOCAB, LENGTH = 29, 40

LISTS: list[tuple[Pattern, ...]] = [
    (Window.last(7), Window.last(5), Window.last(3)),
    (Window.last(3), Window.last(3), Window.last(3)),
    (Window.last(4, step=2), Window.last(3), Window.last(2, step=5)),
    (Window.last(1), Window.last(1), Window.last(6)),
    (Window.last(9) & Causal(), Window.last(4) | Window.last(2), Window.last(2)),
    (Window.last(3), Causal(), Window.last(3)),
]


def model_of(patterns: tuple[Pattern, ...]) -> Decoder:
    spec = ModelSpec.of_depth(3, VOCAB, context=LENGTH, patterns=patterns, group=3, init_std=0.3)
    return build(spec, seed=0).double()


def influence(model: Decoder) -> torch.Tensor:
    """Returns bool [LENGTH]: the input embeddings that the last token's state depends on, by gradient."""
    ids = torch.randint(VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    embedded: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    handle = model.model.embed_tokens.register_forward_hook(keep)
    model.hidden(ids)[0, -1].pow(2).sum().backward()
    handle.remove()
    assert embedded[0].grad is not None
    return embedded[0].grad[0].abs().amax(-1) > 0


def predicted(patterns: tuple[Pattern, ...]) -> set[int]:
    """Returns the tokens that are reachable from the last one along allowed pairs, layer by layer."""
    tokens = Tokens.range(LENGTH)
    reached = {LENGTH - 1}
    for pattern in reversed(patterns):
        allowed = visible(pattern, tokens, tokens)[0, 0]
        reached |= {k for q in reached for k in range(LENGTH) if allowed[q, k]}
    return reached


@pytest.mark.parametrize("patterns", LISTS, ids=str)
def test_the_field_is_what_the_patterns_say(patterns: tuple[Pattern, ...]) -> None:
    model = model_of(patterns)
    seen = influence(model).nonzero().flatten().tolist()
    assert set(seen) == predicted(patterns)
    field = cost.receptive_field(model.spec)
    if field is None:
        assert Causal() in patterns
        assert seen[0] == 0
    else:
        assert LENGTH - seen[0] == field


def test_sinks_have_no_bound() -> None:
    assert cost.receptive_field(ModelSpec.of_depth(3, VOCAB, patterns=Causal() & Sink(2))) is None


def test_no_output_depends_on_a_later_token() -> None:
    for patterns in (LISTS[0], (Causal(),)):
        model = model_of(patterns).float().eval()
        ids = torch.randint(VOCAB, (1, LENGTH))
        changed = ids.clone()
        changed[0, 20] = (ids[0, 20] + 1) % VOCAB
        with torch.no_grad():
            before, after = model(ids), model(changed)
        assert torch.equal(before[:, :20], after[:, :20])
        assert not torch.equal(before[:, 20:], after[:, 20:])
