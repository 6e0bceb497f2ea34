"""Folders of headway's own type, which are written only for what transformers has no class or key for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from headway.attention.delta import DeltaSpec
from headway.attention.linear_attention import LinearAttentionSpec
from headway.checkpoints import inspect, load_folder, save_folder, unsupported_by_transformers
from headway.checkpoints.restore import build_model
from headway.errors import CheckpointError
from headway.models import Head, ModelSpec, build
from headway.models.mixers import Softmax
from headway.patterns import Causal, Global, PerHead, Sink, Window
from headway.positions import Learned, Rotary
from headway.tokens import Tokens
from tests.checkpoints.encoders import SMALL

SIZE: dict[str, Any] = {**SMALL, "layers": 4}
IDS = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
DELTA: dict[str, Any] = {"heads": 2, "key_heads": 2, "head_dim": 8}
ADJACENT = Rotary(pairing="adjacent")


def one(family: str, head: Head | None = None, **fields: Any) -> ModelSpec:
    spec = ModelSpec.of(family, **{**SIZE, **fields})
    return spec if head is None else spec.with_head(head)


def longformer(**fields: Any) -> ModelSpec:
    return one("longformer", **{"positions": Learned(40, offset=2), "trained_context": 40, **fields})


def pair(family: str, **fields: Any) -> ModelSpec:
    return ModelSpec.of_pair(family, **{**SMALL, **fields})


def delta(family: str, **fields: Any) -> ModelSpec:
    return one(family, mixers=(DeltaSpec(**DELTA, **fields), Softmax()))


LOST: list[tuple[ModelSpec, str | None]] = [
    (one("llama"), None),
    (one("llama", positions=ADJACENT), "rotary pairing"),
    (one("llama", patterns=Causal() & (Window.last(3) | Sink(1))), "patterns"),
    (one("llama", patterns=(Window.last(3), Window.last(4))), "windows"),
    (one("llama", patterns=(Window.last(2), Window.last(3), Causal(), Causal())), "windows"),
    (one("nezha"), "family (nezha)"),
    (one("bert", token_types=0), "type_vocab_size"),
    (one("bert", order="pre", final_norm=True), "order, final_norm"),
    (one("bert", patterns=Window.around(4)), "patterns"),
    (one("bert", Head("classify", ("a", "b"), "mean", "tanh")), 'head (pool="mean")'),
    (one("bert", kv_heads=2), "kv_heads"),
    (one("roberta", positions=Learned(512)), "positions"),
    (one("roformer", positions=Rotary(500.0, pairing="adjacent")), "positions"),
    (one("roformer", positions=Rotary(pairing="adjacent", trainable=True)), "positions"),
    (one("roformer", mixers=LinearAttentionSpec("elu+1"), attention_dropout=0.0), "mixers"),
    (longformer(patterns=Window.around(2, step=2) | Global()), "patterns"),
    (longformer(patterns=Window(4, 2) | Global()), "patterns"),
    (longformer(patterns=Window.around(0) | Global()), "patterns"),
    (longformer(patterns=PerHead(*[Window.around(i + 1) for i in range(4)]) | Global()), "patterns"),
    (longformer(global_projections=False), "global_projections"),
    (longformer(positions=Learned(40)), "positions"),
    (longformer(head=Head("classify", labels=("a", "b"), pool="mean")), "head"),
    (longformer(head=Head("embed")), "head"),
    (pair("t5", order="post"), "order"),
    (pair("t5", final_dropout=False), "final_dropout"),
    (pair("marian", output_bias=False), "output_bias"),
    (pair("transformer", encoder={"layers": 3, "vocab": 9}), "positions, encoder, norm_eps"),
    *((one(family), "encoder") for family in ("bart", "marian", "t5")),
    *((pair(family), "encoder") for family in ("gpt2", "opt")),
    *((one(family), None) for family in ("qwen3_5_text", "lfm2", "qwen3_next", "lfm2_moe", "bamba")),
    *((one(family), None) for family in ("granitemoehybrid", "modernbert", "nemotron_h")),
    (one("nemotron_h", layer_hidden=(0, None)), None),
    (one("nemotron_h", layer_hidden=(0, 96)), "layer_hidden"),
    (one("llama", layer_hidden=(0, None)), "layer_hidden"),
    (one("mamba2", hidden=0), None),
    (one("mamba2"), "hidden"),
    (delta("bamba"), "mixers"),
    (delta("qwen3_5_text"), None),
    (delta("qwen3_5_text", gate="sigmoid"), "mixers"),
    (one("lfm2", mixers=(LinearAttentionSpec(), Softmax())), "mixers"),
    (delta("llama"), "mixers"),
]  # fmt: skip
"""Specs, and what keeps transformers from expressing them; None if nothing does."""


def called(spec: ModelSpec) -> Callable[[Any], Tensor]:
    """Returns a function that runs a model on ids; if the spec has global projections, the first token is global."""
    tokens = Tokens.range(9).with_global([0]) if spec.global_projections else Tokens.range(9)
    if spec.encoder is not None:
        return lambda model: model(IDS % 9, IDS[:, :5])
    return lambda model: model(IDS) if spec.causal else model(IDS, tokens=tokens)


@torch.no_grad()
@pytest.mark.parametrize(
    ("spec", "why"), LOST, ids=lambda x: x.family if isinstance(x, ModelSpec) else str(x)
)
def test_what_transformers_cannot_say_is_a_folder_of_headway_s_own(
    spec: ModelSpec, why: str | None, tmp_path: Path
) -> None:
    """Any other spec becomes a folder of its family; both give back the spec and the function."""
    reason = unsupported_by_transformers(spec)
    assert reason is None if why is None else why in str(reason)
    model = build(spec, seed=1).eval()
    save_folder(tmp_path / "m", model, keep_pairing=True)
    folder, call = load_folder(tmp_path / "m"), called(spec)
    assert folder.config["model_type"] == ("headway" if why else spec.family)
    assert folder.spec == spec
    assert torch.equal(call(build_model(folder)), call(model))
    if why:
        with pytest.raises(ValueError, match="headway"):
            AutoConfig.from_pretrained(tmp_path / "m")


NEZHA = ModelSpec.of("nezha", **SMALL)  # transformers has no class for it


def test_another_head_s_tensors_are_not_needed(tmp_path: Path) -> None:
    model = build(NEZHA, seed=0).eval()
    save_folder(tmp_path / "m", model)
    folder = load_folder(tmp_path / "m", head=Head("embed", pool="mean"))
    with torch.no_grad():
        states = build(NEZHA.with_head(Head("states")), seed=0).eval()
        states.load_state_dict(model.state_dict(), strict=False)
        assert torch.equal(build_model(folder)(IDS), states(IDS).mean(1))
    unused = {name for name in model.state_dict() if name.startswith("head.")}
    assert unused
    assert set(folder.unused) == unused
    assert inspect(tmp_path / "m")["unused"] == ()


def test_a_head_that_is_not_there_is_missing_and_others_are_not_spare(tmp_path: Path) -> None:
    save_folder(tmp_path / "m", build(NEZHA, seed=0))
    with pytest.raises(CheckpointError, match=r"missing: head\.out\.weight") as error:
        load_folder(tmp_path / "m", head=Head("tag", labels=("a", "b")))
    assert "unexpected" not in str(error.value)
    config = tmp_path / "m" / "config.json"
    config.write_text(config.read_text().replace('"dense": "gelu"', '"dense": null'))
    with pytest.raises(CheckpointError, match=r"unexpected: head\.dense"):
        load_folder(tmp_path / "m")
