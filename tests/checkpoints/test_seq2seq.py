"""Encoder-decoders equal transformers, both ways: Marian, BART, mBART, T5.

Weights have standard deviation 0.3: at 0.02 attention is nearly uniform and wrong positions, scales or norms hide.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from headway.checkpoints.config import spec_from_config
from headway.checkpoints.config_out import config_from_spec
from headway.checkpoints.folder import load_folder, save_folder
from headway.checkpoints.layouts import LAYOUTS
from headway.checkpoints.layouts.tensors import exported
from headway.checkpoints.restore import build_model
from headway.errors import CheckpointError, ConfigError
from headway.models import EncoderDecoder, ModelSpec, build
from headway.tokens import Tokens
from tests.checkpoints.hf import off

V = 61
PAIR: dict[str, Any] = {
    "vocab_size": V,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 60,
    "eos_token_id": 0,
    "decoder_start_token_id": 60,
    "forced_eos_token_id": 0,
}
MARIAN = {**PAIR, "scale_embedding": True, "activation_function": "swish"}
APART = {**MARIAN, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 53, "pad_token_id": 52}
T5 = {"vocab_size": V, "d_model": 48, "d_kv": 10, "d_ff": 80, "num_layers": 2, "num_heads": 4}
NEW_T5 = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "marian": ("marian", MARIAN),
    "marian, relu, not scaled": ("marian", {**PAIR, "activation_function": "relu"}),
    "marian, two vocabs": ("marian", APART),
    "marian, two vocabs, untied": ("marian", {**APART, "tie_word_embeddings": False}),
    "bart": ("bart", PAIR),
    "bart, scaled, gelu_new": ("bart", {**PAIR, "scale_embedding": True, "activation_function": "gelu_new"}),
    "bart, untied": ("bart", {**PAIR, "tie_word_embeddings": False}),
    "mbart": ("mbart", {**PAIR, "scale_embedding": True}),
    "mbart, relu": ("mbart", {**PAIR, "activation_function": "relu"}),
    "t5 1.0": ("t5", T5),
    "t5 1.0, more layers, few buckets": (
        "t5",
        {
            **T5,
            "num_decoder_layers": 3,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 9,
        },
    ),
    "t5 1.1": ("t5", {**NEW_T5, "num_decoder_layers": 3}),
    "t5, gated-silu, tied": ("t5", {**T5, "feed_forward_proj": "gated-silu"}),
}
SOURCE = torch.randint(0, 53, (2, 13), generator=torch.Generator().manual_seed(1))
TARGET = torch.randint(0, 53, (2, 11), generator=torch.Generator().manual_seed(2))


def theirs(name: str) -> Any:
    """A transformers model of a case: every trained number normal (norm gains around 1), and the logits' bias."""
    family, settings = CASES[name]
    model = AutoModelForSeq2SeqLM.from_config(
        AutoConfig.for_model(family, **settings), attn_implementation="eager"
    )
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.requires_grad:
                gain = key.endswith("weight") and p.dim() == 1
                # T5 does not scale scores, and starts from queries that are so much smaller instead
                small = settings["d_kv"] ** -0.5 if key.endswith("Attention.q.weight") else 1.0
                p.copy_(torch.randn(p.shape, generator=g) * 0.3 * small + gain)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(0, 0.3, generator=g)
        if name == "t5 1.1":  # transformers ties it until a file says otherwise
            model.lm_head.weight = torch.nn.Parameter(torch.randn(V, 48, generator=g) * 0.3)
    return model.eval()


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """(transformers' model, ours, loaded from the folder that theirs was saved to, that folder)."""
    model = theirs(request.param)
    path = tmp_path_factory.mktemp("theirs")
    model.save_pretrained(path)
    ours = build_model(load_folder(path))
    assert isinstance(ours, EncoderDecoder)
    return model, ours, path


