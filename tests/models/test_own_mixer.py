"""A mixer from outside the package: a value, a layer and a row of the table of mixers, in one file."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from headway.cache import StateSpec, state_dtype
from headway.checkpoints import config_from_spec, spec_from_config
from headway.generate import GenerationConfig, generate
from headway.models import ModelSpec, build, cost
from headway.models.description import ASPECTS
from headway.models.mixers import MIXERS, MixerKind, Softmax
from headway.nn import Linear, StateLayer
from headway.nn.mixing import InOrder
from headway.tokens import Tokens
from tests.models.mixers import SIZE


@dataclass(frozen=True)
class Fading:
    """Mixes each token with the state of those before: s = keep * s + x W."""

    keep: float


class FadingLayer(StateLayer):
    def __init__(self, width: int, mixer: Fading) -> None:
        super().__init__(width, mixer)
        self.keep = mixer.keep
        self.in_proj = Linear(width, width, bias=False)
        self.o_proj = Linear(width, width, bias=False)

    def state(self, dtype: torch.dtype) -> StateSpec:
        return StateSpec(self.of, (((self.width,), state_dtype(dtype)),))

    def inputs(self, x: Tensor) -> list[Tensor]:
        return [self.in_proj(x)]

    def mix(
        self, inputs: Sequence[Tensor], order: InOrder, past: Sequence[Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        (x,) = inputs
        state, out = torch.zeros_like(x[:, 0]) if past is None else past[0].to(x.dtype), []
        valid = order.tokens.valid.expand(x.shape[:2])
        for t in range(x.shape[1]):
            if order.begins is not None:
                state = state.masked_fill(order.begins[:, t, None], 0.0)
            state = torch.where(valid[:, t, None], self.keep * state + x[:, t], state)
            out.append(state)
        return torch.stack(out, 1), [state]


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    kind = MixerKind(
        name="fading means",
        layer=lambda spec, mixer, *args: FadingLayer(spec.width, mixer),
        flops=lambda spec, mixer, pattern, n: 2.0 * n * spec.width,
    )
    monkeypatch.setitem(MIXERS, Fading, kind)
    return ModelSpec.of("llama", **SIZE, mixers=(Fading(0.9), Softmax()))


@torch.no_grad()
def test_a_model_has_it_with_caches_documents_and_engines(spec: ModelSpec) -> None:
    model = build(spec, seed=0, dtype=torch.float64).eval()
    ids = torch.randint(97, (2, 11), generator=torch.Generator().manual_seed(0))
    full, cache = model(ids), model.make_cache(2)
    parts = [model(ids[:, :4], cache=cache), *(model(ids[:, i : i + 1], cache=cache) for i in range(4, 11))]
    assert (torch.cat(parts, 1) - full).abs().max() < 1e-12
    packed = model(ids.view(1, -1), tokens=Tokens.packed([[11, 11]]))
    assert (packed.view(2, 11, -1) - full).abs().max() < 1e-12
    config = GenerationConfig(max_new_tokens=5)
    alone = [generate(model, [row], config)[0].ids for row in ids.tolist()]
    assert [result.ids for result in generate(model, ids.tolist(), config)] == alone


def test_folders_words_and_costs_know_it(spec: ModelSpec) -> None:
    assert spec_from_config(config_from_spec(spec)) == spec
    assert ASPECTS["scores"].words(spec).startswith("layers 0, 2: fading means: Fading(keep=0.9)")
    assert cost.kv_bytes_stored(spec, 640) == 2 * 4 * 48 + cost.kv_bytes_per_token(spec) * 640
    of_attention = 48 * 12 * (2 * 4 + 2 * 2)
    assert cost.matrix_weights(spec) == 2 * (2 * 48 * 48 + of_attention) + 4 * 3 * 48 * 80
