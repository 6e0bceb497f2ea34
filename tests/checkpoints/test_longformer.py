"""Longformer folders equal transformers for all windows by layer and any global tokens, read and written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from headway.checkpoints import save_folder
from headway.checkpoints.hf.config import config_from_spec, spec_from_config
from headway.checkpoints.hf.layouts import LAYOUTS
from headway.checkpoints.hf.layouts.tensors import exported
from headway.errors import ConfigError
from headway.models import Encoder, ModelSpec, build, cost
from headway.tokens import Tokens
from tests.checkpoints.encoders import from_them
from tests.checkpoints.hf import off
from tests.pairwise import chequered

VOCAB, PAD = 61, 1
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 42,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-5,
    "attention_window": [4, 8],
    "num_labels": 3,
}
CLASSES = {
    "LongformerForMaskedLM": "masked-lm",
    "LongformerForSequenceClassification": "classify",
    "LongformerForTokenClassification": "tag",
    "LongformerForQuestionAnswering": "answer",
    "LongformerModel": "states",
}
GLOBALS: dict[str, list[list[int]]] = {
    "none": [[], []],
    "one for all": [[0], [0]],
    "others in each row": [[0, 9, 10], [6]],
    "none in one row": [[3], []],
    "all": [list(range(19)), list(range(11))],
}


def peer(name: str, **changes: Any) -> Any:
    """Returns a transformers model whose parameters are normal with standard deviation 0.3 (norm gains around 1)."""
    kind = getattr(transformers, name)
    options = {"add_pooling_layer": False} if name == "LongformerModel" else {}
    settings = {**CONFIG, **changes}
    if name == "LongformerForQuestionAnswering":
        settings["num_labels"] = 2
    model = kind(transformers.LongformerConfig(**settings), **options)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in model.named_parameters():
            gain = "norm" in key.lower() and key.endswith("weight")
            p.copy_(torch.randn(p.shape, generator=g) * 0.3 + (1.0 if gain else 0.0))
    return model.eval()


def rows(lengths: list[int], total: int) -> tuple[Tensor, Tokens, Tensor]:
    """Returns ids [B, total] with padding on the right, their tokens, and transformers' mask."""
    ids = torch.randint(2, VOCAB, (len(lengths), total), generator=torch.Generator().manual_seed(1))
    tokens = Tokens.from_lengths(lengths, total)
    mask = tokens.valid.expand(len(lengths), -1).long()
    return torch.where(mask.bool(), ids, PAD), tokens, mask


def theirs(model: Any, ids: Tensor, mask: Tensor, glob: Tensor, types: Tensor) -> Tensor:
    out = model(ids, attention_mask=mask, global_attention_mask=glob, token_type_ids=types)
    if hasattr(out, "start_logits"):
        return torch.stack((out.start_logits, out.end_logits), -1)
    output: Tensor = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return output


def both(
    name: str, path: Path, marked: list[list[int]], lengths: list[int], total: int, **changes: Any
) -> tuple[Encoder, Any, Tensor, Tensor]:
    """Returns our model, transformers' model, and the output of each at the slots that hold tokens."""
    model = peer(name, **changes)
    encoder = from_them(model, path)
    ids, tokens, mask = rows(lengths, total)
    tokens = tokens.with_global(marked)
    types = torch.arange(total).expand_as(ids) // 5 % 2 * mask
    expected = theirs(model, ids, mask, tokens.globals.expand_as(ids).long(), types)
    actual = encoder(ids, tokens=tokens, types=types)
    valid = mask.bool() if expected.dim() == 3 else slice(None)
    return encoder, model, actual[valid], expected[valid]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("marked", GLOBALS.values(), ids=GLOBALS.keys())
def test_logits_and_gradients_are_those_of_transformers(
    name: str, marked: list[list[int]], tmp_path: Path
) -> None:
    encoder, model, actual, expected = both(name, tmp_path, marked, [19, 11], 19)
    assert encoder.spec.head.task == CLASSES[name]
    assert off(actual, expected) < 1e-5
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    (actual * weights).sum().backward()
    (expected * weights).sum().backward()
    grads = {key: p.grad for key, p in encoder.named_parameters()}
    state = {
        key: torch.zeros_like(p) if (g := grads[key]) is None else g for key, p in encoder.named_parameters()
    }
    our_grads = exported(LAYOUTS["longformer"].tensors, state, encoder.spec)
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for key, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        assert float((our_grads[key] - grad).abs().max()) < 1e-4 * largest, key


