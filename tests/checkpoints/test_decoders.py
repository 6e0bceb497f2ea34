"""Decoders that are not Llama-like equal transformers, when we load its folders and when it loads ours."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from headway.checkpoints import spec_from_config
from headway.checkpoints.folder import load_folder
from headway.checkpoints.formats.sentence_transformers import write_sentence_config
from headway.checkpoints.hf.layouts import LAYOUTS
from headway.checkpoints.hf.layouts.rules import Rule, same
from headway.checkpoints.hf.layouts.tensors import exported
from headway.checkpoints.restore import build_model, load_model
from headway.checkpoints.saving import save_folder
from headway.classic import MultiQueryAttention
from headway.errors import ConfigError
from headway.models import Head, ModelSpec
from headway.nn import Attention
from headway.tokens import Tokens
from tests.checkpoints import expert_rows
from tests.checkpoints.decoders import CASES, IDS, MAIN, NORMED, kernel, theirs
from tests.checkpoints.edits import set_keys
from tests.checkpoints.hf import off
from tests.checkpoints.refused_rows import REFUSED
from tests.checkpoints.shares import share

QUERIES = {"k_proj": "q_proj.bias", "Wk": "Wq.bias", "key": "query.bias"}


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """Returns transformers' model, ours as loaded from the folder that it was saved to, and that folder."""
    model = theirs(request.param)
    path = tmp_path_factory.mktemp("theirs")
    model.save_pretrained(path)
    return model, load_model(path), path


@share("pair", CASES, 0, 5, MAIN)
def test_row_39_logits_are_theirs(pair: tuple[Any, Any, Path]) -> None:
    model, ours, _ = pair
    with torch.no_grad():
        assert off(ours(IDS), model(IDS).logits) < 1e-5


@share("pair", CASES, 1, 5)
def test_gradients_are_theirs(pair: tuple[Any, Any, Path]) -> None:
    """The gradient of a key's bias, 0 without rotary positions, is measured against that of the query's bias."""
    model, ours, _ = pair
    weight = torch.randn(2, 19, 61, generator=torch.Generator().manual_seed(2))
    for module, logits in ((model, model(IDS).logits), (ours, ours(IDS))):
        module.zero_grad()
        (logits * weight).sum().backward()
    state = {**ours.state_dict(), **{key: p.grad for key, p in ours.named_parameters()}}
    names = LAYOUTS[ours.spec.family].tensors
    actual = exported(names, state, ours.spec)
    actual = {key: value for key, value in actual.items() if key not in names.constants(ours.spec)}
    stored = {"lm_head.weight": "embed_out.weight"} if ours.spec.family == "gpt_neox" else {}
    grads = {stored.get(key, key): p.grad for key, p in model.named_parameters() if p.grad is not None}
    aliases = names.aliases(ours.spec)
    expected = revert_weight_conversion(model, grads)
    expected = {key if key in actual else aliases[key]: grad for key, grad in expected.items()}
    untrained = ("e_score_correction_bias", "expert_bias", "layer_scalar")
    assert {key for key in actual if not key.endswith(untrained)} == expected.keys()
    for key, grad in expected.items():
        query = re.sub(r"\b(k_proj|Wk|key)\.bias", lambda m: QUERIES[m[1]], key)
        largest = expected[query].abs().max()
        assert (actual[key] - grad).abs().max() <= 1e-4 * largest, key  # 0 for an expert that no token chose


@share("pair", CASES, 2, 5)
@torch.no_grad()
def test_losses_are_theirs(pair: tuple[Any, Any, Path]) -> None:
    """Losses never hold all logits, and may be packed: both rows are then documents of one row."""
    model, ours, _ = pair
    log_p = model(IDS).logits.double().log_softmax(-1)
    targets = torch.randint(61, IDS.shape, generator=torch.Generator().manual_seed(3))
    expected = -log_p.gather(-1, targets[..., None])[..., 0]
    assert off(ours(IDS, targets=targets).each, expected) < 1e-5
    packed = Tokens.packed([[19, 19]])
    assert (
        off(ours(IDS.view(1, -1), tokens=packed, targets=targets.view(1, -1)).each.view(2, 19), expected)
        < 1e-5
    )


@share("pair", CASES, 3, 5)
def test_padded_is_unpadded_and_cached_is_uncached(pair: tuple[Any, Any, Path]) -> None:
    model, ours, _ = pair
    with torch.no_grad():
        full = ours(IDS)
        for side in ("left", "right"):
            tokens = Tokens.from_lengths([19, 12], side=side)
            valid = tokens.valid[1]
            ids = IDS.clone()
            ids[1] = 60
            ids[1, valid] = IDS[1, :12]
            assert off(ours(ids, tokens=tokens)[1, valid], full[1, :12]) < 1e-5
        cache = ours.make_cache(2)
        steps = [ours(IDS[:, :7], cache=cache), *(ours(IDS[:, i : i + 1], cache=cache) for i in range(7, 19))]
        cached = torch.cat(steps, 1)
        if (
            off(cached, full) >= 1e-5
        ):  # float64 decides: at most twice as far from it as our full forward pass or transformers'
            exact = copy.deepcopy(ours).double()(IDS)
            assert off(cached, exact) <= 2 * max(off(full, exact), off(model(IDS).logits, exact))


