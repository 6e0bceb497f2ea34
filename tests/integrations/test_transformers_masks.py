"""The stand-in for the mask with `attn_implementation="headway"`: the patterns read from it, and what is refused."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import (
    Aimv2TextConfig,
    Aimv2TextModel,
    AutoModel,
    AutoModelForCausalLM,
    ConvNextConfig,
    EncoderDecoderConfig,
    FNetConfig,
    FuyuConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    LongformerConfig,
    MambaConfig,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    NemotronConfig,
    OPTConfig,
    PersimmonConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    StableLmConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.masking_utils import bidirectional_mask_function, blockwise_overlay

import headway.integrations.transformers as integration
from headway.errors import BackendError
from headway.patterns import Causal, Chunk, Full, Window
from tests.integrations.accelerated import GROUPED, LENGTH, SIZES, VOCAB, random_weights
from tests.integrations.test_transformers import assert_as_eager, mistral, padded, some_ids


def test_what_stands_for_the_mask_is_one_byte() -> None:
    mask = integration.seen(3, 4096, 4096)
    assert mask.shape == (3, 1, 4096, 4096)
    assert mask.stride() == (0, 0, 0, 0)
    assert repr(mask) == "Seen(Causal(), queries=4096, keys=4096)"


def test_mask_functions_are_read_back_as_patterns() -> None:
    from transformers import masking_utils as masks

    for function, pattern in (
        (None, Causal()),
        (masks.causal_mask_function, Causal()),
        (masks.bidirectional_mask_function, Full()),
        (masks.sliding_window_causal_mask_function(4), Window.last(4)),
        (masks.sliding_window_bidirectional_mask_function(3), Window.around(3)),
        (masks.chunked_causal_mask_function(4, torch.zeros(1)), Causal() & Chunk(4)),
    ):
        assert integration.declared(function)[0] == pattern
    with pytest.raises(BackendError, match="made by `blockwise_overlay`, for which there is no pattern"):
        integration.declared(masks.blockwise_overlay(torch.zeros(1, 4)))
    with pytest.raises(
        BackendError, match="chunked attention with padding on the left is not supported; pad on"
    ):
        integration.declared(masks.chunked_causal_mask_function(4, torch.tensor([0, 2])))
    with pytest.raises(BackendError, match=r"made by `or_masks`.*use attn_implementation=\"sdpa\""):
        integration.declared(masks.or_masks(masks.causal_mask_function, masks.bidirectional_mask_function))
    with pytest.raises(BackendError, match="a sliding window that is not causal"):
        integration.declared(masks.sliding_window_overlay(4))
    with pytest.raises(BackendError, match="a window of 0 tokens, in which no query sees any key"):
        integration.declared(masks.sliding_window_causal_mask_function(0))


def test_a_mask_that_is_no_pattern_is_an_error_of_the_layer_that_uses_it() -> None:
    mask = integration.seen(1, 4, 4, mask_function=blockwise_overlay(torch.zeros(1, 4)))
    assert mask.shape == (1, 1, 4, 4)
    for passed in (mask, mask.to("cpu")):
        with pytest.raises(BackendError, match="made by `blockwise_overlay`, for which there is no pattern"):
            layer_call(passed)


def test_a_mask_that_no_layer_uses_is_no_error() -> None:
    """Qwen2-MoE makes the mask of a window of 0 tokens, unless its config has windows."""
    sizes = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    model = random_weights(Qwen2MoeForCausalLM(Qwen2MoeConfig(**GROUPED, **sizes)))
    assert model.config.sliding_window == 0
    assert_as_eager(model, padded("left"), input_ids=some_ids(), attention_mask=padded("left"))


def test_a_layer_whose_own_code_says_is_causal_leaves_that_to_its_mask() -> None:
    """Moonshine's decoder passes is_causal=False together with a causal mask."""
    sizes = {name: value for name, value in SIZES.items() if "num_" not in name and name != "eos_token_id"}
    halves = {
        f"{side}_num_{what}": 2
        for side in ("encoder", "decoder")
        for what in ("hidden_layers", "attention_heads")
    }
    config = MoonshineConfig(**sizes, **halves, eos_token_id=2, decoder_start_token_id=1)
    model = random_weights(MoonshineForConditionalGeneration(config))
    assert model.model.decoder.layers[0].self_attn.is_causal
    sound, ids, mask = torch.randn(2, 2000), some_ids(), padded("right")
    assert_as_eager(model, mask, input_values=sound, decoder_input_ids=ids, decoder_attention_mask=mask)


def test_what_cannot_be_honoured_is_an_error() -> None:
    model, ids = mistral(), some_ids()
    model.set_attn_implementation("headway")
    with pytest.raises(BackendError, match=r"output_attentions=True is not supported.*attention_weights"):
        model(ids, output_attentions=True)
    with pytest.raises(BackendError, match=r"an attention_mask of shape \(2, 1, 23, 23\) is not supported"):
        model(ids, attention_mask=torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool))
    with pytest.raises(BackendError, match="the model passes cu_seq_lens_q, which is unknown"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 23], dtype=torch.int32))


