"""`attn_implementation="headway"` on all model types of the installed `transformers` that read tokens: the logits are
those of "eager", or the model is refused by name. Each is a small model, made by rule (`small`).

Tolerance: 3 times the error of "eager" in float32, measured against float64 on text without padding: eager's own error,
and twice as much for ours.
"""

import copy
import re
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.auto import modeling_auto

from headway.errors import BackendError
from headway.integrations.transformers import interface
from headway.integrations.transformers.steps import CACHE
from tests.integrations.small import small_model

LENGTH, SECONDS = 23, 60
TASKS: Mapping[str, Mapping[str, Any]] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "pairs": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "encoders": modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
}
ALL = [
    (task, kind, name)
    for task, kinds in TASKS.items()
    for kind, named in kinds.items()
    for name in ([named] if isinstance(named, str) else named)
]
KEEPS, NONE = "has its own attention code", "has no attention layer that uses attn_implementation"
REFUSED: Mapping[str, str] = {
    KEEPS: "big_bird bloom codegen convbert cpmant deberta deberta-v2 falcon flaubert fsmt funnel got_ocr2 gpt_neo "
    "gpt_neox_japanese gptj granite_speech granite_speech_plus ibert led longformer luke megatron-bert mpnet mpt mra "
    "mvp nystromformer openai-gpt perceiver prophetnet reformer rembert roformer rwkv squeezebert tapas trocr xglm xlm "
    "xlnet yoso",
    NONE: "falcon_mamba fnet mamba mamba2 xlstm",
    "the model applies `__getitem__` to its attention mask": "axk2 deepseek_v32 dots3_note_text glm_moe_dsa hy_v4 "
    "qwen4_exp qwen4_exp_text",
    "the model applies `cat` to its attention mask": "deepseek_v4",
    "the model applies `where` to its attention mask": "doge",
    "the model applies `add` to its attention mask": "git pairs:bigbird_pegasus",
    "the model passes position_bias": "inkling2_text inkling_text longt5 mt5 umt5 switch_transformers t5",
    "the model's mask is made by `or_masks`": "gemma4_unified",
    "sliding_window_mask_function.<locals>.inner_mask`, for which there is no pattern": "t5gemma2",
    "is not supported; give the 2-dimensional": "layoutlm",
}
"""Text of the error -> the model types refused with it."""
LEFT = "chunked attention with padding on the left is not supported; pad on the right"
CHUNKS = "llama4 llama4_text"
"""Model types that refuse padding on the left with this error."""
UNCACHED = "recurrent_gemma encoder-decoder switch_transformers"
"""Model types whose cache `steps` cannot use."""
UNMADE: Mapping[str, str] = {
    "'BltConfig' object has no attribute 'num_hidden_layers'": "blt",
    "'DbrxAttentionConfig' object has no attribute 'rope_theta'": "dbrx",  # raised for its own default config
    "`per_layer_config` keys must be integer layer indices": "dots3_note",
    "requires the timm library": "gemma3n",
    "hidden_size_per_layer_input must be 0": "gemma4_assistant",
    "layer types producing a cache is different": "gemma4_unified_assistant",
    "`blank_token_id` (23862) must be a class below": "nemo_speechlm",
    "it has 686,500,448 parameters": "vibevoice_asr",
    "exactly one of input_features or encoder_inputs_embeds": "voxtral_realtime",
    "T5GemmaEncoderModel only supports encoder-only model": "encoders:t5gemma",
}
"""Error of `transformers` -> the model types without a small model, or without one that reads only tokens."""


def cases(task: str, model: Any) -> dict[str, dict[str, Tensor]]:
    """Returns inputs without padding, and with padding on either side of one row."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 50, (2, LENGTH), generator=draw)
    decoder_inputs = {}
    if task == "pairs" and model.config.is_encoder_decoder:
        decoder_inputs["decoder_input_ids"] = torch.randint(3, 50, (2, 17), generator=draw)
    masks = torch.ones(3, 2, LENGTH, dtype=torch.long)
    masks[1, 0, :9] = masks[2, 0, -9:] = 0
    named = zip(("none", "left", "right"), masks, strict=True)
    return {side: {"input_ids": ids, "attention_mask": mask, **decoder_inputs} for side, mask in named}


@torch.no_grad()
def logits(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Returns logits of tokens that are not padding; the last hidden states if a class has no logits."""
    out = model(**inputs)
    states = next(out[key] for key in ("logits", "prediction_logits", "last_hidden_state") if key in out)
    mask = inputs["attention_mask"].bool()
    return states if "decoder_input_ids" in inputs or states.shape[1] != LENGTH else states[mask]


