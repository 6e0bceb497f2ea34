"""`attn_implementation="headway"` equals `transformers`' own attention, without building a mask over pairs.

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
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainingArguments,
)

import headway.integrations.transformers  # noqa: F401  (its import registers the name)
from tests.integrations.accelerated import GROUPED, LENGTH, SIZES, VOCAB, random_weights, sunk

WINDOW = 5


def mistral(window: int | None = WINDOW) -> Any:
    return random_weights(MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=window)))


def qwen2() -> Any:
    """Returns a model with one full layer and one with a window."""
    config = Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    assert config.layer_types == ["full_attention", "sliding_attention"]
    return random_weights(Qwen2ForCausalLM(config))


MODELS = {"mistral": mistral, "qwen2": qwen2}


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("family", ["GptOss", "GraniteSWA"])
def test_sinks_are_those_of_eager(family: str, side: str) -> None:
    """Logits and every gradient, also those of the sink logits."""
    model = sunk(family)
    assert_equal(model, some_ids(), "eager", attention_mask=padded(side))
    assert any(name.endswith("sinks") and p.grad.abs().amax() > 1e-4 for name, p in model.named_parameters())


@pytest.mark.parametrize("side", ["none", "right"])
def test_chunks_are_those_of_sdpa(side: str) -> None:
    config = Llama4TextConfig(
        **GROUPED, head_dim=8, attention_chunk_size=WINDOW, num_local_experts=2, intermediate_size_mlp=48
    )
    assert config.layer_types[0] == "chunked_attention"
    assert_equal(random_weights(Llama4ForCausalLM(config)), some_ids(), attention_mask=padded(side))


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


def some_ids(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(2, VOCAB, (rows, length))


def padded(side: str) -> Tensor:
    """Returns a mask with 9 empty slots in the first row, on `side`; "hole" puts them in the middle."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    begin = {"none": LENGTH, "left": 0, "right": LENGTH - 9, "hole": 6}[side]
    mask[0, begin : begin + 9] = 0
    return mask


def run(model: Any, implementation: str, ids: Tensor, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns logits, and the gradient of every parameter for a loss on the tokens that are not padding."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    mask = kwargs.get("attention_mask")
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    out = model(ids, labels=labels, **kwargs)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(model: Any, ids: Tensor, peer: str = "sdpa", **kwargs: Any) -> None:
    logits, gradients = run(model, "headway", ids, **kwargs)
    expected, expected_gradients = run(model, peer, ids, **kwargs)
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
    """The comparisons above would catch a window that is off by one."""
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
    """With padding on the left, text longer than several windows, and each kind of cache."""
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
        change = (stepped[1][name] - before).abs().max()
        assert change > 0
        rounding = 6e-8 * float(before.abs().max())
        atol = 1e-4 * float(change) + rounding
        torch.testing.assert_close(stepped[0][name], stepped[1][name], rtol=0, atol=atol)


def assert_as_eager(model: Any, real: Tensor | None, **inputs: Any) -> None:
    """Checks logits, or the last hidden states, of the tokens that are not padding, to 1e-5 of the largest."""
    outputs = []
    for implementation in ("headway", "eager"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            out = model(**inputs)[0]
        outputs.append(out if real is None else out[real.bool()])
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5 * float(outputs[1].abs().max()))


def test_soft_capped_scores_are_those_of_eager() -> None:
    config = Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    )
    assert_as_eager(random_weights(Gemma2ForCausalLM(config)), None, input_ids=some_ids())


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_an_encoder_sees_both_ways(side: str) -> None:
    mask = padded(side)
    assert_as_eager(
        random_weights(BertModel(BertConfig(**SIZES))), mask, input_ids=some_ids(), attention_mask=mask
    )


def test_dropout_is_applied_at_its_rate_in_training_only() -> None:
    """A first token sees itself alone: of a value of 1 it reads 1, or in training 0 or 1 / (1 - rate) in each head."""
    rate, read = 0.25, []
    config = MistralConfig(**GROUPED, attention_dropout=rate, attn_implementation="headway")
    model, ids = random_weights(MistralForCausalLM(config)), some_ids(200, 2)
    layer = model.model.layers[0].self_attn
    layer.v_proj.register_forward_hook(lambda module, inputs, values: torch.ones_like(values))
    layer.o_proj.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0][:, 0, ::8]))
    model(ids)
    model.train()
    model(ids)
    evaluated, trained = read
    assert torch.equal(evaluated, torch.ones(200, 4))
    kept = trained != 0
    torch.testing.assert_close(trained, kept / (1 - rate))
    dropped = 1 - kept.double().mean()
    assert abs(dropped - rate) < 5 * (rate * (1 - rate) / trained.numel()) ** 0.5


# Without large pages: whether the system grants them varies, and they round allocations up by megabytes.
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
    """Peak MiB of forward and backward of 1 x 8192 tokens with a window of 512, beyond what was held before."""
    peaks = {}
    for implementation in ("headway", "sdpa"):
        command = [sys.executable, "-c", MEMORY, implementation]
        peaks[implementation] = float(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )
    print(peaks)
    assert peaks["headway"] < peaks["sdpa"] / 3
