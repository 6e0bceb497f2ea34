"""Encoders against transformers: one test per family and configuration, with random weights of standard deviation 0.3
(at 0.02 wrong positions hide)."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from headway.checkpoints import load_folder, save_folder
from headway.checkpoints.hf.config import config_from_spec
from headway.checkpoints.hf.layouts import LAYOUTS
from headway.checkpoints.hf.layouts.tensors import exported
from headway.checkpoints.restore import build_model
from headway.models import Encoder, Head, catalog, cost
from headway.positions import Learned, Rotary
from headway.tokens import Tokens
from tests.checkpoints.encoders import (
    CLASSES,
    LENGTHS,
    NAMES,
    Case,
    from_them,
    inputs,
    output,
    peer,
    run,
    seen,
)
from tests.checkpoints.hf import off
from tests.checkpoints.shares import share

FIRST = ("bert", "roberta", "roformer")
KIN = [Case(family, "classify") for family in CLASSES if family not in (*FIRST, "modernbert")]
BIASES = dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True)
CASES = [Case(family, task) for family in FIRST for task in NAMES] + [
    Case("bert", "masked-lm", {"tie_word_embeddings": False}),
    Case("bert", "masked-lm", {"hidden_act": "gelu_new", "num_attention_heads": 12}),
    Case("bert", "classify", {"hidden_act": "relu", "num_attention_heads": 1, "type_vocab_size": 1}),
    Case("bert", "tag", {"layer_norm_eps": 1e-2, "type_vocab_size": 3}),
    Case("roberta", "masked-lm", {"tie_word_embeddings": False, "hidden_act": "relu"}),
    Case("roberta", "masked-lm", {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "num_attention_heads": 3}),
    Case("roberta", "tag", {"pad_token_id": 0}),
    Case("roberta", "classify", {"pad_token_id": 4, "hidden_act": "gelu_new"}),
    Case("roformer", "masked-lm", {"embedding_size": 32, "tie_word_embeddings": False}),
    Case("roformer", "masked-lm", {"embedding_size": 32, "rotary_value": True, "hidden_act": "relu"}),
    Case("roformer", "classify", {"embedding_size": 64, "hidden_act": "relu", "num_attention_heads": 2}),
    Case("roformer", "answer", {"rotary_value": True, "hidden_act": "gelu_new"}),
    Case("roformer", "states", {"embedding_size": 32, "num_attention_heads": 12}),
    *(Case(family, "masked-lm") for family in CLASSES if family not in FIRST),
    *KIN,
    Case("xlm-roberta", "tag", {"pad_token_id": 0}),
    Case("electra", "masked-lm", {"embedding_size": 32, "tie_word_embeddings": False, "hidden_act": "relu"}),
    Case("electra", "states", {"embedding_size": 32}),
    Case("distilbert", "masked-lm", {"activation": "relu", "tie_word_embeddings": False, "n_heads": 12}),
    Case("distilbert", "answer"),
    Case("megatron-bert", "states", {"num_attention_heads": 3}),
    Case("nomic_bert", "states", {"head_dim": 10, "rope_parameters": {"rope_theta": 500.0}}),
    Case("jina_embeddings_v3", "answer", {"rope_theta": 77.0, "hidden_act": "gelu_new"}),
    Case("eurobert", "masked-lm", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    Case("eurobert", "classify", {"classifier_pooling": "bos", "rms_norm_eps": 1e-2}),
    Case("eurobert", "tag"),
    Case("modernbert", "masked-lm", {**BIASES, "tie_word_embeddings": False}),
    Case("modernbert", "states", {"global_attn_every_n_layers": 2, "global_rope_theta": 500.0}),
]


def states_of(model: Encoder, batch: dict[str, Tensor], tokens: Tokens) -> list[Tensor]:
    """Returns the output of every layer."""
    states: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda m, a, y: states.append(y)) for block in model.model.blocks]
    run(model, batch, tokens)
    for hook in hooks:
        hook.remove()
    return states


@share("case", CASES, 0, 3, KIN)
def test_a_family_equals_transformers(case: Case, tmp_path: Path) -> None:
    theirs = peer(case)
    ours = from_them(theirs, tmp_path / "theirs")
    assert (ours.spec.family, ours.spec.head.task) == (case.family, case.task)
    batch, tokens = inputs(theirs)
    reference = theirs(**batch, output_hidden_states=True)
    expected, actual = seen(output(reference), tokens), seen(run(ours, batch, tokens), tokens)
    assert off(actual, expected) < 1e-5

    for layer, state in enumerate(states_of(ours, batch, tokens), 1):
        normed = (
            ours.model.norm if layer == ours.spec.layers else None
        )  # transformers returns the last states after the last norm
        state = state if normed is None else normed(state)
        assert off(seen(state, tokens), seen(reference.hidden_states[layer], tokens)) < 1e-5

    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    (expected * weights).sum().backward()
    (actual * weights).sum().backward()
    our_grads = exported(LAYOUTS[case.family].tensors, gradients(ours), ours.spec)
    their_grads = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    if case.family in ("jina_embeddings_v3", "nomic_bert"):  # their files have other names
        their_grads = stored_gradients(theirs, tmp_path / "gradients")
    largest = max(float(grad.abs().max()) for grad in their_grads.values())
    aliases = LAYOUTS[case.family].tensors.aliases(ours.spec)
    for name, grad in their_grads.items():
        name = name if name in our_grads else aliases[name]
        # a shift of all keys changes no attention weight: this gradient is 0, up to rounding on both sides
        no_gradient = name.endswith(("key.bias", "k_lin.bias", "k_proj.bias"))
        scale = largest if no_gradient else float(grad.abs().max())
        assert float((our_grads[name] - grad).abs().max()) <= 1e-4 * scale, name
    assert len(their_grads) >= 3 * 8

    # a row alone, without padding
    short = {name: value[1:, : LENGTHS[1]] for name, value in batch.items()}
    exact = copy.deepcopy(ours).double()
    alone, together = run(exact, short, Tokens.range(LENGTHS[1]))[0], run(exact, batch, tokens)[1]
    assert off(together[: LENGTHS[1]] if alone.dim() == 2 else together, alone) < 1e-12

    # transformers loads what we save, and it equals the original
    save_folder(tmp_path / "ours", ours)
    reloaded, info = case.theirs.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    missing = {
        name for name in info["missing_keys"] if "pooler" not in name
    }  # a bare model of ours has no pooler
    assert [missing, info["unexpected_keys"], info["mismatched_keys"]] == [set(), set(), set()]
    before, after = theirs.state_dict(), reloaded.state_dict()
    unread = "cls.predictions.bias", "lm_head.bias"
    for name, value in before.items():
        if "pooler" not in name and not (not ours.spec.tied and name in unread):
            assert torch.equal(after[name], value), name
    with torch.no_grad():
        assert torch.equal(seen(output(reloaded(**batch)), tokens), expected)
    folder = load_folder(tmp_path / "ours")
    assert folder.spec == ours.spec
    assert folder.unused == ()
    assert all(torch.equal(folder.tensors[name], value) for name, value in ours.state_dict().items())


def stored_gradients(model: Any, path: Path) -> dict[str, Tensor]:
    """Returns transformers' gradients under their names in a file, without those of a pooler that nothing reads."""
    grads = copy.deepcopy(model)
    with torch.no_grad():
        for p, source in zip(grads.parameters(), model.parameters(), strict=True):
            p.copy_(torch.zeros_like(p) if source.grad is None else source.grad)
    grads.save_pretrained(path)
    stored = load_file(path / "model.safetensors")
    return {name: grad for name, grad in stored.items() if "pooler" not in name or grad.any()}