def test_logits_are_theirs(pair: tuple[Any, Any, Path]) -> None:
    model, ours, _ = pair
    with torch.no_grad():
        assert off(ours(SOURCE, TARGET), model(input_ids=SOURCE, decoder_input_ids=TARGET).logits) < 1e-5


def test_gradients_are_theirs(pair: tuple[Any, Any, Path]) -> None:
    """In float64: where a softmax is sharp, float32 leaves few digits of a gradient on either side."""
    model, ours = (copy.deepcopy(one).double() for one in pair[:2])
    logits = model(input_ids=SOURCE, decoder_input_ids=TARGET).logits
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    for one, found in ((model, logits), (ours, ours(SOURCE, TARGET))):
        one.zero_grad()
        (found * weight).sum().backward()
    grads = {key: p.grad for key, p in ours.named_parameters()}
    found = exported(LAYOUTS[ours.spec.family], grads, ours.spec)
    wanted = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    rest = found.keys() - wanted.keys()
    assert all(key.endswith(("embed_positions.weight", "final_logits_bias", "shared.weight")) for key in rest)
    for key, grad in wanted.items():
        if key.endswith("k_proj.bias"):  # 0 but for rounding: the same for all keys of a query
            grad = wanted[key.replace("k_proj", "v_proj")]
            assert float(found[key].abs().max()) < 1e-4 * float(grad.abs().max())
        else:
            assert off(found[key], grad) < 1e-4, key


def test_padded_is_unpadded_and_cached_is_uncached(pair: tuple[Any, Any, Path]) -> None:
    model, ours, _ = pair
    with torch.no_grad():
        whole = ours(SOURCE, TARGET)
        for side in ("left", "right"):
            at_source, at_target = (
                Tokens.from_lengths([13, 9], side=side),
                Tokens.from_lengths([11, 5], side=side),
            )
            source, target = SOURCE.clone(), TARGET.clone()
            source[1], target[1] = 60, 60
            source[1, at_source.valid[1]], target[1, at_target.valid[1]] = SOURCE[1, :9], TARGET[1, :5]
            padded = ours(source, target, source_tokens=at_source, tokens=at_target)
            alone = ours(SOURCE[1:, :9], TARGET[1:, :5])[0]
            assert off(padded[1, at_target.valid[1]], alone) < 1e-5
        mask = Tokens.from_lengths([13, 9]).valid.long()
        peer = model(input_ids=SOURCE, attention_mask=mask, decoder_input_ids=TARGET).logits
        assert off(ours(SOURCE, TARGET, source_tokens=Tokens.from_attention_mask(mask)), peer) < 1e-5
        cache = ours.make_cache(ours.encode(SOURCE))
        steps = [ours.decode(TARGET[:, :4], cache)]
        steps += [ours.decode(TARGET[:, i : i + 1], cache) for i in range(4, 11)]
        assert off(torch.cat(steps, 1), whole) < 1e-5


def test_we_save_and_they_load(pair: tuple[Any, Any, Path], tmp_path: Path) -> None:
    model, ours, path = pair
    save_folder(tmp_path / "ours", ours)
    again, report = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    assert type(again) is type(model)
    with torch.no_grad():
        wanted = model(input_ids=SOURCE, decoder_input_ids=TARGET).logits
        assert off(again.eval()(input_ids=SOURCE, decoder_input_ids=TARGET).logits, wanted) < 1e-6
    assert load_folder(tmp_path / "ours").spec == load_folder(path).spec == ours.spec