@torch.no_grad()
@chequered("windows,total", [4, 6, 40, [4, 8], [40, 4], [12, 6]], [1, 12, 13, 24, 37])
def test_any_window_by_layer_at_lengths_that_are_and_are_not_its_multiples(
    windows: int | list[int], total: int, tmp_path: Path
) -> None:
    short = max(1, total - 5)
    marked = [[0, total - 1], [short // 2]]
    _, _, actual, expected = both(
        "LongformerModel", tmp_path, marked, [total, short], total, attention_window=windows
    )
    assert off(actual, expected) < 1e-5


@pytest.mark.parametrize("windows", [2, [4, 6]], ids=str)
def test_windows_that_transformers_reads_and_cannot_run(windows: int | list[int], tmp_path: Path) -> None:
    """Its chunks have max(attention_window) tokens, which each layer's window must divide, and at least 4."""
    model = peer("LongformerModel", attention_window=windows)
    ids, _, mask = rows([18, 7], 18)
    with pytest.raises((RuntimeError, AssertionError), match=r"expanded size of the tensor|multiple of 4"):
        model(ids, attention_mask=mask)
    encoder = from_them(model, tmp_path)
    dense = build(encoder.spec, backend="dense").eval()
    dense.load_state_dict(encoder.state_dict())
    with torch.no_grad():
        assert off(encoder(ids), dense(ids)) < 1e-5
        if windows == [4, 6]:  # if 4 happens to divide the padded length
            short = ids[:1, :12]
            assert off(encoder(short), model(short, attention_mask=short * 0 + 1).last_hidden_state) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", CLASSES)
def test_what_is_written_transformers_reads(name: str, tmp_path: Path) -> None:
    encoder, model, actual, _ = both(name, tmp_path / "a", GLOBALS["others in each row"], [19, 11], 19)
    save_folder(tmp_path / "b", encoder)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["architectures"] == [name]
    assert config["attention_window"] == [4, 8]
    kind = getattr(transformers, name)
    options = {"add_pooling_layer": False} if name == "LongformerModel" else {}
    reloaded, info = kind.from_pretrained(tmp_path / "b", output_loading_info=True, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for key, value in model.state_dict().items():
        assert torch.equal(reloaded.state_dict()[key], value), key
    ids, tokens, mask = rows([19, 11], 19)
    tokens = tokens.with_global(GLOBALS["others in each row"])
    types = torch.arange(19).expand_as(ids) // 5 % 2 * mask
    expected = theirs(reloaded.eval(), ids, mask, tokens.globals.long(), types)
    assert off(actual, expected[mask.bool() if expected.dim() == 3 else slice(None)]) < 1e-5


def config(**changes: Any) -> dict[str, Any]:
    return {"model_type": "longformer", **CONFIG, **changes}


def test_published_keys_and_what_they_mean() -> None:
    published = {
        "model_type": "longformer", "attention_mode": "longformer", "attention_probs_dropout_prob": 0.1,
        "attention_window": [512] * 12, "bos_token_id": 0, "eos_token_id": 2, "gradient_checkpointing": False,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "ignore_attention_mask": False,
        "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 4098, "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
        "sep_token_id": 2, "type_vocab_size": 1, "vocab_size": 50265,
    }  # fmt: skip
    spec = spec_from_config(published)
    usual = ModelSpec.of("longformer", vocab=50265, width=768, layers=12, heads=12, hidden=3072)
    assert spec == usual
    assert (
        cost.parameter_count(spec) == 148_711_257
    )  # the released base model: RoBERTa's, 3584 positions, projections


@pytest.mark.parametrize("windows", [512, [2, 4]])
def test_the_config_is_read_back_as_it_was_written(windows: Any) -> None:
    spec = spec_from_config(config(attention_window=windows))
    written = config_from_spec(spec)
    assert written["attention_window"] == windows
    assert spec_from_config(written) == spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_window": 5}, "attention_window must be even"),
        ({"attention_window": 0}, "attention_window must be a whole number of at least 1"),
        ({"attention_window": [4]}, "lists 1 layers, but num_hidden_layers is 2"),
        ({"attention_window": [4, None]}, "attention_window must be a number in every layer"),
        ({"attention_window": None}, "attention_window must be a number in every layer"),
        ({"pad_token_id": None}, "positions of a longformer begin after this row"),
        ({"pad_token_id": 41}, "must be in 0..40, .*; got 41"),
        ({"attention_mode": "sliding_chunks_no_overlap"}, "accepted is 'longformer'"),
        ({"attention_windows": 4}, "attention_window"),
        ({"architectures": ["LongformerForMultipleChoice"]}, "is not one of model_type 'longformer'"),
    ],
    ids=str,
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_from_config(config(**changes))
