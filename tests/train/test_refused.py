"""Settings that no run can have are refused before it begins, for each task, with a message that names the cause."""

import re
from pathlib import Path
from typing import Any

import pytest

from headway.errors import HeadwayError
from headway.train import train
from tests.train.runs import HOME_MADE, RUNS, Make

pytestmark = pytest.mark.filterwarnings("ignore:train_words")  # the corpora have few words
HELD: dict[str, Any] = {"validation_share": 0.2, "eval_every": 1}
LAYERS: dict[str, Any] = {"patterns": None}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("causal-lm", {"patterns": "Windw.last(8)"}, "patterns: "),
    ("causal-lm", {"patterns": "Full()"}, "lets a token see later ones"),
    ("causal-lm", {"patterns": "Causal(); Causal(); Causal()"}, "3 patterns do not fit 2 layers"),
    (
        "causal-lm",
        {**LAYERS, "mixers": "detla; attention"},
        "there is no mixer 'detla' (did you mean \"delta\"?)",
    ),
    ("causal-lm", {**LAYERS, "mixers": "delta; attention; delta"}, "3 mixers do not fit 2 layers"),
    ("causal-lm", {"width": 18, "heads": 4}, "width 18 cannot be split into 4 heads"),
    ("causal-lm", {"kv_heads": 3}, "2 query heads cannot share 3 key/value heads evenly"),
    ("causal-lm", {**HOME_MADE, "model": "llama-2-7"}, 'a name of the catalog (did you mean "llama-2-7b"?)'),
    ("causal-lm", {"backend": "cuda"}, "unknown backend"),
    ("causal-lm", {"sample_prompts": ["one " * 40]}, "do not fit context 24"),
    ("causal-lm", {"eval_contexts": (12,)}, "eval_contexts needs held-out data; give validation"),
    ("causal-lm", {"keep_best": True, "validation_share": 0.1}, "during training; give eval_every"),
    ("causal-lm", {"keep_best": True, "eval_every": 2}, "need held-out data; give validation or"),
    ("causal-lm", {**HELD, "best_by": "accuracy"}, "best_by needs keep_best or early_stopping_patience"),
    (
        "causal-lm",
        {**HELD, "keep_best": True, "average": 2, "save_every": 1},
        "average 2 and keep_best both choose the final model",
    ),
    ("causal-lm", {"load_best_model_at_end": True}, 'here it is "keep_best"'),
    ("causal-lm", {"metric_for_best_model": "loss"}, 'here it is "best_by"'),
    (
        "causal-lm",
        {"average": 3, "save_every": 1, "keep_last": 2},
        "average 3 needs save_every, and keep_last of 3 or more",
    ),
    ("causal-lm", {"average": 2, "save_every": None}, "average 2 needs save_every"),
    (
        "causal-lm",
        {"checkpoints": "folder", "save_in_background": True},
        "checkpoints=folder cannot be saved in the background",
    ),
    (
        "masked-lm",
        {"task": "causal-lm"},
        "bert is an encoder, trained on masked tokens, not a decoder (llama, qwen3, gpt2, ...)",
    ),
    (
        "masked-lm",
        {"family": "llama", "task": "masked-lm"},
        "llama is a decoder, trained on next tokens, not an encoder (bert, roformer, longformer, ",
    ),
    (
        "masked-lm",
        {"family": "llama", "mask_share": 0.2, "pack": True},
        "mask_share, pack: only for masked-lm, but llama",
    ),
    ("masked-lm", {"mixers": "elu+1", "patterns": "Full()"}, "patterns cannot be combined with mixers"),
    ("masked-lm", {"mixers": "elu+2"}, "mixers: there is no mixer 'elu+2'"),
    (
        "masked-lm",
        {"units": "words", "tokenizer": "t", "vocab": None},
        "units says which tokenizer is to be trained",
    ),
    ("masked-lm", {"family": "nezha", "mixers": "elu+1"}, "so RelativeKey cannot be applied"),
    ("masked-lm", {"sample_prompts": ["one two"]}, "must contain the mask token ([MASK]) and fit context 24"),
    ("masked-lm", {"family": "bret"}, 'did you mean "bert"?'),
    ("masked-lm", {"mask_share": 1.0}, "mask_share = 1.0: input should be less than 1"),
    ("masked-lm", {"units": "characters", "vocab": 260}, "5 special tokens and 256 bytes need 261"),
    ("adapter", {"adapter": None}, "rank: only for an adapter; add adapter=lora"),
    ("adapter", {"model": None}, "adapter needs the model that it adapts; give its folder"),
    ("adapter", {"adapter_targets": ["q"]}, "no linear layer 'q'"),
    (
        "adapter",
        {"model": "qwen2-0.5b"},
        "adapter=lora needs the folder of a model, and model=qwen2-0.5b is not",
    ),
    ("adapter", {"lora_alpha": 3}, 'unknown setting "lora_alpha" (here it is "alpha"'),
    ("adapter", {"average": 2, "save_every": 1}, "average 2 cannot be combined with adapter"),
    (
        "chat",
        {"template": None},
        "chats.jsonl holds conversations, but the model has no chat template; give one",
    ),
    ("chat", {"template": "vicunna"}, 'neither a built-in chat template (did you mean "vicuna"?)'),
    (
        "chat",
        {"stop": ("<|emd|>",)},
        "stop '<|emd|>' is not a control token of the tokenizer (did you mean \"<|end|>\"",
    ),
    ("chat", {"family": "roformer"}, "roformer is an encoder, trained on masked tokens, not a decoder"),
    (
        "chat",
        {"too_long": "error", "context": 8, "batch_tokens": 48},
        "tokens, but a row of context 8 holds at most 9",
    ),
    (
        "classify",
        {"family": "llama"},
        "task classify: llama is a decoder, trained on next tokens, not an encoder",
    ),
    (
        "embed",
        {"micro_batch": 4},
        "infonce compares all texts of a step, which is one forward pass; leave micro_batch",
    ),
    ("translation", {"heads": 3}, "width 32 is not a multiple of 3 heads"),
    ("translation", {"batch_tokens": 16}, "batch_tokens 16 holds no sentence of context 32"),
    (
        "translation",
        {"validation_source": None, "validation_target": None, "eval_every": 5},
        "eval_every needs validation_source",
    ),
    ("translation", {"validation_target": None}, "belong together"),
    ("translation", {"label_smoothing": 1.0}, "label_smoothing = 1.0"),
]


@pytest.mark.parametrize(("run", "changes", "said"), REFUSED)
def test_what_no_run_can_have_is_named(
    run: str, changes: dict[str, Any], said: str, settings: Make, tmp_path: Path
) -> None:
    with pytest.raises((HeadwayError, ValueError), match=re.escape(said)):
        train(RUNS[run](settings, tmp_path, **changes), quiet=True)
    assert not (tmp_path / "run").exists()