MODERN = {
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
}
OPUS = {
    **MODERN,
    "vocab_size": 58101,
    "d_model": 512,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
    "max_position_embeddings": 512,
    "activation_function": "swish",
    "scale_embedding": True,
}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "opus-mt-en-de": (
        {
            "model_type": "marian",
            "architectures": ["MarianMTModel"],
            "static_position_embeddings": True,
            "add_bias_logits": False,
            "add_final_layer_norm": False,
            "normalize_before": False,
            "normalize_embedding": False,
            "num_hidden_layers": 6,
            "bad_words_ids": [[58100]],
            **OPUS,
            "pad_token_id": 58100,
            "eos_token_id": 0,
            "classif_dropout": 0.0,
            "num_beams": 4,
        },
        73_886_208,
    ),
    "bart-base": (
        {
            "model_type": "bart",
            "architectures": ["BartModel"],
            "vocab_size": 50265,
            "d_model": 768,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
            "activation_dropout": 0.1,
            "attention_dropout": 0.1,
            "normalize_embedding": True,
            "normalize_before": False,
            "add_final_layer_norm": False,
            "no_repeat_ngram_size": 3,
        },
        139_420_416,
    ),
    "t5-small": (
        {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "n_positions": 512,
            "output_past": True,
        },
        60_506_624,
    ),
    "flan-t5-small": (
        {
            "model_type": "t5",
            "d_ff": 1024,
            "num_layers": 8,
            "num_decoder_layers": 8,
            "num_heads": 6,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "n_positions": 512,
        },
        76_961_152,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_size(name: str) -> None:
    """Their counts have no bias of the logits, which is no parameter of theirs."""
    config, count = PUBLISHED[name]
    spec = spec_from_config(config)
    assert spec.parameter_count - spec.vocab * spec.output_bias == count
    again = config_from_spec(spec)
    assert (again["model_type"], spec_from_config(again)) == (config["model_type"], spec)


def rewritten(path: Path, change: Any) -> Path:
    """The folder with other tensors."""
    state = load_file(path / "model.safetensors")
    change(state)
    save_file({key: value.contiguous() for key, value in state.items()}, path / "model.safetensors")
    return path


def saved(path: Path, family: str, settings: dict[str, Any]) -> Path:
    """A folder of transformers' with fresh weights."""
    AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **settings)).save_pretrained(path)
    return path


def test_old_files_have_tables_of_positions_and_every_name_of_the_embedding(tmp_path: Path) -> None:
    path = saved(tmp_path, "marian", MARIAN)
    wanted = load_folder(path).tensors["encoder.layers.0.mlp.up_proj.weight"]
    table = AutoModelForSeq2SeqLM.from_pretrained(path).model.encoder.embed_positions.weight.detach()

    def old(state: dict[str, torch.Tensor]) -> None:
        shared = state["model.shared.weight"]
        for side in ("encoder", "decoder"):
            state[f"model.{side}.embed_positions.weight"] = table.half()
            state[f"model.{side}.embed_tokens.weight"] = shared.clone()
        state["lm_head.weight"] = shared.clone()
        del state["final_logits_bias"]

    found = load_folder(rewritten(path, old)).tensors
    assert torch.equal(found["encoder.layers.0.mlp.up_proj.weight"], wanted)
    assert torch.equal(found["lm_head.bias"], torch.zeros(V))

    def swapped(state: dict[str, torch.Tensor]) -> None:
        state["model.decoder.embed_positions.weight"] = table.unflatten(1, (2, -1)).flip(1).flatten(1)

    with pytest.raises(CheckpointError, match=r"model\.decoder\.embed_positions\.weight is not what it is"):
        load_folder(rewritten(path, swapped))


def test_ids_of_targets_are_read_from_either_file(tmp_path: Path) -> None:
    path = saved(tmp_path, "marian", MARIAN)
    (path / "generation_config.json").unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "bad_words_ids": [[60]]}))
    wanted = {"pad_token_id": 60, "eos_token_id": 0, "decoder_start_token_id": 60, "forced_eos_token_id": 0}
    assert load_folder(path).generation == {**wanted, "bad_words_ids": [[60]]}


