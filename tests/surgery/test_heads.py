"""Pooling key/value heads: what stays unchanged, and the result of each pool, head by head."""

import pytest
import torch

from headway.checkpoints.restore import fill
from headway.errors import CheckpointError, ConfigError
from headway.models import ModelSpec, build
from headway.positions import Rotary
from headway.surgery import POOLS, Pooled, kept_by_mean, pool_heads, verdict

FAMILIES = ("llama", "qwen2", "qwen3")  # plain; biases; normed queries and keys


def make(kv_heads, *, heads=8, family="llama", dtype=torch.float64, **fields):
    """Returns a spec and its weights, with biases and gains drawn, too: fresh ones, 0 and 1, would hide mistakes."""
    spec = ModelSpec.of(family, vocab=37, width=24, layers=2, heads=heads, kv_heads=kv_heads, head_dim=6,
                        hidden=32, trained_context=32, init_std=0.3, **fields)  # fmt: skip
    state = build(spec, seed=1, dtype=dtype).state_dict()
    generator = torch.Generator().manual_seed(2)
    for value in state.values():
        if value.dim() == 1:
            value.add_(torch.randn(value.shape, generator=generator).to(dtype), alpha=0.3)
    return spec, state


def logits(spec, state, tokens=12):
    ids = torch.randint(spec.vocab, (2, tokens), generator=torch.Generator().manual_seed(3))
    dtype = next(iter(state.values())).dtype
    with torch.no_grad():
        return fill(spec, state, dtype=dtype)(ids)


def repeated(spec, state, n):
    """Returns the same function with n times as many KV heads, each head repeated n times (row 53)."""
    wide = {
        name: value.unflatten(0, (spec.kv_heads, -1)).repeat_interleave(n, 0).flatten(0, 1)
        if ".k_proj." in name or ".v_proj." in name
        else value
        for name, value in state.items()
    }
    return ModelSpec(**{**vars(spec), "kv_heads": spec.kv_heads * n}), wide


