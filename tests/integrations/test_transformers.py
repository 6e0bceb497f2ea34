"""`attn_implementation="headway"` is `transformers`' own attention, without a mask over pairs being built.

Weights are drawn with standard deviation 0.3, so that attention is far from uniform and a wrong window shows.
Tolerances: two correct float32 computations of such a model differ by a few hundred roundings (6e-8 each), so
1e-5 of the largest logit and 1e-4 of the largest gradient of a tensor.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Aimv2TextConfig,
    Aimv2TextModel,
    AutoModel,
    BertConfig,
    BertModel,
    EncoderDecoderConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTJConfig,
    LongformerConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from transformers.masking_utils import bidirectional_mask_function

import headway.integrations.transformers as integration
from headway.errors import BackendError
from headway.patterns import Causal, Full, Window

WINDOW, LENGTH, VOCAB = 5, 23, 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def random_weights(model: PreTrainedModel) -> Any:
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    return model.eval()


def mistral(window: int | None = WINDOW) -> Any:
    return random_weights(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)))


def qwen2() -> Any:
    """One full layer and one with a window."""
    config = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    assert config.layer_types == ["full_attention", "sliding_attention"]
    return random_weights(Qwen2ForCausalLM(config))


MODELS = {"mistral": mistral, "qwen2": qwen2}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


def some_ids(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(2, VOCAB, (rows, length))


def padded(side: str) -> Tensor:
    """A mask with 9 empty slots in the first row, on `side`; "hole" puts them in the middle."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    begin = {"none": LENGTH, "left": 0, "right": LENGTH - 9, "hole": 6}[side]
    mask[0, begin : begin + 9] = 0
    return mask


def run(model: Any, implementation: str, ids: Tensor, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradient of every parameter of a loss on the tokens that are there."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    mask = kwargs.get("attention_mask")
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    out = model(ids, labels=labels, **kwargs)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(model: Any, ids: Tensor, **kwargs: Any) -> None:
    logits, gradients = run(model, "headway", ids, **kwargs)
    expected, expected_gradients = run(model, "sdpa", ids, **kwargs)
    real = kwargs.get("attention_mask", torch.ones_like(ids)).bool()
    torch.testing.assert_close(logits[real], expected[real], rtol=0, atol=1e-5 * float(expected.abs().max()))
    for name, gradient in expected_gradients.items():
        atol = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("side", ["none", "left", "right", "hole"])
def test_logits_and_gradients_are_those_of_sdpa(model: Any, side: str) -> None:
    assert_equal(model, some_ids(), attention_mask=padded(side))


def test_without_an_attention_mask(model: Any) -> None:
    assert_equal(model, some_ids())


def test_a_packed_row_is_its_documents(model: Any) -> None:
    ids = some_ids(1)
    position_ids = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)]).unsqueeze(0)
    assert_equal(model, ids, position_ids=position_ids, use_cache=False)
    together = run(model, "headway", ids, position_ids=position_ids, use_cache=False)[0]
    alone = torch.cat([run(model, "headway", part)[0] for part in (ids[:, :9], ids[:, 9:])], 1)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5 * float(alone.abs().max()))


def test_a_window_that_is_off_by_one_is_seen() -> None:
    """The comparison above would catch it."""
    model, ids = mistral(), some_ids()
    logits = run(model, "headway", ids)[0]
    for off in (WINDOW - 1, WINDOW + 1):
        model.config.sliding_window = off
        wrong = run(model, "sdpa", ids)[0]
        assert (wrong - logits).abs().max() > 1e-2 * logits.abs().max()


@pytest.mark.parametrize(
    "how", [{}, {"use_cache": False}, {"cache_implementation": "static"}, {"num_beams": 2}]
)
def test_greedy_text_is_the_same(model: Any, how: dict[str, Any]) -> None:
    """Left padded rows, over several windows, with each kind of cache."""
    ids, texts = some_ids(), []
    for implementation in ("headway", "sdpa"):
        model.set_attn_implementation(implementation)
        texts.append(
            model.generate(ids, attention_mask=padded("left"), max_new_tokens=20, do_sample=False, **how)
        )
    assert texts[0].shape == (2, LENGTH + 20)
    assert torch.equal(*texts)


