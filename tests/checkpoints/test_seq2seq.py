"""Encoder-decoders equal transformers with the same weights: logits, gradients, padding, caches, and dropout.

Everything is compared in float64. In float32, with the plain formulas of norms and gates, logits must be within 1e-5
and gradients within 1e-4; if a softmax is so sharp that transformers' own float32 is further from its float64 than
that, they may be twice as far.
"""

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from headway.checkpoints.folder import load_folder
from headway.checkpoints.hf.config import spec_from_config
from headway.checkpoints.hf.layouts import LAYOUTS
from headway.checkpoints.hf.layouts.tensors import exported
from headway.checkpoints.restore import build_model
from headway.models import FAMILIES, EncoderDecoder, build
from headway.tokens import Tokens
from tests.checkpoints.hf import off
from tests.checkpoints.seq2seq import CASES, SOURCE, TARGET, exact, logits, on_sdpa, theirs
from tests.checkpoints.shares import share
from tests.tolerance import assert_within_reference

pytestmark = pytest.mark.usefixtures("plain_operators")

DRAW = torch.Generator().manual_seed(3)
BATCHES = [
    (torch.randint(52, (2, 13), generator=DRAW), torch.randint(52, (2, 11), generator=DRAW)) for _ in range(4)
]  # without id 52, the padding of some cases, whose row has no gradient in transformers
WEIGHT = torch.randn(2, 11, 61, dtype=torch.float64, generator=DRAW)


@dataclass(frozen=True)
class Pair:
    """A transformers model, and ours as loaded from the folder that it was saved to."""

    theirs: Any
    ours: EncoderDecoder
    sharp: bool

    @cached_property
    def exact(self) -> Any:
        """The transformers model in float64."""
        return exact(self.theirs)

    @cached_property
    def ours_exact(self) -> EncoderDecoder:
        return copy.deepcopy(self.ours).double()

    @cached_property
    def kernels(self) -> tuple[Any, Any]:
        """The transformers model in float32 on either attention kernel: what float32 can do."""
        return self.theirs, on_sdpa(self.theirs)

    @torch.no_grad()
    def nudged(self, seed: int) -> Any:
        """Returns the transformers model with weights an ulp larger or smaller: how far rounding can move a result."""
        model, generator = copy.deepcopy(self.theirs), torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.mul_(1 + torch.finfo(p.dtype).eps * (2 * torch.randint(2, p.shape, generator=generator) - 1))
        return model


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    model = theirs(request.param)
    path = tmp_path_factory.mktemp("theirs")
    model.save_pretrained(path)
    ours = build_model(load_folder(path))
    assert isinstance(ours, EncoderDecoder)
    return Pair(model, ours, CASES[request.param].sharp)


@share("pair", CASES, 0, 3)
@torch.no_grad()
def test_logits_are_theirs(pair: Pair) -> None:
    """Within 1e-12 in float64 (seen: 2e-14). Within 1e-5 in float32 (seen: 7e-6), except in sharp T5s (seen: 3e-5),
    where transformers' float32 is as far from its float64."""
    expected = logits(pair.exact)
    assert off(pair.ours_exact(SOURCE, TARGET), expected) < 1e-12
    actual, references = pair.ours(SOURCE, TARGET), [logits(model) for model in pair.kernels]
    assert_within_reference(
        actual, expected, max(references, key=lambda reference: off(reference.double(), expected))
    )
    if not pair.sharp:
        assert off(actual, references[0]) < 1e-5


def gradients(model: Any) -> dict[str, Tensor]:
    """Returns the gradients under transformers' names for all batches: [4, ...] in float64."""
    ours = isinstance(model, EncoderDecoder)
    by_batch: list[dict[str, Tensor]] = []
    for source, target in BATCHES:
        output = model(source, target) if ours else logits(model, source, target)
        model.zero_grad()
        (output * WEIGHT[..., : output.shape[-1]].to(output.dtype)).sum().backward()
        grads = {key: p.grad for key, p in model.named_parameters() if ours or p.grad is not None}
        by_batch.append(exported(LAYOUTS[model.spec.family].tensors, grads, model.spec) if ours else grads)
    return {key: torch.stack([batch[key] for batch in by_batch]).double() for key in by_batch[0]}


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Returns each tensor's largest error in any batch, relative to its largest gradient there. The bias of keys
    shifts all scores of a query alike, so its gradient is rounding around 0 on both sides, and taken relative to the
    gradient of the values' bias."""
    largest = {key: expected[key.replace("k_proj.bias", "v_proj.bias")] for key in expected}
    return {
        key: float(
            ((actual[key] - grad).abs().flatten(1).amax(1) / largest[key].abs().flatten(1).amax(1)).max()
        )
        for key, grad in expected.items()
    }