@pytest.mark.parametrize("pool", ["mean", "first"])
@pytest.mark.parametrize("pairing", ["halves", "adjacent"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("heads", "g", "n"), [(8, 1, 8), (8, 2, 2), (6, 2, 3)])
def test_row_48_equal_heads_pool_to_the_same_outputs(heads, g, n, family, pairing, pool):
    small = make(g, heads=heads, family=family, positions=Rotary(pairing=pairing))
    wide = repeated(*small, n)
    assert wide[0].kv_heads == g * n
    spec, state = pool_heads(*wide, g, pool)
    assert spec == small[0]
    assert (logits(spec, state) - logits(*wide)).abs().max() <= 1e-12
    assert all(torch.allclose(state[name], small[1][name], rtol=1e-15, atol=0) for name in state)
    assert kept_by_mean(*wide, g) == pytest.approx(1.0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("before", "after"), [(8, 4), (8, 2), (8, 1), (4, 2), (4, 1), (6, 2), (6, 3)])
def test_every_pool_head_by_head(family, before, after):
    spec, state = make(before, family=family, heads=24 if before == 6 else 8)
    n, d = before // after, spec.head_dim
    pooled = {pool: pool_heads(spec, state, after, pool)[1] for pool in POOLS}
    touched = {name for name in state if ".k_proj." in name or ".v_proj." in name}
    assert len(touched) == (8 if family == "qwen2" else 4)
    for name in state:
        if name not in touched:
            assert all(torch.equal(new[name], state[name]) for new in pooled.values())
            continue
        for j in range(after):
            group = [state[name][h * d : (h + 1) * d] for h in range(j * n, (j + 1) * n)]
            span = slice(j * d, (j + 1) * d)
            assert torch.allclose(pooled["mean"][name][span], sum(group) / n, rtol=1e-14, atol=1e-15)
            assert torch.equal(pooled["first"][name][span], group[0])
        drawn = pooled["random"][name]
        assert drawn.shape == pooled["mean"][name].shape
        assert torch.equal(drawn, torch.zeros_like(drawn)) == name.endswith(".bias")


@pytest.mark.parametrize("pool", ["mean", "first"])
def test_pooling_twice_is_pooling_once(pool):
    """Groups are neighbours, and a query head uses the head that its own was pooled into: 8 to 4 to 2 is 8 to 2."""
    model = make(8, family="qwen2")
    once, twice = pool_heads(*model, 2, pool), pool_heads(*pool_heads(*model, 4, pool), 2, pool)
    assert once[0] == twice[0]
    assert torch.allclose(logits(*once), logits(*twice), rtol=1e-12, atol=1e-12)


def test_pooling_to_as_many_heads_changes_nothing_but_random():
    model = make(4, family="qwen2")
    for pool in POOLS:
        spec, state = pool_heads(*model, 4, pool)
        assert spec == model[0]
        changed = {name for name in state if not torch.equal(state[name], model[1][name])}
        assert changed == {x for x in state if pool == "random" and (".k_proj." in x or ".v_proj." in x)}


def test_sums_are_float32_and_rounded_once():
    spec, state = make(8, dtype=torch.bfloat16)
    name = "model.layers.0.self_attn.k_proj.weight"
    new = pool_heads(spec, state, 1)[1][name]
    assert new.dtype == torch.bfloat16
    assert torch.equal(new, state[name].float().unflatten(0, (8, -1)).mean(0).bfloat16())


def test_random_is_what_a_model_begins_with_and_its_seed_decides():
    spec, state = make(8, dtype=torch.float32)
    first, same_seed, reseeded = (pool_heads(spec, state, 4, "random", seed=seed)[1] for seed in (0, 0, 1))
    name = "model.layers.1.self_attn.v_proj.weight"
    assert torch.equal(first[name], same_seed[name])
    assert not torch.equal(first[name], reseeded[name])
    drawn = torch.cat(
        [value.flatten() for key, value in first.items() if key.endswith(("k_proj.weight", "v_proj.weight"))]
    )
    assert drawn.std().item() == pytest.approx(spec.init_std, rel=4 / (2 * drawn.numel()) ** 0.5)


def test_the_share_that_the_mean_keeps():
    spec, state = make(4)
    for name in state:
        if ".k_proj." in name or ".v_proj." in name:
            rows = state[name].shape[0]
            state[name] = torch.eye(rows, 24, dtype=torch.float64)  # all heads are orthogonal
    assert kept_by_mean(spec, state, 2) == pytest.approx(1 / 2)
    assert kept_by_mean(spec, state, 1) == pytest.approx(1 / 4)
    assert kept_by_mean(spec, state, 4) == pytest.approx(1.0)


def test_the_share_of_groups_of_unequal_sizes_is_refused():
    with pytest.raises(
        ConfigError, match=r"kept_by_mean: 8 key/value heads cannot become 3: .* one of 1, 2, 4, 8"
    ):
        kept_by_mean(*make(8), 3)


def test_the_source_is_left_as_it_was():
    spec, state = make(4)
    copies = {name: value.clone() for name, value in state.items()}
    for pool in POOLS:
        new = pool_heads(spec, state, 4, pool)[1]
        new["model.layers.0.self_attn.k_proj.weight"].zero_()
    assert all(torch.equal(state[name], copies[name]) for name in state)


@pytest.mark.parametrize(
    ("kv_heads", "pool", "seed", "message"),
    [
        (3, "mean", None, "8 key/value heads cannot become 3: .* one of 1, 2, 4, 8"),
        (0, "mean", None, "cannot become 0"),
        (16, "mean", None, "cannot become 16"),
        (2.0, "mean", None, "cannot become 2.0"),
        (True, "mean", None, "cannot become True"),
        (4, "frist", None, "no pool 'frist' \\(did you mean \"first\"\\?\\); there are mean, first, random"),
        (4, "mean", 1, "seed is only for pool 'random', got pool 'mean'"),
    ],
)
def test_what_cannot_be_pooled(kv_heads, pool, seed, message):
    with pytest.raises(ConfigError, match=message):
        pool_heads(*make(8), kv_heads, pool, seed=seed)


def test_weights_of_another_spec_are_refused():
    spec, _ = make(8)
    with pytest.raises(CheckpointError, match=r"k_proj.weight has 24 rows, but 8 heads of 6 are 48"):
        pool_heads(spec, make(4)[1], 4)


def rows(mean, first, *random):
    drawn = [Pooled("random", seed, loss, None) for seed, loss in enumerate(random)]
    return [Pooled("mean", None, mean, None), Pooled("first", None, first, None), *drawn]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (rows(1.0, 2.0, 3.0, 4.0), "mean < first < random, for every seed"),
        (rows(2.0, 1.0, 3.0, 4.0), "the table says otherwise: first < mean < random"),
        (
            rows(1.0, 3.5, 3.0, 4.5),
            "the table says otherwise: mean < first < random, with losses that overlap",
        ),
        (
            rows(1.0, 1.0, 3.0),
            "the table says otherwise: mean < first < random, with losses that overlap or are equal",
        ),
    ],
)
def test_the_verdict_is_what_the_table_says(table, said):
    assert verdict(table).startswith(said)