@share("pair", CASES, 4, 5)
def test_we_save_and_they_load(pair: tuple[Any, Any, Path], tmp_path: Path) -> None:
    model, ours, path = pair
    save_folder(
        tmp_path / "ours", ours, generation={"pad_token_id": getattr(model.config, "pad_token_id", None)}
    )
    reloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation=kernel(model.config)
    ).eval()
    assert type(reloaded) is type(model)
    for key, value in model.state_dict().items():
        assert torch.equal(reloaded.state_dict()[key], value), key
    with torch.no_grad():  # weights are equal, but the bits of products depend on the alignment of memory
        assert off(reloaded(IDS).logits, model(IDS).logits) < 1e-5
    loaded = load_folder(tmp_path / "ours")
    assert loaded.spec == load_folder(path).spec == ours.spec


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@torch.no_grad()
def test_a_decoder_embeds_by_its_last_token(family: str, tmp_path: Path) -> None:
    """Qwen3-Embedding and e5-mistral are stored so: a bare decoder with the config files of sentence-transformers."""
    config = AutoConfig.for_model(family, **NORMED)
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path / "theirs")
    head = {
        "architectures": [f"{type(model).__name__.removesuffix('Model')}ForCausalLM"],
        "tie_word_embeddings": True,
    }
    set_keys(tmp_path / "theirs", **head)
    spec = ModelSpec.of(family, vocab=61, width=48, layers=2, heads=6, hidden=80)
    write_sentence_config(tmp_path / "theirs", spec.with_head(Head("embed", pool="last", unit=True)))
    ours = build_model(load_folder(tmp_path / "theirs"))
    assert (ours.spec.kind, ours.spec.head) == ("encoder", Head("embed", pool="last", unit=True))
    states = model(IDS).last_hidden_state
    expected = torch.nn.functional.normalize(torch.stack((states[0, 18], states[1, 11])), dim=-1)
    assert off(ours(IDS, tokens=Tokens.from_lengths([19, 12])), expected) < 1e-5
    packed = torch.cat((IDS[:1], IDS[1:, :12]), 1)
    assert off(ours(packed, tokens=Tokens.packed([[19, 12]])), expected) < 1e-5
    save_folder(tmp_path / "ours", ours)
    reloaded = AutoModel.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert type(reloaded) is type(model)
    assert torch.equal(reloaded(IDS).last_hidden_state, states)
    assert load_folder(tmp_path / "ours").spec == ours.spec


def test_gpt2_s_first_files_load(tmp_path: Path) -> None:
    """The files of 2019 have no prefix and no output layer, but contain the causal masks, which were buffers."""
    model = theirs("gpt2")
    model.save_pretrained(tmp_path)
    state = {key: value.contiguous() for key, value in model.transformer.state_dict().items()}
    for i in range(3):
        state[f"h.{i}.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
        state[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_ctx": 32}))
    with torch.no_grad():
        assert off(load_model(tmp_path)(IDS), model(IDS).logits) < 1e-5


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gpt2", {"resid_pdrop": 0.2}, "resid_pdrop 0.2, embd_pdrop 0.1: these must be equal"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"n_ctx": 64}, "n_ctx is 64, but the table of positions has n_positions 32"),
        ("gpt2", {"activation_function": "quick_gelu"}, "there is no activation 'quick_gelu'"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"n_heads": 6}, 'unknown key "n_heads" \\(did you mean "n_head"'),
        (
            "gpt_bigcode",
            {"num_key_value_heads": 2},
            "num_key_value_heads is 2, but multi_query True means 1",
        ),
        ("falcon", {"alibi": True}, '"alibi" is True, which is unsupported'),
        ("falcon", {"hidden_dropout": 0.1}, "hidden_dropout"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "transformers fails on these"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "transformers fails on these"),
        ("falcon", {"multi_query": False, "num_kv_heads": 2}, "needs new_decoder_architecture: true"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm"),
        ("bloom", {"hidden_dropout": 0.1}, "hidden_dropout"),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_config.attn_type"),
        ("mpt", {"attn_config": {"qk_lm": True}}, 'unknown key "attn_config.qk_lm" \\(did you mean "qk_ln"'),
        ("starcoder2", {"norm_type": "rms"}, "norm_type"),
        ("starcoder2", {"embedding_dropout": 0.1}, "residual_dropout 0.0, embedding_dropout 0.1"),
        ("starcoder2", {"sliding_window": 0}, "sliding_window must be a whole number of at least 1"),
        *REFUSED,
        *expert_rows.REFUSED,
    ],
    ids=str,
)
def test_what_would_be_ignored_is_refused(family: str, change: dict[str, Any], message: str) -> None:
    base = next(dict(settings) for kind, settings in CASES.values() if kind == family)
    assert spec_from_config({"model_type": family, **base}).family == family
    with pytest.raises(ConfigError, match=message):
        spec_from_config({"model_type": family, **base, **change})


def test_row_10_the_fused_projection_of_llm_foundry_is_put_into_ours() -> None:
    """Wqkv, d_model -> d_model + 2 head_dim, is split [d_model, head_dim, head_dim] by one rule, in both directions."""
    torch.manual_seed(0)
    foundry = MultiQueryAttention(768, 8).double()
    ours = Attention(768, 8, 1, qkv_bias=True, out_bias=True).double()
    parts = ("weight", "bias")
    rows = 768, 96, 96
    rules = [Rule(tuple(f"{n}_proj.{leaf}" for n in "qkv"), f"Wqkv.{leaf}", rows) for leaf in parts]
    rules += [same(f"o_proj.{leaf}", f"out_proj.{leaf}") for leaf in parts]
    state = foundry.state_dict()
    assert state["Wqkv.weight"].shape == (960, 768)
    ours.load_state_dict({n: t for r in rules for n, t in zip(r.ours, r.split(state[r.theirs]), strict=True)})
    x = torch.randn(1, 64, 768, dtype=torch.float64)
    with torch.no_grad():
        assert off(ours(x), foundry(x)[0]) < 1e-12
    joined = {r.theirs: r.join([ours.state_dict()[n] for n in r.ours]) for r in rules}
    assert all(torch.equal(joined[key], value) for key, value in state.items())
