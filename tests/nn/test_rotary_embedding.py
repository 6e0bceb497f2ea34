"""The module that embeds queries and keys: it holds nothing, trained frequencies, or a trained rotation."""

import copy

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from headway.errors import ConfigError
from headway.nn import RotaryEmbedding
from headway.nn.positions import token_lengths
from headway.positions import (
    DynamicNTK,
    Learned,
    LinearBias,
    MatrixTable,
    NoPositions,
    Rotary,
    RotaryTable,
    SpecialOrthogonal,
    YaRN,
)
from headway.tokens import Tokens

DOUBLE = torch.float64
TRAINED = Rotary(pairing="halves", trainable=True)
FREE = SpecialOrthogonal(Rotary(pairing="adjacent"))
TOKENS = Tokens.range(9, start=3)


def moved(
    scheme: Rotary | SpecialOrthogonal, head_dim: int = 6, seed: int = 0, size: float = 0.1
) -> RotaryEmbedding:
    """Returns a module as it is after some training: every trained number has changed."""
    embedding = RotaryEmbedding(scheme, head_dim).double()
    assert embedding.frequency_offset is not None
    with torch.no_grad():
        embedding.frequency_offset.normal_(0, size, generator=torch.Generator().manual_seed(seed))
    return embedding


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scheme", [NoPositions(), Learned(8), LinearBias()])
def test_schemes_that_do_not_rotate_give_no_table(scheme):
    embedding = RotaryEmbedding(scheme, 7)
    assert embedding(TOKENS, torch.float32) is None
    assert not embedding.state_dict()


@pytest.mark.parametrize("values", [False, True])
def test_plain_rotary_is_its_own_table_and_enters_no_checkpoint(values):
    rotary = Rotary(pairing="halves", scaling=None if values else YaRN(4.0, 32), values=values)
    embedding, x = RotaryEmbedding(rotary, 8), random(0, 2, 3, 9, 8)
    for tokens in (TOKENS, Tokens(TOKENS.index, position=TOKENS.index * 5 % 7)):
        table = embedding(tokens, x.dtype)
        assert isinstance(table, RotaryTable)
        assert table.rotates_values == values
        assert torch.equal(table.apply(x), rotary.rotate(x, tokens.positions))
    assert not embedding.state_dict()
    assert not list(embedding.parameters())