@share("pair", CASES, 1, 3)
def test_gradients_are_theirs(pair: Pair) -> None:
    """Within 1e-10 in float64 (seen: 7e-12). In float32 the whole gradient is within 1e-4 (seen: 2e-5), except in sharp
    T5s; each tensor is within 1e-4, or twice as far from float64 as transformers is with either kernel or with weights
    an ulp off.

    Seen: 20 of 1266 tensors are further off than 1e-4, queries and keys of a sharp softmax, by up to 5e-3 with either
    kernel of transformers. The effect of rounding on one gradient is luck, so the worst of four batches is compared; in
    sharp T5s, where two of three tensors are affected, the quadratic mean over all.
    """
    expected, ours = gradients(pair.exact), gradients(pair.ours_exact)
    extra = ours.keys() - expected.keys()
    assert all(
        key.endswith(("embed_positions.weight", "final_logits_bias", "shared.weight")) for key in extra
    )
    assert all(error < 1e-10 for error in errors(ours, expected).values())
    roundings = (*pair.kernels, pair.nudged(4), pair.nudged(5))
    actual, references = gradients(pair.ours), [gradients(model) for model in roundings]
    distances, off_by = errors(actual, references[0]), errors(actual, expected)
    errors_by_reference = [errors(grads, expected) for grads in references]
    reference_errors = {
        key: max(tensor_errors[key] for tensor_errors in errors_by_reference) for key in expected
    }
    if pair.sharp:
        assert mean_square(off_by) <= 4 * mean_square(reference_errors)
        return
    assert distance(actual, references[0]) < 1e-4
    for key, error in reference_errors.items():
        assert off_by[key] <= max(1e-4, 2 * error), key
        assert distances[key] <= 1e-4 or error > 5e-5, key


def distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the distance of the gradients as one vector, relative to its length, in the worst batch."""
    squares = torch.stack(
        [(actual[key] - grad).square().flatten(1).sum(1) for key, grad in expected.items()]
    ).sum(0)
    length = torch.stack([grad.square().flatten(1).sum(1) for grad in expected.values()]).sum(0)
    return float((squares / length).sqrt().max())


def mean_square(errors: dict[str, float]) -> float:
    return sum(error**2 for error in errors.values()) / len(errors)


@share("pair", CASES, 2, 3)
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_padded_is_unpadded_and_cached_is_uncached(pair: Pair, dtype: torch.dtype) -> None:
    """Within 1e-12 in float64 and 1e-5 in float32; for sharp T5s in float32, as close as two results can be that are
    each twice as far off as transformers'."""
    double = dtype == torch.float64
    ours, model = (pair.ours_exact, pair.exact) if double else (pair.ours, pair.theirs)
    bound = 1e-12 if double else 1e-5
    if pair.sharp and not double:
        bound = 4 * off(logits(pair.theirs).double(), logits(pair.exact))
    full = ours(SOURCE, TARGET)
    for side in ("left", "right"):
        at_source, at_target = (
            Tokens.from_lengths([13, 9], side=side),
            Tokens.from_lengths([11, 5], side=side),
        )
        source, target = SOURCE.clone(), TARGET.clone()
        source[1], target[1] = 60, 60
        source[1, at_source.valid[1]], target[1, at_target.valid[1]] = SOURCE[1, :9], TARGET[1, :5]
        padded = ours(source, target, source_tokens=at_source, tokens=at_target)
        assert off(padded[1, at_target.valid[1]], ours(SOURCE[1:, :9], TARGET[1:, :5])[0]) < bound
    mask = Tokens.from_lengths([13, 9]).valid.long()
    masked = ours(SOURCE, TARGET, source_tokens=Tokens.from_attention_mask(mask))
    assert off(masked, logits(model, mask=mask)) < bound
    memory, cache = ours.memory_keys(ours.encode(SOURCE)), ours.make_cache(2)
    pieces = TARGET.split([4, *[1] * 7], 1)
    steps = [ours.logits(ours.hidden(ids, memory=memory, cache=cache)) for ids in pieces]
    assert off(torch.cat(steps, 1), full) < bound


@torch.no_grad()
@pytest.mark.parametrize("name", ["marian", "bart", "mbart", "t5 1.0"])
def test_dropout_falls_on_the_last_states_where_theirs_does(name: str) -> None:
    """T5 drops the last states of both stacks; no other family does."""
    family = CASES[name].family
    settings = CASES[name].settings | {"dropout_rate" if family == "t5" else "dropout": 0.5}
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **settings))
    ours = build(spec_from_config({"model_type": family, **settings}), seed=0)
    assert isinstance(ours, EncoderDecoder)
    torch.manual_seed(0)
    for training in (True, False):
        model.train(training)
        ours.train(training)
        memory = ours.encode(SOURCE)
        states = ours.decoder(TARGET, Tokens.range(11), memory=ours.memory_keys(memory))
        source = model.get_encoder()(SOURCE).last_hidden_state
        target = model.get_decoder()(TARGET, encoder_hidden_states=source).last_hidden_state
        for output in (memory.states, states, source, target):
            share = float((output == 0).double().mean())
            if training and family == "t5":
                assert 0.42 < share < 0.58  # five standard deviations of 1056 draws
            else:
                assert share == 0


def test_only_t5_drops_the_last_states() -> None:
    assert [name for name, row in FAMILIES.items() if row.defaults.get("final_dropout")] == ["t5", "mt5"]