@pytest.mark.parametrize("family", ["marian", "bart", "t5"])
def test_transformers_trains_a_folder_of_ours_from_labels(family: str, tmp_path: Path) -> None:
    """It begins the targets with the id that we wrote."""
    size = {"vocab": V, "width": 48, "layers": 2, "heads": 4, "hidden": 64, "init_std": 0.3}
    none = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    ours = build(ModelSpec.of_pair(family, **size, **none), seed=0)
    assert isinstance(ours, EncoderDecoder)
    save_folder(
        tmp_path / "ours",
        ours,
        generation={"decoder_start_token_id": 5, "pad_token_id": 6, "eos_token_id": 0},
    )
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours").eval()
    shifted = torch.nn.functional.pad(TARGET[:, :-1], (1, 0), value=5)
    with torch.no_grad():
        logits = ours(SOURCE, shifted)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TARGET.flatten())
        assert float(theirs(input_ids=SOURCE, labels=TARGET).loss) == pytest.approx(float(loss), rel=1e-4)


def test_names_of_one_embedding_must_agree(tmp_path: Path) -> None:
    path = saved(tmp_path, "bart", PAIR)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and model\.shared\.weight are one tensor"):
        load_folder(rewritten(path, lambda state: state.update({"lm_head.weight": torch.ones(V, 48)})))


def test_the_stack_alone_has_the_same_tensors_without_prefix(tmp_path: Path) -> None:
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("bart", **PAIR)).eval()
    model.model.save_pretrained(tmp_path)
    ours = build_model(load_folder(tmp_path))
    with torch.no_grad():
        wanted = model(input_ids=SOURCE, decoder_input_ids=TARGET).logits
        assert off(ours(SOURCE, TARGET), wanted) < 1e-5


def test_an_output_layer_of_its_own_is_the_embedding_where_a_t5_file_has_none(tmp_path: Path) -> None:
    """Newer transformers ties it while it is the same, drops it, and says "tied" in either case."""
    path = saved(tmp_path, "t5", NEW_T5)
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] is True
    tensors = load_folder(path).tensors
    assert torch.equal(tensors["lm_head.weight"], tensors["decoder.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("marian", {"normalize_before": True}, '"normalize_before" is True, which headway does not have'),
        ("marian", {"static_position_embeddings": False}, "static_position_embeddings"),
        ("bart", {"encoder_layerdrop": 0.1}, '"encoder_layerdrop" is 0.1'),
        ("bart", {"activation_function": "mish"}, "there is no activation 'mish'"),
        ("bart", {"architectures": ["BartForQuestionAnswering"]}, "architectures"),
        ("bart", {"d_modle": 3}, 'unknown key "d_modle".*did you mean "d_model"'),
        ("t5", {"feed_forward_proj": "gated-glu"}, 'did you mean "gated-gelu"'),
        (
            "t5",
            {"is_gated_act": True},
            '"is_gated_act" is True, but "feed_forward_proj" \'relu\' means False',
        ),
        ("t5", {"dense_act_fn": "gelu"}, "\"dense_act_fn\" is 'gelu'"),
    ],
)
def test_what_cannot_be_is_refused(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_from_config({"model_type": family, **change})


def test_what_the_family_cannot_say_is_saved_as_our_own(tmp_path: Path) -> None:
    """A post-norm T5, a Marian without the bias of its logits."""
    size: dict[str, Any] = {"vocab": V, "width": 48, "layers": 2, "heads": 4, "hidden": 64}
    for spec in (
        ModelSpec.of_pair("t5", **size, order="post"),
        ModelSpec.of_pair("marian", **size, output_bias=False),
        ModelSpec.of_pair("transformer", **size, encoder={"layers": 3, "vocab": 9}),
    ):
        model = build(spec, seed=0).eval()
        save_folder(tmp_path / "model", model)
        folder = load_folder(tmp_path / "model")
        assert folder.config["model_type"] == "headway"
        assert folder.spec == spec
        source = SOURCE % 9
        with torch.no_grad():
            assert torch.equal(build_model(folder)(source, TARGET), model(source, TARGET))
