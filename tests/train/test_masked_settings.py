"""Which encoders can be pre-trained, from which settings and folders, and the error messages for all others."""

from collections.abc import Callable
from pathlib import Path

import pytest

from headway.attention.linear_attention import LinearAttentionSpec
from headway.checkpoints.saving import save_folder
from headway.errors import ConfigError, DataError
from headway.models import Head, build, cost
from headway.positions import Learned, Rotary
from headway.text import Tokenizer
from headway.train import TextConfig, train
from headway.train.dry_run import describe_run
from headway.train.inputs import make_spec
from headway.train.tasks import text_task_of
from tests.train.conftest import ENCODER
from tests.train.test_masked import model_of

Make = Callable[..., TextConfig]


def test_specs_of_encoders(encoder: Make) -> None:
    spec = make_spec(encoder(family="roberta", hidden=None), 99)
    assert spec.positions == Learned(24, offset=2)
    assert (spec.kv_heads, spec.hidden, spec.trained_context, spec.tied) == (2, 64, 24, True)
    assert (spec.dropout, spec.attention_dropout) == (0.1, 0.1)
    spec = make_spec(encoder(family="roformer", mixers="elu+1", dropout=0.2), 99)
    assert isinstance(spec.positions, Rotary)
    assert spec.mixers == (LinearAttentionSpec("elu+1"),) * spec.layers
    assert (spec.dropout, spec.attention_dropout) == (0.2, 0.0)
    assert text_task_of(spec) == "masked-lm"
    plan = describe_run(encoder(family="roformer"))
    assert sum(plan.groups.values()) == cost.parameter_count(plan.spec)


def test_models_that_have_no_mask_to_fill(encoder: Make, settings: Make, tmp_path: Path) -> None:
    first = train(encoder(steps=1), quiet=True)
    folder = {**dict.fromkeys((*ENCODER, "vocab", "depth", "width", "heads")), "model": str(tmp_path / "c")}
    spec = model_of(first.model).spec
    classifier = build(spec.with_head(Head("classify", labels=("a", "b"), dense="tanh")), seed=0)
    save_folder(tmp_path / "c", classifier, tokenizer=Tokenizer.load(first.model))
    with pytest.raises(
        ConfigError,
        match=r"no task trains .* this encoder \(bert\) has the head 'classify'; pre-training needs",
    ):
        train(settings(**folder, out=str(tmp_path / "d")), quiet=True)
    plain = train(settings(steps=1, out=str(tmp_path / "decoder")), quiet=True)
    with pytest.raises(DataError, match="this tokenizer has no mask token"):
        train(encoder(vocab=None, tokenizer=str(plain.model), out=str(tmp_path / "e")), quiet=True)
    longer = {**folder, "model": str(first.model), "context": 48}
    with pytest.raises(
        ConfigError, match=r"context 48 is more than the 24 tokens that .* can take; lower context"
    ):
        train(settings(**longer, batch_tokens=96, micro_batch=1, out=str(tmp_path / "f")), quiet=True)