def test_a_step_of_trainer_gives_the_same_weights(tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in some_ids(4)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=4,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        activation_checkpointing=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    first = mistral().state_dict()
    stepped = []
    for implementation in ("headway", "sdpa"):
        model = mistral()
        model.load_state_dict(first)
        model.set_attn_implementation(implementation)
        Trainer(model=model, args=arguments, train_dataset=rows).train()
        stepped.append(model.state_dict())
    for name, before in first.items():
        moved = (stepped[1][name] - before).abs().max()
        assert moved > 0
        rounding = 6e-8 * float(before.abs().max())
        atol = 1e-4 * float(moved) + rounding
        torch.testing.assert_close(stepped[0][name], stepped[1][name], rtol=0, atol=atol)


def test_soft_capped_scores_are_those_of_eager() -> None:
    config = Gemma2Config(
        **SIZES, head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    )
    model, ids = random_weights(Gemma2ForCausalLM(config)), some_ids()
    expected, logits = run(model, "eager", ids)[0], run(model, "headway", ids)[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_an_encoder_sees_both_ways(side: str) -> None:
    sizes = {
        name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "bos_token_id")
    }
    model = random_weights(BertModel(BertConfig(**sizes)))
    ids, mask, outputs = some_ids(), padded(side), []
    for implementation in ("headway", "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            outputs.append(model(ids, attention_mask=mask).last_hidden_state[mask.bool()])
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5 * float(outputs[1].abs().max()))


def test_dropout_is_applied_in_training_only() -> None:
    config = MistralConfig(
        **SIZES, sliding_window=WINDOW, attention_dropout=0.5, attn_implementation="headway"
    )
    model, ids = random_weights(MistralForCausalLM(config)), some_ids()
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


def test_what_stands_for_the_mask_is_one_byte() -> None:
    mask = integration.seen(3, 4096, 4096)
    assert mask.shape == (3, 1, 4096, 4096)
    assert mask.stride() == (0, 0, 0, 0)
    assert repr(mask) == "Seen(Causal(), queries=4096, keys=4096)"


def test_mask_functions_are_read_back_as_patterns() -> None:
    from transformers import masking_utils as made

    for function, pattern in (
        (None, Causal()),
        (made.causal_mask_function, Causal()),
        (made.bidirectional_mask_function, Full()),
        (made.sliding_window_causal_mask_function(4), Window.last(4)),
        (made.sliding_window_bidirectional_mask_function(3), Window.around(3)),
    ):
        assert integration.declared(function)[0] == pattern
    with pytest.raises(BackendError, match="made by `chunked_overlay`, which is not a pattern known here"):
        integration.declared(made.chunked_causal_mask_function(4, torch.zeros(1)))
    with pytest.raises(BackendError, match=r"made by `or_masks`.*use attn_implementation=\"sdpa\""):
        integration.declared(made.or_masks(made.causal_mask_function, made.bidirectional_mask_function))
    with pytest.raises(BackendError, match="a window behind each query with everything ahead"):
        integration.declared(made.sliding_window_overlay(4))


def test_what_cannot_be_honoured_is_an_error() -> None:
    model, ids = mistral(), some_ids()
    model.set_attn_implementation("headway")
    with pytest.raises(BackendError, match=r"output_attentions=True was asked for.*attention_weights"):
        model(ids, output_attentions=True)
    with pytest.raises(
        BackendError, match=r"a mask of shape \(2, 1, 23, 23\) over pairs of tokens was given"
    ):
        model(ids, attention_mask=torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool))
    with pytest.raises(BackendError, match="the model passes cu_seq_lens_q, which is not known here"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 23], dtype=torch.int32))


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
    with pytest.raises(BackendError, match="Module gives neither a mask nor `is_causal`"):
        layer_call(None)
    with pytest.raises(BackendError, match="no mask for 4 queries over 7 keys"):
        layer_call(None, says=True, keys=7)
    with pytest.raises(BackendError, match="a window of 3 on unsaid sides"):
        layer_call(None, says=False, sliding_window=3)


def test_a_layer_that_says_it_is_not_causal_leaves_that_to_its_mask() -> None:
    """As in `transformers`, where a mask that is given is all that is seen. AIMv2's text layers say so."""
    sizes = {
        name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "bos_token_id")
    }
    model = random_weights(Aimv2TextModel(Aimv2TextConfig(**sizes | {"eos_token_id": 1})))
    assert not model.encoder.layers[0].attention.is_causal
    ids, mask, outputs = some_ids(), padded("right"), []
    for implementation in ("headway", "eager"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            outputs.append(model(ids, attention_mask=mask).last_hidden_state[mask.bool()])
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5 * float(outputs[1].abs().max()))


