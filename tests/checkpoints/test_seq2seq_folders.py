"""Folders of encoder-decoders: exchanged with transformers in both directions, old files, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from headway.checkpoints.folder import load_folder
from headway.checkpoints.hf.config import config_from_spec, spec_from_config
from headway.checkpoints.restore import build_model
from headway.checkpoints.saving import save_folder
from headway.errors import CheckpointError, ConfigError
from headway.models import EncoderDecoder, ModelSpec, build, cost
from tests.checkpoints.edits import set_keys, set_tensors
from tests.checkpoints.hf import off
from tests.checkpoints.seq2seq import MARIAN, MILD, NEW_T5, PAIR, SOURCE, T5, TARGET, V, logits, theirs
from tests.checkpoints.seq2seq_published import PUBLISHED
from tests.checkpoints.shares import share


@share("name", MILD, 0, 3)
def test_we_save_and_they_load(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path / "theirs")
    loaded = load_folder(tmp_path / "theirs")
    save_folder(tmp_path / "ours", build_model(loaded))
    reloaded, report = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    assert type(reloaded) is type(model)
    with torch.no_grad():
        assert off(logits(reloaded.eval()), logits(model)) < 1e-6
    assert load_folder(tmp_path / "ours").spec == loaded.spec


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_size(name: str) -> None:
    """transformers' counts lack the bias of the logits, which is no parameter there."""
    config, count = PUBLISHED[name]
    spec = spec_from_config(config)
    assert cost.parameter_count(spec) - spec.vocab * spec.output_bias == count
    written = config_from_spec(spec)
    assert (written["model_type"], spec_from_config(written)) == (config["model_type"], spec)


def saved(path: Path, family: str, settings: dict[str, Any]) -> Path:
    """Saves a transformers folder with fresh weights, and returns its path."""
    AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **settings)).save_pretrained(path)
    return path


def test_old_files_have_tables_of_positions_and_every_name_of_the_embedding(tmp_path: Path) -> None:
    path = saved(tmp_path, "marian", MARIAN)
    expected = load_folder(path).tensors["encoder.layers.0.mlp.up_proj.weight"]
    table = AutoModelForSeq2SeqLM.from_pretrained(path).model.encoder.embed_positions.weight.detach()

    def old(state: dict[str, torch.Tensor]) -> None:
        shared = state["model.shared.weight"]
        for side in ("encoder", "decoder"):
            state[f"model.{side}.embed_positions.weight"] = table.half()
            state[f"model.{side}.embed_tokens.weight"] = shared.clone()
        state["lm_head.weight"] = shared.clone()
        del state["final_logits_bias"]

    loaded = load_folder(set_tensors(path, old)).tensors
    assert torch.equal(loaded["encoder.layers.0.mlp.up_proj.weight"], expected)
    assert torch.equal(loaded["lm_head.bias"], torch.zeros(V))

    def swapped(state: dict[str, torch.Tensor]) -> None:
        state["model.decoder.embed_positions.weight"] = table.unflatten(1, (2, -1)).flip(1).flatten(1)

    with pytest.raises(
        CheckpointError, match=r"model\.decoder\.embed_positions\.weight must be the constant of shape"
    ):
        load_folder(set_tensors(path, swapped))


def test_ids_of_targets_are_read_from_either_file(tmp_path: Path) -> None:
    path = saved(tmp_path, "marian", MARIAN)
    (path / "generation_config.json").unlink()
    set_keys(path, bad_words_ids=[[60]])
    from_config = {
        "pad_token_id": 60,
        "eos_token_id": 0,
        "decoder_start_token_id": 60,
        "forced_eos_token_id": 0,
    }
    assert load_folder(path).generation == {**from_config, "bad_words_ids": [[60]]}
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "forced_eos_token_id": 1}))
    merged = {
        "eos_token_id": 1,
        "forced_eos_token_id": 1,
        "decoder_start_token_id": 60,
        "bad_words_ids": [[60]],
    }
    assert load_folder(path).generation == merged


@pytest.mark.parametrize("family", ["marian", "bart", "t5"])
def test_transformers_trains_a_folder_of_ours_from_labels(family: str, tmp_path: Path) -> None:
    """transformers begins the targets with the start id that we saved."""
    sizes = {"vocab": V, "width": 48, "layers": 2, "heads": 4, "hidden": 64, "init_std": 0.3}
    no_dropout = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    ours = build(ModelSpec.of_pair(family, **sizes, **no_dropout), seed=0)
    assert isinstance(ours, EncoderDecoder)
    save_folder(
        tmp_path / "ours",
        ours,
        generation={"decoder_start_token_id": 5, "pad_token_id": 6, "eos_token_id": 0},
    )
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours").eval()
    shifted = torch.nn.functional.pad(TARGET[:, :-1], (1, 0), value=5)
    with torch.no_grad():
        outputs = ours(SOURCE, shifted)
        loss = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), TARGET.flatten())
        assert float(theirs(input_ids=SOURCE, labels=TARGET).loss) == pytest.approx(float(loss), rel=1e-4)


def test_the_stack_alone_has_the_same_tensors_without_prefix(tmp_path: Path) -> None:
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("bart", **PAIR)).eval()
    model.model.save_pretrained(tmp_path)
    ours = build_model(load_folder(tmp_path))
    with torch.no_grad():
        expected = logits(model)
        assert off(ours(SOURCE, TARGET), expected) < 1e-5


def test_an_output_layer_of_its_own_is_the_embedding_where_a_t5_file_has_none(tmp_path: Path) -> None:
    """Newer transformers ties it while the two are equal, drops it from the file, and writes "tied" in either case."""
    path = saved(tmp_path, "t5", NEW_T5)
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] is True
    tensors = load_folder(path).tensors
    assert torch.equal(tensors["lm_head.weight"], tensors["decoder.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("marian", {"normalize_before": True}, '"normalize_before" is True, which is unsupported'),
        ("marian", {"static_position_embeddings": False}, "static_position_embeddings"),
        ("m2m_100", {"encoder_layerdrop": 0.1}, '"encoder_layerdrop" is 0.1'),
        ("m2m_100", {"pad_token_id": None}, '"pad_token_id" of an m2m_100 must be a token id'),
        ("mvp", {"use_prompt": True}, '"use_prompt" is True'),
        ("pegasus", {"normalize_before": False}, '"normalize_before" is False'),
        ("blenderbot", {"layernorm_variant": "xlm"}, "\"layernorm_variant\" is 'xlm'"),
        ("mt5", {"scale_decoder_outputs": True}, 'unknown key "scale_decoder_outputs"'),
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
        spec_from_config({"model_type": family, **(T5 if "t5" in family else PAIR), **change})