@pytest.mark.parametrize(("scheme", "count"), [(TRAINED, 4), (FREE, 28)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, DOUBLE])
def test_a_fresh_module_turns_as_the_standard_does_in_every_dtype(scheme, count, dtype):
    """Offsets from the standard frequencies are trained, so that weights in bfloat16 do not round the frequencies."""
    embedding, x = RotaryEmbedding(scheme, 8).to(dtype), random(1, 1, 2, 9, 8)
    assert {k: tuple(v.shape) for k, v in embedding.state_dict().items()} == {"frequency_offset": (count,)}
    pairing = "halves" if scheme is TRAINED else "adjacent"
    expected = Rotary(pairing=pairing).rotate(x, TOKENS.positions)
    torch.testing.assert_close(embedding(TOKENS, DOUBLE).apply(x), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(
        embedding.frequencies, Rotary(pairing=pairing).frequencies(8), rtol=1e-11, atol=0
    )


@pytest.mark.parametrize("scheme", [TRAINED, Rotary(pairing="adjacent", trainable=True, dims=4), FREE])
@pytest.mark.parametrize("shift", [1, 1000, -77, 10**6])
def test_trained_turns_keep_norms_and_know_the_difference_alone(scheme, shift):
    """Rows 62 and 63, after training: float64 scores of shifted rows agree to some tens of shift * 2^-52."""
    embedding = moved(scheme)
    q, k = random(3, 2, 1, 2, 9, 6)
    index = torch.arange(9)[None]
    unshifted, shifted = (embedding(Tokens(index, position=index + p), DOUBLE) for p in (0, shift))
    scores = unshifted.apply(q) @ unshifted.apply(k).mT
    torch.testing.assert_close(
        shifted.apply(q) @ shifted.apply(k).mT, scores, rtol=0, atol=1e-12 + 1e-14 * abs(shift)
    )
    torch.testing.assert_close(shifted.apply(q).norm(dim=-1), q.norm(dim=-1), rtol=1e-14, atol=0)
    assert torch.equal(embedding(Tokens.range(1), DOUBLE).apply(q[:, :, :1]), q[:, :, :1])


def test_trained_rotation_is_the_exponential_of_its_generator():
    embedding = moved(FREE, size=0.3)
    generator = FREE.generator(6, embedding.frequency_offset)
    assert torch.equal(generator, -generator.mT)
    assert torch.equal(
        generator.tril(-1)[*torch.tril_indices(6, 6, -1)],
        embedding.frequency_offset + FREE.generator(6).tril(-1)[*torch.tril_indices(6, 6, -1)],
    )
    table = embedding(Tokens.range(70), DOUBLE)
    assert isinstance(table, MatrixTable)
    for p in (0, 1, 2, 69):
        expected = torch.linalg.matrix_exp(p * generator)
        torch.testing.assert_close(table.matrix[0, p], expected, rtol=0, atol=1e-12)
    angles = torch.linalg.eigvals(torch.linalg.matrix_exp(generator)).angle().sort(descending=True).values
    torch.testing.assert_close(embedding.frequencies, angles[:3], rtol=1e-12, atol=0)


def test_trained_frequencies_report_their_offset():
    embedding = moved(TRAINED)
    start = Rotary(pairing="halves").frequencies(6)
    torch.testing.assert_close(embedding.frequencies - start, embedding.frequency_offset, rtol=0, atol=1e-15)


@pytest.mark.parametrize("scheme", [TRAINED, Rotary(pairing=((0, 3), (5, 1), (2, 4)), trainable=True), FREE])
def test_gradients_reach_what_is_trained(scheme):
    embedding = moved(scheme)
    x = random(4, 2, 1, 3, 6).requires_grad_()
    index = torch.arange(3)[None]
    tokens = Tokens(index.expand(2, 3), position=torch.tensor([[0, 4, 70], [1, -65, 2]]))

    def out(x: Tensor, drift: Tensor) -> Tensor:
        return functional_call(embedding, {"frequency_offset": drift}, (tokens, DOUBLE)).apply(x)

    assert torch.autograd.gradcheck(out, (x, embedding.frequency_offset))
    assert torch.autograd.gradgradcheck(out, (x, embedding.frequency_offset), atol=1e-4)


@pytest.mark.parametrize("scheme", [TRAINED, FREE])
def test_training_finds_turns_that_made_the_data(scheme):
    """Scores with a known offset from the standard frequencies: gradient descent finds the offset."""
    truth, embedding = moved(scheme, seed=5, size=0.02), RotaryEmbedding(scheme, 6).double()
    q, k = random(6, 2, 8, 1, 9, 6)

    def scores(embedding: RotaryEmbedding) -> Tensor:
        table = embedding(Tokens.range(9), DOUBLE)
        return table.apply(q) @ table.apply(k).mT

    target = scores(truth).detach()
    optimizer = torch.optim.Adam(embedding.parameters(), lr=2e-3)
    losses = []
    for _ in range(150):
        loss = (scores(embedding) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 1e-3 * losses[0]
    if scheme is TRAINED:
        torch.testing.assert_close(embedding.frequencies, truth.frequencies, rtol=0, atol=2e-3)


@pytest.mark.parametrize("scheme", [TRAINED, FREE])
def test_state_returns(scheme):
    embedding, loaded = moved(scheme), RotaryEmbedding(scheme, 6).double()
    loaded.load_state_dict(copy.deepcopy(embedding.state_dict()))
    x = random(7, 1, 1, 9, 6)
    assert torch.equal(embedding(TOKENS, DOUBLE).apply(x), loaded(TOKENS, DOUBLE).apply(x))


@pytest.mark.parametrize("scheme", [TRAINED, FREE, Rotary(pairing="halves")])
def test_one_token_at_a_time_is_the_row(scheme):
    """Keys are rotated once, by their own position, so that caches may keep them."""
    embedding = moved(scheme) if scheme in (TRAINED, FREE) else RotaryEmbedding(scheme, 6)
    x = random(8, 1, 2, 9, 6)
    full = embedding(Tokens.range(9), DOUBLE).apply(x)
    for i in range(9):
        alone = embedding(Tokens.range(1, start=i), DOUBLE).apply(x[:, :, i : i + 1])
        torch.testing.assert_close(alone, full[:, :, i : i + 1], rtol=0, atol=1e-14)


@pytest.mark.parametrize("scheme", [TRAINED, FREE, Rotary(pairing="adjacent")])
def test_empty_slots_are_not_looked_at(scheme):
    embedding, x = RotaryEmbedding(scheme, 6), random(9, 2, 2, 4, 6)
    index = torch.tensor([[0, 1, 2, 3], [-1, -1, 0, 1]])
    far = Tokens(index, position=torch.where(index < 0, 2**62, index))
    assert torch.equal(embedding(far, DOUBLE).apply(x), embedding(Tokens(index), DOUBLE).apply(x))


def test_length_dependent_scalings_use_each_rows_own_length():
    rotary = Rotary(pairing="halves", scaling=DynamicNTK(4.0, 8))
    embedding, x = RotaryEmbedding(rotary, 8), random(10, 2, 2, 20, 8)
    tokens = Tokens.from_lengths([20, 6], total=20)
    positions = torch.where(tokens.valid, tokens.positions, 0)
    expected = rotary.rotate(x, positions, torch.tensor([20, 6]))
    assert torch.equal(embedding(tokens, DOUBLE).apply(x), expected)


def test_lengths_are_those_of_the_row_or_of_each_document():
    assert token_lengths(Tokens.range(3, start=5)).tolist() == [[8]]
    assert token_lengths(Tokens.from_lengths([3, 1])).tolist() == [[3], [1]]
    packed = token_lengths(Tokens.packed([[2, 3], [1]], total=5))
    assert packed[0].tolist() == [2, 2, 3, 3, 3]
    assert packed[1, 0].item() == 1
    assert token_lengths(Tokens.range(0)).shape == (1, 1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RotaryEmbedding(Rotary(pairing="halves"), 7), r"head_dim 7 is odd"),
        (lambda: RotaryEmbedding(Rotary(pairing="halves", dims=8), 6), r"dims=8 does not fit heads of 6"),
        (
            lambda: RotaryEmbedding(NoPositions(), 8).frequencies,
            r"NoPositions\(\) has no one set of frequencies",
        ),
        (
            lambda: RotaryEmbedding(Rotary(pairing="halves", scaling=DynamicNTK(4.0, 8)), 8).frequencies,
            r"has no one set of frequencies",
        ),
    ],
)
def test_what_it_cannot_say_is_refused(make, text):
    with pytest.raises(ConfigError, match=text):
        make()
