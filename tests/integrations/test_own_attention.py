"""Models that keep their own attention, wholly or in part, and models without attention."""

from functools import wraps
from typing import Any

import pytest
from transformers import AutoModel, BertConfig, EncoderDecoderConfig
from transformers.models.bert.modeling_bert import BertSelfAttention

from headway.errors import BackendError
from headway.integrations.transformers.own_attention import attention_layers
from tests.integrations.accelerated import VOCAB
from tests.integrations.test_transformers_masks import KEEPING, WITHOUT, Pair

SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def test_a_layer_whose_forward_is_wrapped_asks_for_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases of `transformers` wrap forwards to warn of arguments of older releases."""
    original = BertSelfAttention.forward

    @wraps(original)
    def warns(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    model = AutoModel.from_config(BertConfig(**SMALL))
    layers = [*attention_layers(model)]
    assert layers
    monkeypatch.setattr(BertSelfAttention, "forward", warns)
    assert [*attention_layers(model)] == layers


@pytest.mark.parametrize("config", KEEPING.values(), ids=KEEPING)
def test_a_model_that_keeps_its_own_attention_is_named(config: Any) -> None:
    message = rf"{type(config).__name__.removesuffix('Config')}\w* has its own attention code"
    with pytest.raises(BackendError, match=message):
        AutoModel.from_config(config, attn_implementation="headway")
    config._attn_implementation = "eager"
    model = AutoModel.from_config(config)
    for implementation in ("headway", {"": "headway"}):
        with pytest.raises(BackendError, match=message):
            model.set_attn_implementation(attn_implementation=implementation)
    model.set_attn_implementation({"": "eager"})
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("config", WITHOUT.values(), ids=WITHOUT)
def test_a_model_without_attention_is_named(config: Any) -> None:
    message = r"Model has no attention layer that uses attn_implementation.*leave it out for this model"
    with pytest.raises(BackendError, match=message):
        AutoModel.from_config(config, attn_implementation="headway")
    config._attn_implementation = "eager"
    model = AutoModel.from_config(config)
    with pytest.raises(BackendError, match=message):
        model.set_attn_implementation("headway")
    model.set_attn_implementation("eager")


def test_a_part_without_attention_is_no_error_unless_it_is_named() -> None:
    """A convolutional network beside an encoder: the model's implementation applies to the encoder."""
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**SMALL), WITHOUT["convnext"])
    config._attn_implementation = "headway"
    assert Pair(config).encoder.config._attn_implementation == "headway"
    config._attn_implementation = "eager"
    model = Pair(config)
    model.set_attn_implementation("headway")
    assert model.encoder.config._attn_implementation == "headway"
    with pytest.raises(
        BackendError, match=r"ConvNextModel has no attention.*the configs of the parts that do"
    ):
        model.set_attn_implementation({"decoder": "headway"})


def test_a_part_that_keeps_its_own_attention_is_named_and_may_be_left_out() -> None:
    model = Pair(EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**SMALL), KEEPING["gptj"]))
    with pytest.raises(
        BackendError, match=r"GPTJModel has its own attention.*the parts that do, as in .\"text_config\": "
    ):
        model.set_attn_implementation("headway")
    model.set_attn_implementation({"encoder": "headway"})
    implementations = model.encoder.config._attn_implementation, model.decoder.config._attn_implementation
    assert implementations == ("headway", "eager")
