"""A new family needs one layout and one row of the families' table: here one is added, saved and loaded."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headway.checkpoints import (
    config_from_spec,
    inspect,
    load_model,
    save_folder,
    spec_from_config,
    unsupported_by_transformers,
)
from headway.checkpoints.hf.config_keys import ConfigReader, FieldMap, Key
from headway.checkpoints.hf.layouts import LAYOUTS, family_rows
from headway.checkpoints.hf.layouts.base import Layout, Part
from headway.checkpoints.hf.layouts.rules import decoder_names
from headway.cli import run
from headway.errors import CheckpointError, ConfigError
from headway.models import FAMILIES, Family, ModelSpec, build
from headway.positions import LinearBias

ROOT = Path(__file__).parents[2]

# -- the row ---------------------------------------------------------------------------------------------------

ROW = Family(
    "pre-norm LayerNorm without biases, ALiBi, ReLU, a grouped tensor of queries, keys and values",
    {"norm": "layer", "positions": LinearBias(), "gated": False, "activation": "relu", "tied": True},
    groups=True,
)

# -- the layout file -------------------------------------------------------------------------------------------

KEYS: FieldMap = {
    "vocab": Key("n_tokens"),
    "width": Key("d"),
    "layers": Key("depth"),
    "heads": Key("n_heads"),
    "kv_heads": Key("n_groups"),
    "trained_context": Key("length"),
    "norm_eps": Key("eps", 1e-6),
    "init_std": Key("std", 0.02),
    "tied": Key("tie_word_embeddings", True),
}
MODULES = {
    "self_attn.qkv_proj": "mixer.qkv",
    "self_attn.o_proj": "mixer.out",
    "mlp.up_proj": "ff.in",
    "mlp.down_proj": "ff.out",
    "input_layernorm": "norms.0",
    "post_attention_layernorm": "norms.1",
}


def read(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"hidden": reader.whole("ratio") * fields["width"]}


def write(spec: ModelSpec) -> dict[str, Any]:
    return {"ratio": spec.hidden // spec.width}


LAYOUT = Layout(
    family="harbour",
    architectures={"HarbourForCausalLM": "lm"},
    keys=KEYS,
    parts=(Part({"ratio": 4}, read, write),),
    tensors=decoder_names("net.", "net.words", "net.last", "net.blocks.#.", MODULES, by_group=True),
    in_transformers=False,
)

# -- what follows from the two ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def harbour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "harbour", ROW)  # type: ignore[arg-type]
    monkeypatch.setitem(LAYOUTS, "harbour", LAYOUT)


def spec(**fields: Any) -> ModelSpec:
    sizes: dict[str, Any] = {"vocab": 31, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 64}
    return ModelSpec.of("harbour", **{**sizes, **fields})


@pytest.mark.parametrize("tied", [True, False])
def test_its_models_are_saved_under_its_names_and_loaded_with_equal_logits(
    tmp_path: Path, tied: bool
) -> None:
    model = build(spec(tied=tied), seed=0).eval()
    save_folder(tmp_path / "m", model)
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert {"net.words.weight", "net.blocks.1.mixer.qkv.weight", "net.last.weight"} < stored.keys()
    assert ("lm_head.weight" in stored) == (not tied)
    assert stored["net.blocks.0.mixer.qkv.weight"].shape == (16 + 8 + 8, 16)
    loaded = load_model(tmp_path / "m")
    ids = torch.arange(12).view(1, -1)
    assert loaded.spec == model.spec
    assert torch.equal(loaded(ids), model(ids))


def test_its_config_is_its_own(tmp_path: Path) -> None:
    config = config_from_spec(spec())
    assert (config["model_type"], config["architectures"]) == ("harbour", ["HarbourForCausalLM"])
    assert (config["n_groups"], config["ratio"]) == (2, 4)
    assert spec_from_config(config) == spec()
    assert spec_from_config({key: value for key, value in config.items() if key != "model_type"}) == spec()
    with pytest.raises(
        ConfigError, match=r'unknown key "n_group" .did you mean "n_groups".* model_type harbour'
    ):
        spec_from_config({**config, "n_group": 2})
    with pytest.raises(
        ConfigError, match=r"model_type 'harbor' .*did you mean \"harbour\".*there are .*harbour"
    ):
        spec_from_config({**config, "model_type": "harbor"})


def test_what_it_cannot_express_is_a_folder_of_ours(tmp_path: Path) -> None:
    unusual = spec(hidden=40)
    assert unsupported_by_transformers(unusual) == "hidden"
    assert config_from_spec(unusual)["model_type"] == "headway"
    save_folder(tmp_path / "m", build(unusual, seed=0))
    assert load_model(tmp_path / "m").spec == unusual


def test_its_folders_are_inspected_and_planned_and_broken_ones_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_folder(tmp_path / "m", build(spec(), seed=0))
    refused = "refuses it: it cannot express its family (harbour)"
    assert inspect(tmp_path / "m")["transformers"] == refused
    assert run(["inspect", str(tmp_path / "m")]) == 0
    assert f"family         harbour; transformers {refused}" in capsys.readouterr().out
    assert run(["plan", str(tmp_path / "m"), "--context", "16"]) == 0
    text = (tmp_path / "m" / "config.json").read_text()
    (tmp_path / "m" / "config.json").write_text(text.replace('"depth": 2', '"depth": 3'))
    with pytest.raises(CheckpointError, match=r"(?s)missing: net\.blocks\.2\.mixer\.out\.weight"):
        load_model(tmp_path / "m")


def test_it_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models"]) == 0
    assert re.search(r"harbour +harbour +pre-norm LayerNorm without biases", capsys.readouterr().out)


# -- the documents -------------------------------------------------------------------------------------------------


def listed(row: dict[str, str | None]) -> str:
    name = "" if row["architecture"] is None else f"`{row['architecture']}`"
    return f"| `{row['family']}` | `{row['model_type']}` | {name} | {row['about']} |"


def test_the_documents_list_the_families_that_there_are() -> None:
    rows = [row for row in family_rows() if row["family"] != "harbour"]
    table = (
        (ROOT / "docs" / "checkpoints.md")
        .read_text()
        .partition("| family | model_type |")[2]
        .split("\n\n")[0]
    )
    assert table.splitlines()[2:] == [listed(row) for row in rows]
    sentence = (ROOT / "README.md").read_text().partition("The families are ")[2].partition(";")[0]
    assert re.findall(r"`([\w-]+)`", sentence) == [
        row["family"] for row in rows if row["family"] == row["model_type"]
    ]
