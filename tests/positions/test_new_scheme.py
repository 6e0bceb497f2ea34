"""A position scheme is one class: schemes written here, outside the package, are built, trained, cached, saved and
loaded like its own."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.checkpoints import load_folder, save_folder
from headway.checkpoints.restore import build_model
from headway.errors import ConfigError
from headway.models import Decoder, ModelSpec, build, cost
from headway.nn import RotaryEmbedding
from headway.patterns import Causal, Window
from headway.positions import PerLayer, PositionScheme, Rotation
from headway.scores import ALiBi, Score


class Scale(Rotation):
    """Multiplies queries and keys by a number for each position."""

    def __init__(self, factor: Tensor) -> None:
        self.factor, self.rotates_values = factor, False

    def apply(self, x_BHTD: Tensor) -> Tensor:
        return (x_BHTD * self.factor.unsqueeze(-2).unsqueeze(-1)).to(x_BHTD.dtype)


@dataclass(frozen=True)
class Loudness(PositionScheme):
    """Multiplies queries and keys of position p by 1 + (sin(p / period) + w) / 2, with a trained w."""

    period: float = 3.0
    marks = "queries and keys"

    def check_head_dim(self, head_dim: int) -> None:
        if head_dim < 2:
            raise ConfigError(f"Loudness: heads have 2 dims or more, got {head_dim}")

    def trained_numbers(self, head_dim: int) -> int:
        return 1

    def rotation(
        self,
        position: Tensor,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        length: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> Scale:
        assert offset is not None
        return Scale(1 + (torch.sin(position.double() / self.period) + offset.double()) / 2)


@dataclass(frozen=True)
class Parity(PositionScheme):
    """Adds 1 to every second column at even positions, and subtracts it at odd ones."""

    limit: int = 64
    marks = "embeddings"

    def embedding(self, position: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        sign = 1 - 2 * (position % 2)
        return (sign.unsqueeze(-1) * (torch.arange(width) % 2)).to(dtype)


@dataclass(frozen=True)
class Slope(PositionScheme):
    """ALiBi with one slope for all heads."""

    slope: float = 0.3
    marks = "scores"

    def scores(self, heads: int, head_dim: int, bidirectional: bool) -> tuple[Score, ...]:
        return (ALiBi((self.slope,) * heads),)


SCHEMES = [Loudness(), Parity(), Slope(0.2), PerLayer((Loudness(5.0), Loudness(2.0)))]
BOX = cost.Machine(name="box", memory=1 << 30, bandwidth=1e9, peak=1e9)
IDS = torch.randint(29, (2, 12), generator=torch.Generator().manual_seed(1))


def spec_of(positions: PositionScheme) -> ModelSpec:
    return ModelSpec.of(
        "llama",
        vocab=29,
        width=24,
        layers=2,
        heads=4,
        hidden=40,
        positions=positions,
        patterns=[Window.last(5), Causal()],
        trained_context=64,
        init_std=0.2,
    )


def made(positions: PositionScheme) -> Decoder:
    model = build(spec_of(positions), seed=0)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_new_scheme_marks_and_its_cost_is_known(scheme: PositionScheme) -> None:
    model, unmarked = made(scheme), made(Slope(0.0))
    assert sum(p.numel() for p in model.parameters()) == cost.parameter_count(model.spec)
    trained = scheme.marks == "queries and keys"
    assert cost.parameters(model.spec).get("positions", 0) == 2 * trained
    moved = model(IDS.roll(1, 1))[:, -1]
    assert not torch.allclose(moved, model(IDS)[:, -1], atol=1e-3)
    weights = {n: t for n, t in model.state_dict().items() if "rotary" not in n}
    unmarked.load_state_dict(weights)
    assert not torch.allclose(unmarked(IDS), model(IDS), atol=1e-3)
    assert cost.plan(model.spec, model="m", context=16, machine=BOX).fits


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_new_scheme_is_trained(scheme: PositionScheme) -> None:
    model = made(scheme)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for _ in range(5):
        loss = model(IDS, targets=IDS.roll(-1, 1)).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]


@pytest.mark.parametrize("chunks", [[1] * 12, [7, 1, 4]])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_new_scheme_decodes_from_a_cache_as_in_full(scheme: PositionScheme, chunks: list[int]) -> None:
    model = made(scheme).double().eval()
    cache, begin, logits = model.make_cache(2), 0, []
    with torch.no_grad():
        for count in chunks:
            logits.append(model(IDS[:, begin : begin + count], cache=cache))
            begin += count
        torch.testing.assert_close(torch.cat(logits, 1), model(IDS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_new_scheme_is_saved_and_loaded(scheme: PositionScheme, tmp_path: Path) -> None:
    model = made(scheme).eval()
    save_folder(tmp_path / "m", model)
    folder = load_folder(tmp_path / "m")
    assert folder.spec == model.spec
    assert torch.equal(build_model(folder)(IDS), model(IDS))


def test_what_a_new_scheme_refuses_is_refused() -> None:
    with pytest.raises(ConfigError, match="Loudness: heads have 2 dims or more, got 1"):
        ModelSpec.of("llama", vocab=9, width=4, layers=1, heads=4, hidden=8, positions=Loudness())
    with pytest.raises(ConfigError, match="trained_context=2048 is longer than the table of 64 positions"):
        ModelSpec.of("llama", vocab=9, width=4, layers=1, heads=4, hidden=8, positions=Parity())
    with pytest.raises(ConfigError, match="has no one set of frequencies"):
        _ = RotaryEmbedding(Loudness(), 4).frequencies