def gradients(model: Encoder) -> dict[str, Tensor]:
    grads = {}
    for name, p in model.named_parameters():
        grads[name] = torch.zeros_like(p) if p.grad is None else p.grad
    return {name: grads[name] for name in model.state_dict()}


@share("case", [case for case in CASES if case.task != "classify"], 1, 3)
def test_padding_on_the_left_changes_nothing(case: Case, tmp_path: Path) -> None:
    """headway counts positions by tokens. So does transformers' RoBERTa (ids other than the pad id); BERT and its kin
    are given position ids; RoFormer counts padding, too, which shows only if values are rotated."""
    theirs = peer(case)
    ours = from_them(theirs, tmp_path / "m")
    batch, tokens = inputs(theirs, "left")
    right, right_tokens = inputs(theirs)
    for name in batch.keys() - {"attention_mask"}:  # the same tokens as with padding on the right
        shifted = right[name].clone()
        shifted[1] = right[name][1].roll(LENGTHS[0] - LENGTHS[1])
        batch[name] = shifted
    with torch.no_grad():
        actual = seen(run(ours, batch, tokens), tokens)
        assert off(actual, seen(run(ours, right, right_tokens), right_tokens)) < 1e-5
        if case.changes.get("rotary_value"):
            return
        from_0 = isinstance(ours.spec.positions, Learned) and not ours.spec.positions.offset
        positions = {"position_ids": tokens.index.clamp(min=0)} if from_0 else {}
        assert off(actual, seen(output(theirs(**batch, **positions)), tokens)) < 1e-5


