"""MPT's ALiBi slopes follow the formula of LLM Foundry."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.checkpoints import spec_from_config
from headway.checkpoints.hf.config import config_from_spec
from headway.errors import ConfigError
from headway.scores import ALiBi

SIZES = {"model_type": "mpt", "vocab_size": 64, "n_layers": 2, "max_seq_len": 32}


def foundry(heads: int, largest: float) -> torch.Tensor:
    """Computes the slopes as `gen_slopes` of llmfoundry/models/layers/attention.py does."""
    power = 2 ** math.ceil(math.log2(heads))
    m = torch.arange(1, power + 1, dtype=torch.float64) * (largest / power)
    slopes = 1.0 / torch.pow(2, m)
    return slopes if power == heads else torch.cat([slopes[1::2], slopes[::2]])[:heads]


@given(st.integers(1, 40), st.one_of(st.just(8), st.floats(0.5, 20.0)))
def test_slopes_are_those_of_its_authors_at_any_bias_max(heads: int, largest: float) -> None:
    config = {**SIZES, "n_heads": heads, "d_model": 8 * heads, "attn_config": {"alibi_bias_max": largest}}
    spec = spec_from_config(config)
    (step,) = spec.positions.scores(heads, 8, False)
    assert isinstance(step, ALiBi)
    torch.testing.assert_close(
        torch.tensor(step.slopes, dtype=torch.float64), foundry(heads, largest), rtol=1e-6, atol=0
    )
    written = config_from_spec(spec)
    assert written["model_type"] == ("mpt" if largest == 8 else "headway"), "transformers ignores the key"
    assert spec_from_config(written) == spec


def test_a_bias_max_that_is_none_is_an_error() -> None:
    for bias_max in (0, -1.0, "8"):
        with pytest.raises(ConfigError, match="alibi_bias_max"):
            spec_from_config(
                {**SIZES, "n_heads": 4, "d_model": 32, "attn_config": {"alibi_bias_max": bias_max}}
            )