def test_arguments_that_are_not_about_attention_are_let_through() -> None:
    mask = integration.seen(1, 4, 4)
    assert layer_call(mask, return_dict=True, return_loss=True, labels=torch.zeros(1)).shape == (1, 4, 4, 8)
    with pytest.raises(BackendError, match="the model passes s_aux, which is not known here"):
        layer_call(mask, return_dict=True, s_aux=torch.zeros(4))


KEEPING = {"gptj": GPTJConfig(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=32)}
KEEPING["longformer"] = LongformerConfig(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32
)


@pytest.mark.parametrize("config", KEEPING.values(), ids=KEEPING)
def test_a_model_that_keeps_its_own_attention_is_named(config: Any) -> None:
    named = rf"{type(config).__name__.removesuffix('Config')}\w* keeps its own attention"
    with pytest.raises(BackendError, match=named):
        AutoModel.from_config(config, attn_implementation="headway")
    config._attn_implementation = "eager"
    model = AutoModel.from_config(config)
    for given in ("headway", {"": "headway"}):
        with pytest.raises(BackendError, match=named):
            model.set_attn_implementation(attn_implementation=given)
    model.set_attn_implementation({"": "eager"})
    assert model.config._attn_implementation == "eager"


class Pair(PreTrainedModel):
    """An encoder that asks for its attention, beside a decoder that keeps its own."""

    config_class = EncoderDecoderConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.encoder, self.decoder = (
            AutoModel.from_config(part) for part in (config.encoder, config.decoder)
        )


def test_a_part_that_keeps_its_own_attention_is_named_and_may_be_left_out() -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = Pair(EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**sizes), KEEPING["gptj"]))
    with pytest.raises(
        BackendError, match=r"GPTJModel keeps its own.*the parts that do, as in .\"text_config\": "
    ):
        model.set_attn_implementation("headway")
    model.set_attn_implementation({"encoder": "headway"})
    found = model.encoder.config._attn_implementation, model.decoder.config._attn_implementation
    assert found == ("headway", "eager")


def test_a_layer_that_contradicts_its_mask_is_an_error() -> None:
    causal = integration.seen(1, 4, 4)
    with pytest.raises(
        BackendError, match=r"is_causal=False was given to a causal Module.*declared as Causal"
    ):
        layer_call(causal, is_causal=False, says=True)
    with pytest.raises(BackendError, match=r"is_causal=True, but its mask was declared as Full"):
        layer_call(integration.seen(1, 4, 4, mask_function=bidirectional_mask_function), is_causal=True)
    with pytest.raises(BackendError, match="sliding_window=3, but its mask was declared as Causal"):
        layer_call(causal, sliding_window=3)
    with pytest.raises(BackendError, match="4 queries and 4 keys were declared, but the layer has 4 and 7"):
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
        with pytest.raises(BackendError, match="to its attention mask, and there is no mask to read"):
            read()


def test_without_transformers_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['transformers'] = None; import headway.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'pip install "headway[transformers]"' in done.stderr.splitlines()[-1]


# Without large pages, which the system gives or not, and which round what is asked for up by megabytes.
MEMORY = """
import ctypes, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
import torch, headway.integrations.transformers
from headway.hardware import peak_rss
from transformers import MistralConfig, MistralForCausalLM
config = MistralConfig(vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, sliding_window=512, attn_implementation=sys.argv[1])
model = MistralForCausalLM(config)
ids = torch.randint(0, 64, (1, 8192))
model(ids[:, :600], labels=ids[:, :600]).loss.backward()
before = peak_rss()
model(ids, labels=ids).loss.backward()
print((peak_rss() - before) / 2**20)
"""


@pytest.mark.slow
def test_a_long_row_takes_a_fraction_of_the_memory() -> None:
    """1 x 8192 with a window of 512, forward and backward: MiB above what is held before."""
    taken = {}
    for implementation in ("headway", "sdpa"):
        command = [sys.executable, "-c", MEMORY, implementation]
        taken[implementation] = float(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )
    print(taken)
    assert taken["headway"] < taken["sdpa"] / 3