@torch.no_grad()
def steps(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Returns logits of a sequence that is read with a cache, in three pieces."""
    (name, ids), *others = [(key, t) for key, t in inputs.items() if key.endswith("input_ids")][::-1]
    fixed, past, logits_of_pieces, begin = dict(others), None, [], 0
    for count in (12, 1, 2):
        mask = inputs["attention_mask"] if others else inputs["attention_mask"][:, : begin + count]
        piece = {name: ids[:, begin : begin + count], "attention_mask": mask, CACHE: past}
        out = model(**fixed, **piece, use_cache=True)
        past = getattr(out, CACHE)
        logits_of_pieces.append(out.logits)
        begin += count
    return torch.cat(logits_of_pieces, 1)[0 if others else 1 :]


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the block after `seconds` seconds."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"not done in {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def reason(table: Mapping[str, str], task: str, kind: str) -> str | None:
    """Returns the table's reason for a model type, listed as "type" or "task:type"; None if it is not listed."""
    return next((why for why, kinds in table.items() if {kind, f"{task}:{kind}"} & {*kinds.split()}), None)


def made(task: str, kind: str, name: str) -> tuple[Any, dict[str, dict[str, Tensor]]]:
    """Returns a model and its inputs."""
    model = small_model(kind, name, **({"is_decoder": True} if task == "causal" else {}))
    return model, cases(task, model)


def wanted_of(model: Any, texts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the logits for all inputs."""
    return {side: logits(model, inputs) for side, inputs in texts.items()}


def with_ours(model: Any, inputs: Mapping[str, Tensor]) -> tuple[Any, Tensor]:
    """Returns a copy of a model with our attention, and its logits."""
    ours = copy.deepcopy(model)
    ours.set_attn_implementation("headway")
    return ours, logits(ours, inputs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("task", "kind", "name"), ALL)
def test_logits_are_those_of_eager_or_it_is_refused(
    task: str, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, unmade = reason(REFUSED, task, kind), reason(UNMADE, task, kind)
    with within(SECONDS):
        if unmade is not None:
            with pytest.raises(Exception, match=re.escape(unmade)):
                wanted_of(*made(task, kind, name))
            return
        model, texts = made(task, kind, name)
        if refused is not None:
            with pytest.raises(BackendError, match=re.escape(refused)):
                with_ours(model, texts["none"])
            return
        expected = wanted_of(model, texts)
        calls, attend = Counter[str](), interface.attend

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            calls[name] += 1
            return attend(*args, **kwargs)

        monkeypatch.setattr(interface, "attend", counted)
        ours, unpadded = with_ours(model, texts["none"])
        actual = {"none": unpadded}
        assert calls
        for side in ("left", "right"):
            if side == "left" and kind in CHUNKS.split():
                with pytest.raises(BackendError, match=LEFT):
                    logits(ours, texts[side])
            else:
                actual[side] = logits(ours, texts[side])
        if task in ("causal", "pairs") and kind not in UNCACHED.split():
            inputs = texts["right" if kind in CHUNKS.split() else "left"]
            expected["steps"], actual["steps"] = steps(model, inputs), steps(ours, inputs)
        exact = copy.deepcopy(model).double()
        exact.set_experts_implementation("eager")
        error = (expected["none"].double() - logits(exact, texts["none"])).abs().max()
        allowed = 3 * error / expected["none"].abs().max()
        assert allowed < 1e-3
        for side, result in actual.items():
            difference = (result - expected[side]).abs().max() / expected[side].abs().max()
            assert difference <= allowed, f"{side}: {difference:.2g}, and {allowed:.2g} allowed"


def test_every_type_is_in_one_table() -> None:
    """Every listed type exists and is listed once; types listed as having no attention have none in their code."""
    for kind in REFUSED[NONE].split():
        name = kind.replace("-", "_")
        assert not hasattr(
            import_module(f"transformers.models.{name}.modeling_{name}"), "ALL_ATTENTION_FUNCTIONS"
        )
    kinds = {kind for _, kind, _ in ALL} | {f"{task}:{kind}" for task, kind, _ in ALL}
    named = [kind for table in (REFUSED, UNMADE) for types in table.values() for kind in types.split()]
    assert {*named} <= kinds
    assert len(named) == len({*named})