@pytest.mark.parametrize("family", CLASSES)
def test_packed_texts_equal_rows_of_their_own(family: str, tmp_path: Path) -> None:
    ours = from_them(peer(Case(family, "masked-lm")), tmp_path / "m")
    ids = torch.randint(5, 61, (1, 14), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        packed = ours(ids, tokens=Tokens.packed([LENGTHS]))[0]
        rows = torch.cat([ours(part)[0] for part in ids.split(LENGTHS, 1)])
    assert off(packed, rows) < 1e-5


@pytest.mark.parametrize("family", ["bert", "eurobert"])
def test_an_output_layer_of_its_own_is_left_out_for_another_head(family: str, tmp_path: Path) -> None:
    theirs = peer(Case(family, "masked-lm", {"tie_word_embeddings": False}))
    theirs.save_pretrained(tmp_path / "m")
    folder = load_folder(tmp_path / "m", head=Head("embed", pool="mean"))
    output = "lm_head.weight" if family == "eurobert" else "cls.predictions.decoder.weight"
    assert output in folder.unused


def test_the_first_token_is_classified_wherever_it_stands(tmp_path: Path) -> None:
    ours = from_them(peer(Case("roberta", "classify")), tmp_path / "m")
    assert ours.spec.head.labels == ("no", "yes", "perhaps")
    ids = torch.randint(5, 61, (1, 6), generator=torch.Generator().manual_seed(4))
    left = Tokens.from_lengths([6], total=9, side="left")
    padded = torch.cat((torch.ones(1, 3, dtype=torch.long), ids), 1)
    with torch.no_grad():
        assert off(ours(padded, tokens=left), ours(ids)) < 1e-5
        packed = ours(ids, tokens=Tokens.packed([[2, 4]]))
        assert off(packed, torch.cat([ours(part) for part in ids.split([2, 4], 1)])) < 1e-5


def test_a_pad_id_inside_a_text_is_a_token_here(tmp_path: Path) -> None:
    """transformers' RoBERTa gives it the position of padding and does not count it, whatever the attention mask is."""
    theirs = peer(Case("roberta", "states"))
    ours = from_them(theirs, tmp_path / "m")
    ids = torch.tensor([[7, 1, 8, 9]])
    with torch.no_grad():
        uncounted = theirs(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        assert off(ours(ids), uncounted) > 1e-2
        counted = theirs(
            ids, attention_mask=torch.ones_like(ids), position_ids=torch.arange(4)[None] + 2
        ).last_hidden_state
        assert off(ours(ids), counted) < 1e-5


def test_row_84_a_roformer_takes_any_length(tmp_path: Path) -> None:
    theirs = peer(Case("roformer", "masked-lm"))
    ours = from_them(theirs, tmp_path / "m")
    assert ours.spec.trained_context == 20
    assert ours.spec.context_limit is None
    assert not [name for name in ours.state_dict() if "position" in name]
    ids = torch.randint(5, 61, (1, 80), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        theirs.roformer.encoder.embed_positions = type(theirs.roformer.encoder.embed_positions)(80, 12)
        table = theirs.roformer.encoder.embed_positions
        table.weight.copy_(table.create_weight())
        assert off(ours(ids), theirs(ids).logits) < 1e-5
    table = load_file(tmp_path / "m" / "model.safetensors")["roformer.encoder.embed_positions.weight"]
    constant = LAYOUTS["roformer"].tensors.constants(ours.spec)["roformer.encoder.embed_positions.weight"]
    assert float((constant - table).abs().max()) <= torch.finfo(torch.float32).eps


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_pooled_vector_is_the_pooler_s(family: str, tmp_path: Path) -> None:
    theirs = peer(Case(family, "states"))
    theirs.save_pretrained(tmp_path / "m")
    ours = build_model(load_folder(tmp_path / "m", head=Head("embed", dense="tanh")))
    batch, tokens = inputs(theirs)
    assert isinstance(ours, Encoder)
    assert off(run(ours, batch, tokens), theirs(**batch).pooler_output) < 1e-5


def test_row_84_a_roformer_is_a_wobert_with_rotary_positions() -> None:
    wobert, roformer = catalog.spec("wobert-chinese-plus-base"), catalog.spec("roformer-chinese-base")
    assert isinstance(wobert.positions, Learned)
    assert roformer.positions == Rotary(10000.0, pairing="adjacent")
    changes: dict[str, Any] = {"family": "wobert", "positions": wobert.positions, "trained_context": 512}
    changes |= {"pooled_dropout": False}  # concerns only the classifiers that transformers puts on top
    assert replace(roformer, **changes) == wobert


@pytest.mark.parametrize("name", ["bert-base-uncased", "roberta-base", "roformer-chinese-base"])
def test_the_catalog_s_encoders_have_the_parameters_of_theirs(name: str) -> None:
    spec = catalog.spec(name)
    auto: Any = transformers.AutoModelForMaskedLM
    with torch.device("meta"):
        theirs = auto.from_config(transformers.AutoConfig.for_model(**config_from_spec(spec)))
    count = sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    assert count == cost.parameter_count(spec)
    assert isinstance(spec.positions, Learned | Rotary)
