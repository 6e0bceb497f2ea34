"""Windows and sinks put on trained layers."""

import pytest
import torch

from headway.checkpoints.restore import fill
from headway.errors import ConfigError, PatternError
from headway.models import ModelSpec, build, cost
from headway.patterns import Causal, Sink, Window
from headway.surgery import open_layers, parse_layers, put_window
from headway.tokens import Tokens

EVERYTHING = Causal()


def make(patterns=EVERYTHING, layers=4):
    spec = ModelSpec.of("llama", vocab=37, width=24, layers=layers, heads=4, kv_heads=2, head_dim=6, hidden=32,
                        trained_context=64, init_std=0.3, patterns=patterns)  # fmt: skip
    return spec, build(spec, seed=1, dtype=torch.float64).state_dict()


def run(model, ids, tokens=None):
    with torch.no_grad():
        return fill(*model, dtype=torch.float64)(ids, tokens=tokens)


def ids(count):
    return torch.randint(37, (2, count), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("sinks", [0, 3])
def test_rows_within_window_and_sinks_are_as_they_were(sinks):
    model = make()
    cut = put_window(*model, 5, sinks=sinks)
    row = ids(20)
    before, after = run(model, row), run(cut, row)
    visible = 5 + sinks
    assert torch.allclose(after[:, :visible], before[:, :visible], rtol=1e-12, atol=1e-12)
    assert ((after - before)[:, visible:].abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("sinks", [0, 3])
def test_one_layer_answers_as_if_the_row_were_sinks_and_window_alone(sinks):
    """The remaining tokens keep their positions."""
    model = make(layers=1)
    row, window = ids(20), 6
    visible = [*range(sinks), *range(20 - window, 20)]
    tokens = Tokens(index=torch.arange(len(visible))[None], position=torch.tensor(visible)[None])
    actual = run(put_window(*model, window, sinks=sinks), row)[:, -1]
    assert torch.allclose(actual, run(model, row[:, visible], tokens)[:, -1], rtol=1e-12, atol=1e-12)


def test_row_111_decoding_with_the_bounded_cache_is_the_full_forward():
    spec, state = put_window(*make(), 6, sinks=2)
    assert cost.cache_slots(spec, 10_000) == (2 * 64,) * 4
    model, row = fill(spec, state, dtype=torch.float64), ids(40)
    cache = model.make_cache(2)
    with torch.no_grad():
        steps = torch.cat([model(row[:, i : i + 1], cache=cache) for i in range(40)], 1)
        assert torch.allclose(steps, model(row), rtol=1e-12, atol=1e-12)


def test_layers_that_see_everything_are_taken_unless_layers_are_named():
    mixed = (Window.last(9), Causal(), Window.last(9) | (Causal() & Sink(1)), Causal())
    model = make(mixed)
    assert open_layers(model[0]) == (1, 3)
    new = Window.last(5) | (Causal() & Sink(2))
    assert put_window(*model, 5, sinks=2)[0].patterns == (mixed[0], new, mixed[2], new)
    assert put_window(*model, 5, layers=(0, 1))[0].patterns == (Window.last(5), Window.last(5), *mixed[2:])


def test_weights_are_not_touched():
    model = make()
    state = put_window(*model, 5)[1]
    assert state.keys() == model[1].keys()
    assert all(torch.equal(state[name], model[1][name]) for name in state)


def test_what_cannot_be_put():
    model = make()
    with pytest.raises(PatternError, match="must be an integer of at least 1, got 0"):
        put_window(*model, 0)
    with pytest.raises(PatternError, match=r"count must be a whole number in 0..2\*\*62, got -1"):
        put_window(*model, 5, sinks=-1)
    with pytest.raises(ConfigError, match="layers are 0 to 3, got 4, -1"):
        put_window(*model, 5, layers=(0, 4, -1))
    with pytest.raises(ConfigError, match="layers is empty"):
        put_window(*model, 5, layers=())
    with pytest.raises(
        ConfigError, match=r"every layer has a bounded cache already: Window.last\(9\); give the layers"
    ):
        put_window(*make(Window.last(9)), 5)


@pytest.mark.parametrize(
    ("text", "layers"),
    [("all", (0, 1, 2, 3)), ("0", (0,)), ("0-2", (0, 1, 2)), ("3, 0-1,1", (3, 0, 1)), ("0-3", (0, 1, 2, 3))],
)
def test_layers_as_text(text, layers):
    assert parse_layers(text, 4) == layers


@pytest.mark.parametrize("text", ["", "4", "0-4", "2-1", "-1", "a", "0,,1", "1-", "0 1"])
def test_layers_that_are_none(text):
    with pytest.raises(ConfigError, match="numbered 0 to 3: '0-3', '0,3' or 'all'"):
        parse_layers(text, 4)
