"""The final model is the mean of the last checkpoints, while the run itself goes on from its own weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headway.checkpoints import load_folder
from headway.train import TextConfig, train
from headway.train.checkpoint import checkpoints
from tests.train.test_resume import assert_same_bits

Make = Callable[..., TextConfig]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_model_is_the_mean_of_the_last_checkpoints(settings: Make, tmp_path: Path, dtype: str) -> None:
    config = settings(steps=6, save_every=2, keep_last=3, average=2, validation_share=0.2, dtype=dtype)
    result = train(config, quiet=True)
    last = [load_folder(path).tensors for path in checkpoints(Path(config.out))[-2:]]
    final = load_folder(result.model).tensors
    for name in final:
        mean = (last[0][name].double() + last[1][name].double()) / 2
        torch.testing.assert_close(final[name].double(), mean, rtol=1e-6, atol=1e-9)
    assert not torch.equal(final["model.norm.weight"], last[-1]["model.norm.weight"])
    plain = settings(
        steps=6, save_every=2, keep_last=3, validation_share=0.2, dtype=dtype, out=str(tmp_path / "plain")
    )
    plain_result = train(plain, quiet=True)
    assert_same_bits(config.out, plain.out)
    assert result.validation is not None
    assert plain_result.validation is not None
    # the mean is measured, not the last weights
    assert result.validation.loss != plain_result.validation.loss