TEXT = {**SIZES, "num_key_value_heads": 4, "num_hidden_layers": 1}
SILENT = {
    "gpt2": GPT2Config(**SIZES),
    "gpt_bigcode": GPTBigCodeConfig(**SIZES),
    "opt": OPTConfig(**SIZES, ffn_dim=32, word_embed_proj_dim=32),
    "stablelm": StableLmConfig(**TEXT),
    "nemotron": NemotronConfig(**TEXT),
    "persimmon": PersimmonConfig(**TEXT),
    "fuyu": FuyuConfig(**TEXT, text_config={"model_type": "persimmon", **TEXT}, patch_size=2, image_size=4),
}


@pytest.mark.parametrize("config", SILENT.values(), ids=SILENT)
def test_attention_weights_are_refused_where_layers_are_not_told_of_them(config: Any) -> None:
    model, ids = AutoModelForCausalLM.from_config(config, attn_implementation="headway"), some_ids()
    assert model(ids, output_hidden_states=True).hidden_states
    with pytest.raises(BackendError, match=r"output_attentions=True is not supported.*attention_weights"):
        model(ids, output_attentions=True)
    model.set_attn_implementation("eager")
    assert model(ids, output_attentions=True).attentions[0].shape[-2:] == (LENGTH, LENGTH)


def test_relative_biases_of_t5_are_refused() -> None:
    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config)
    model.set_attn_implementation("headway")
    with pytest.raises(BackendError, match="the model passes position_bias"):
        model(some_ids(), decoder_input_ids=some_ids())


def layer_call(mask: Any, queries: int = 4, keys: int = 4, **kwargs: Any) -> Any:
    module = torch.nn.Module()
    if "says" in kwargs:
        module.is_causal = kwargs.pop("says")
    q, k = torch.randn(1, 4, queries, 8), torch.randn(1, 2, keys, 8)
    return integration.attention(module, q, k, k, mask, **kwargs)[0]


def test_a_layer_without_a_mask_must_say_what_it_sees() -> None:
    assert layer_call(None, says=False, keys=7).shape == (1, 4, 4, 8)
    assert layer_call(None, says=True, sliding_window=2).shape == (1, 4, 4, 8)
    with pytest.raises(BackendError, match="Module has neither a mask nor is_causal"):
        layer_call(None)
    with pytest.raises(BackendError, match="no mask for 4 queries over 7 keys"):
        layer_call(None, says=True, keys=7)
    with pytest.raises(BackendError, match="sliding_window=3 without a mask"):
        layer_call(None, says=False, sliding_window=3)


def test_a_layer_that_says_it_is_not_causal_leaves_that_to_its_mask() -> None:
    """As in `transformers`, the mask alone counts. AIMv2's text layers have is_causal=False and a causal mask."""
    model = random_weights(Aimv2TextModel(Aimv2TextConfig(**SIZES | {"eos_token_id": 1})))
    assert not model.encoder.layers[0].attention.is_causal
    mask = padded("right")
    assert_as_eager(model, mask, input_ids=some_ids(), attention_mask=mask)


def test_arguments_that_are_not_about_attention_are_let_through() -> None:
    mask = integration.seen(1, 4, 4)
    assert layer_call(mask, return_dict=True, return_loss=True, labels=torch.zeros(1)).shape == (1, 4, 4, 8)
    with pytest.raises(BackendError, match="the model passes indices, which is unknown"):
        layer_call(mask, return_dict=True, indices=torch.zeros(4))


KEEPING = {"gptj": GPTJConfig(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=32)}
KEEPING["longformer"] = LongformerConfig(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32
)


WITHOUT = {
    "mamba": MambaConfig(vocab_size=VOCAB, hidden_size=16, state_size=4, num_hidden_layers=1),
    "fnet": FNetConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, intermediate_size=16),
    "convnext": ConvNextConfig(depths=[1, 1, 1, 1], hidden_sizes=[4, 4, 8, 8]),
}


class Pair(PreTrainedModel):
    """An encoder that takes its attention from `transformers`' interface, beside a decoder that keeps its own."""

    config_class = EncoderDecoderConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.encoder, self.decoder = (
            AutoModel.from_config(part) for part in (config.encoder, config.decoder)
        )


def test_a_layer_that_contradicts_its_mask_is_an_error() -> None:
    causal = integration.seen(1, 4, 4)
    with pytest.raises(
        BackendError, match=r"is_causal=False was given to a causal Module.*its mask is Causal"
    ):
        layer_call(causal, is_causal=False, says=True)
    with pytest.raises(BackendError, match=r"is_causal=True, but its mask is Full"):
        layer_call(integration.seen(1, 4, 4, mask_function=bidirectional_mask_function), is_causal=True)
    with pytest.raises(BackendError, match="sliding_window=3, but its mask is Causal"):
        layer_call(causal, sliding_window=3)
    with pytest.raises(BackendError, match="for 4 queries and 4 keys, but the layer has 4 and 7"):
        layer_call(causal, keys=7)


def test_the_stand_in_refuses_to_be_read() -> None:
    mask = integration.seen(1, 4, 4)
    assert mask.to("cpu").pattern == mask.contiguous().pattern == Causal()
    for read in (
        lambda: mask[:, :, -1:],
        lambda: mask + 1,
        lambda: mask.all(),
        lambda: torch.cat([mask, mask]),
    ):
        with pytest.raises(BackendError, match="to its attention mask, which has no values here"):
            read()


def test_without_transformers_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['transformers'] = None; import headway.integrations.transformers"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'pip install "headway[transformers]"' in process.stderr.splitlines()[-1]
