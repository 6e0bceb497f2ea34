"""BERT, RoBERTa and RoFormer against transformers: one test per family and configuration, on random weights of standard
deviation 0.3 (at 0.02 wrong positions hide)."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.attention.linear import Linear
from headway.checkpoints import inspect, load_folder, save_folder, spec_from_config
from headway.checkpoints.config_out import config_from_spec, why_not_plain
from headway.checkpoints.layouts import LAYOUTS
from headway.checkpoints.layouts.tensors import exported
from headway.checkpoints.pairing import change_pairing
from headway.checkpoints.restore import build_model, load_model, restore
from headway.cli import run as cli
from headway.cli.inspect import text as inspect_text
from headway.errors import CheckpointError, ConfigError
from headway.models import Encoder, EncoderDecoder, Head, ModelSpec, build, catalog
from headway.patterns import Full, Global, Window
from headway.positions import Learned, Relative, Rotary
from headway.tokens import Tokens

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 20,
}
LENGTHS = (9, 5)
LABELS = {"id2label": {0: "no", 1: "yes", 2: "perhaps"}, "label2id": {"no": 0, "yes": 1, "perhaps": 2}}
NAMES = {
    "masked-lm": "ForMaskedLM",
    "classify": "ForSequenceClassification",
    "tag": "ForTokenClassification",
    "answer": "ForQuestionAnswering",
    "states": "Model",
}
CLASSES = {"bert": "Bert", "roberta": "Roberta", "roformer": "RoFormer"}


@dataclass(frozen=True)
class Case:
    family: str
    task: str
    changes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.family, self.task, *(f"{k}={v}" for k, v in self.changes.items())])

    @property
    def theirs(self) -> Any:
        return getattr(transformers, CLASSES[self.family] + NAMES[self.task])

    @property
    def config(self) -> Any:
        labels = LABELS if self.task in ("classify", "tag") else {}
        made = getattr(transformers, CLASSES[self.family] + "Config")
        return made(**{**SHAPE, **labels, **self.changes}, attn_implementation="eager")


CASES = [Case(family, task) for family in CLASSES for task in NAMES] + [
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
]


def peer(case: Case) -> Any:
    """Their model: every trained number normal with standard deviation 0.3, gains around 1."""
    torch.manual_seed(0)
    model = case.theirs(case.config).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                is_gain = name.lower().endswith(("layernorm.weight", "layer_norm.weight"))
                p.copy_(torch.randn(p.shape, generator=draw) * 0.3 + is_gain)
    return model


def inputs(model: Any, side: str = "right") -> tuple[dict[str, Tensor], Tokens]:
    """Two rows of unequal length, for them and for us."""
    draw = torch.Generator().manual_seed(2)
    shape, pad = (len(LENGTHS), max(LENGTHS)), model.config.pad_token_id or 0
    tokens = Tokens.from_lengths(list(LENGTHS), side=side)
    ids = torch.where(tokens.valid, torch.randint(5, 61, shape, generator=draw), pad)
    types = torch.randint(0, model.config.type_vocab_size, shape, generator=draw)
    return {"input_ids": ids, "attention_mask": tokens.valid.long(), "token_type_ids": types}, tokens


def run(model: Encoder, given: dict[str, Tensor], tokens: Tokens) -> Tensor:
    return model(given["input_ids"], tokens=tokens, types=given["token_type_ids"])  # type: ignore[no-any-return]


def output(theirs: Any) -> Tensor:
    if "start_logits" in theirs:
        return torch.stack((theirs.start_logits, theirs.end_logits), -1)
    return theirs.logits if "logits" in theirs else theirs.last_hidden_state  # type: ignore[no-any-return]


def seen(values: Tensor, tokens: Tokens) -> Tensor:
    """What is said of tokens; of a row, where there is one answer for it."""
    return values[tokens.valid] if values.shape[:2] == tokens.valid.shape else values


def off(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value of theirs."""
    return float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())


def from_them(model: Any, path: Path) -> Encoder:
    model.save_pretrained(path)
    ours = build_model(load_folder(path))
    assert isinstance(ours, Encoder)
    return ours


def states_of(model: Encoder, given: dict[str, Tensor], tokens: Tokens) -> list[Tensor]:
    """What every layer gives."""
    found: list[Tensor] = []
    hooks = [b.register_forward_hook(lambda m, a, y: found.append(y)) for b in model.model.blocks]
    run(model, given, tokens)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_family_equals_transformers(case: Case, tmp_path: Path) -> None:
    theirs = peer(case)
    ours = from_them(theirs, tmp_path / "theirs")
    assert (ours.spec.family, ours.spec.head.task) == (case.family, case.task)
    given, tokens = inputs(theirs)
    reference = theirs(**given, output_hidden_states=True)
    wanted, got = seen(output(reference), tokens), seen(run(ours, given, tokens), tokens)
    assert off(got, wanted) < 1e-5

    for layer, state in enumerate(states_of(ours, given, tokens)):
        assert off(seen(state, tokens), seen(reference.hidden_states[layer + 1], tokens)) < 1e-5

    weigh = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3))
    (wanted * weigh).sum().backward()
    (got * weigh).sum().backward()
    mine = exported(LAYOUTS[case.family], gradients(ours), ours.spec)
    largest = max(float(p.grad.abs().max()) for p in theirs.parameters() if p.grad is not None)
    compared = 0
    for name, p in theirs.named_parameters():
        if p.grad is not None:
            # a shift of all keys changes no weight: this gradient is 0, and both have roundings of it
            scale = largest if name.endswith("key.bias") else float(p.grad.abs().max())
            assert float((mine[name] - p.grad).abs().max()) <= 1e-4 * scale, name
            compared += 1
    assert compared >= 3 * 16

    # a row alone, without padding
    short = {name: value[1:, : LENGTHS[1]] for name, value in given.items()}
    alone = run(ours, short, Tokens.range(LENGTHS[1]))[0]
    both = run(ours, given, tokens)[1]
    assert off(both[: LENGTHS[1]] if alone.dim() == 2 else both, alone) < 1e-5

    # back: they load what we save, and it is what they had
    save_folder(tmp_path / "ours", ours)
    back, said = case.theirs.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    absent = {
        name for name in said["missing_keys"] if "pooler" not in name
    }  # a bare model of ours has no pooler
    assert [absent, said["unexpected_keys"], said["mismatched_keys"]] == [set(), set(), set()]
    before, after = theirs.state_dict(), back.state_dict()
    dead = "cls.predictions.bias", "lm_head.bias"
    for name, value in before.items():
        if "pooler" not in name and not (not ours.spec.tied and name in dead):
            assert torch.equal(after[name], value), name
    with torch.no_grad():
        assert torch.equal(seen(output(back(**given)), tokens), wanted)
    again = load_folder(tmp_path / "ours")
    assert again.spec == ours.spec
    assert again.unused == ()
    assert all(torch.equal(again.tensors[name], value) for name, value in ours.state_dict().items())


def gradients(model: Encoder) -> dict[str, Tensor]:
    found = {}
    for name, p in model.named_parameters():
        found[name] = torch.zeros_like(p) if p.grad is None else p.grad
    return {name: found[name] for name in model.state_dict()}


@pytest.mark.parametrize("case", [c for c in CASES if c.task not in ("classify",)], ids=str)
def test_padding_on_the_left_changes_nothing(case: Case, tmp_path: Path) -> None:
    """Positions here are counted by tokens. So are RoBERTa's there (ids that are not the pad id); BERT's are given to
    it; RoFormer's are by slots, which only turned values notice."""
    theirs = peer(case)
    ours = from_them(theirs, tmp_path / "m")
    given, tokens = inputs(theirs, "left")
    right, right_tokens = inputs(theirs)
    for name in ("input_ids", "token_type_ids"):  # the same texts as on the right
        shifted = right[name].clone()
        shifted[1] = right[name][1].roll(LENGTHS[0] - LENGTHS[1])
        given[name] = shifted
    with torch.no_grad():
        got = seen(run(ours, given, tokens), tokens)
        assert off(got, seen(run(ours, right, right_tokens), right_tokens)) < 1e-5
        if case.changes.get("rotary_value"):
            return
        positions = {"position_ids": tokens.index.clamp(min=0)} if case.family == "bert" else {}
        assert off(got, seen(output(theirs(**given, **positions)), tokens)) < 1e-5


@pytest.mark.parametrize("family", CLASSES)
def test_packed_texts_equal_rows_of_their_own(family: str, tmp_path: Path) -> None:
    ours = from_them(peer(Case(family, "masked-lm")), tmp_path / "m")
    ids = torch.randint(5, 61, (1, 14), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        packed = ours(ids, tokens=Tokens.packed([LENGTHS]))[0]
        rows = torch.cat([ours(part)[0] for part in ids.split(LENGTHS, 1)])
    assert off(packed, rows) < 1e-5


def test_the_first_token_is_classified_wherever_it_stands(tmp_path: Path) -> None:
    ours = from_them(peer(Case("roberta", "classify")), tmp_path / "m")
    assert ours.spec.head.labels == ("no", "yes", "perhaps")
    ids = torch.randint(5, 61, (1, 6), generator=torch.Generator().manual_seed(4))
    left = Tokens.from_lengths([6], total=9, side="left")
    padded = torch.cat((torch.ones(1, 3, dtype=torch.long), ids), 1)
    with torch.no_grad():
        assert off(ours(padded, tokens=left), ours(ids)) < 1e-5
        with pytest.raises(ConfigError, match="several documents"):
            ours(ids, tokens=Tokens.packed([[2, 4]]))


def test_a_pad_id_inside_a_text_is_a_token_here(tmp_path: Path) -> None:
    """RoBERTa of transformers gives it the row of padding and does not count it, attention mask or not."""
    theirs = peer(Case("roberta", "states"))
    ours = from_them(theirs, tmp_path / "m")
    ids = torch.tensor([[7, 1, 8, 9]])
    with torch.no_grad():
        there = theirs(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        assert off(ours(ids), there) > 1e-2
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
    mine = LAYOUTS["roformer"].constants(ours.spec)["roformer.encoder.embed_positions.weight"]
    assert float((mine - table).abs().max()) <= torch.finfo(torch.float32).eps


def rewritten(path: Path, change: Any) -> Path:
    """A folder whose tensors went through `change`."""
    file = path / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return path


def test_another_table_of_angles_is_refused(tmp_path: Path) -> None:
    peer(Case("roformer", "states")).save_pretrained(tmp_path / "m")

    def other_theta(state: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "encoder.embed_positions.weight"
        return {**state, name: state[name] * 0.5}

    with pytest.raises(CheckpointError, match=r"embed_positions\.weight is not what it is in every model"):
        load_folder(rewritten(tmp_path / "m", other_theta))


def test_names_of_old_files(tmp_path: Path) -> None:
    """gamma and beta, no prefix, no pooler, position_ids, the tied matrix a second time or not at all."""
    theirs = peer(Case("bert", "masked-lm"))
    given, tokens = inputs(theirs)
    wanted = output(theirs(**given)).detach()

    def old(state: dict[str, Tensor]) -> dict[str, Tensor]:
        ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        renamed = {}
        for name, value in state.items():
            for new, before in ends.items():
                name = name.replace(new, before)
            renamed[name] = value
        table = renamed["bert.embeddings.word_embeddings.weight"]
        return {
            **renamed,
            "bert.embeddings.position_ids": torch.arange(20)[None],
            "cls.predictions.decoder.weight": table.clone(),
            "cls.seq_relationship.weight": torch.zeros(2, 48),
            "cls.seq_relationship.bias": torch.zeros(2),
            "bert.pooler.dense.weight": torch.zeros(48, 48),
            "bert.pooler.dense.bias": torch.zeros(48),
        }

    theirs.save_pretrained(tmp_path / "m")
    folder = load_folder(rewritten(tmp_path / "m", old))
    ours = build_model(folder)
    assert isinstance(ours, Encoder)
    assert off(seen(run(ours, given, tokens), tokens), seen(wanted, tokens)) < 1e-5
    assert set(folder.unused) == {
        "bert.embeddings.position_ids",
        *(f"cls.seq_relationship.{leaf}" for leaf in ("weight", "bias")),
        *(f"bert.pooler.dense.{leaf}" for leaf in ("weight", "bias")),
    }

    def twice(state: dict[str, Tensor]) -> dict[str, Tensor]:
        gain = state["cls.predictions.transform.LayerNorm.gamma"].clone()
        return {**state, "cls.predictions.transform.LayerNorm.weight": gain}

    with pytest.raises(CheckpointError, match="are two names of one tensor"):
        load_folder(rewritten(tmp_path / "m", twice))


def test_a_second_copy_of_a_tied_matrix_must_be_equal(tmp_path: Path) -> None:
    peer(Case("roberta", "masked-lm")).save_pretrained(tmp_path / "m")

    def other(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**state, "lm_head.decoder.weight": torch.zeros(61, 48)}

    with pytest.raises(
        CheckpointError, match=r"lm_head\.decoder\.weight and .* are one tensor .* but differ"
    ):
        load_folder(rewritten(tmp_path / "m", other))


def test_the_one_bias_of_an_untied_file_may_have_its_old_name(tmp_path: Path) -> None:
    """Before version 5, transformers kept it as cls.predictions.bias alone, or under both names."""
    peer(Case("bert", "masked-lm", {"tie_word_embeddings": False})).save_pretrained(tmp_path / "m")
    both = load_folder(tmp_path / "m")
    real = load_file(tmp_path / "m" / "model.safetensors")["cls.predictions.decoder.bias"]
    assert torch.equal(both.tensors["head.out.bias"], real)
    assert both.unused == ()

    def one(state: dict[str, Tensor]) -> dict[str, Tensor]:
        bias = state.pop("cls.predictions.decoder.bias")
        return {**state, "cls.predictions.bias": bias}

    assert torch.equal(load_folder(rewritten(tmp_path / "m", one)).tensors["head.out.bias"], real)


def test_pretraining_models_of_bert(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs: Any = transformers.BertForPreTraining(Case("bert", "masked-lm").config)
    theirs.eval()
    theirs.save_pretrained(tmp_path / "m")
    folder = load_folder(tmp_path / "m")
    given, tokens = inputs(theirs)
    ours = build_model(folder)
    assert isinstance(ours, Encoder)
    wanted = theirs(**given).prediction_logits
    assert off(seen(run(ours, given, tokens), tokens), seen(wanted, tokens)) < 1e-5
    assert {name.rsplit(".", 1)[0] for name in folder.unused} == {"bert.pooler.dense", "cls.seq_relationship"}


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_pooled_vector_is_the_pooler_s(family: str, tmp_path: Path) -> None:
    theirs = peer(Case(family, "states"))
    theirs.save_pretrained(tmp_path / "m")
    ours = build_model(load_folder(tmp_path / "m", head=Head("embed", dense="tanh")))
    given, tokens = inputs(theirs)
    assert isinstance(ours, Encoder)
    assert off(run(ours, given, tokens), theirs(**given).pooler_output) < 1e-5


def test_a_folder_for_another_purpose(tmp_path: Path) -> None:
    peer(Case("bert", "answer")).save_pretrained(tmp_path / "m")
    folder = load_folder(tmp_path / "m", head=Head("states"))
    assert set(folder.unused) == {"qa_outputs.weight", "qa_outputs.bias"}
    with pytest.raises(CheckpointError, match=r"missing: cls\.predictions\.bias"):
        load_folder(tmp_path / "m", head=Head("masked-lm", dense="gelu"))
    with pytest.raises(ConfigError, match="a decoder is needed here"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"hidden_act": "gelu_13"}, "no activation 'gelu_13'"),
        ("bert", {"architectures": ["BertForNextSentencePrediction"]}, "BertForNextSentencePrediction"),
        ("bert", {"hiden_size": 48}, 'did you mean "hidden_size"'),
        ("roberta", {"pad_token_id": None}, "begin behind row"),
        ("roberta", {"pad_token_id": 19}, "must lie in 0..18; got 19"),
        ("roformer", {"rotary_value": "yes"}, "must be true or false"),
        ("roformer", {"headway": {"family": "bert"}}, "not of model_type 'roformer'"),
    ],
)
def test_what_is_not_known_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    config = {
        **Case(family, "masked-lm").config.to_dict(),
        "architectures": [CLASSES[family] + "ForMaskedLM"],
    }
    assert spec_from_config(json.loads(json.dumps(config))).family == family
    with pytest.raises(ConfigError, match=message):
        spec_from_config({**config, **changes})


SMALL: dict[str, Any] = {"vocab": 61, "width": 48, "layers": 2, "heads": 4, "hidden": 80, "init_std": 0.3}


def test_a_roformer_in_halves_is_saved_in_adjacent_pairs(tmp_path: Path) -> None:
    halves = Rotary(pairing="halves")
    model = build(ModelSpec.of("roformer", **SMALL, positions=halves, trained_context=20), seed=1).eval()
    save_folder(tmp_path / "m", model)
    theirs = transformers.RoFormerForMaskedLM.from_pretrained(tmp_path / "m", attn_implementation="eager")
    given, tokens = inputs(theirs)
    assert isinstance(model, Encoder)
    assert off(seen(run(model, given, tokens), tokens), seen(theirs(**given).logits, tokens)) < 1e-5

    turned = build(ModelSpec.of("roformer", **SMALL, positions=replace(halves, values=True)), seed=1).eval()
    with pytest.raises(ConfigError, match="keep the pairing"):
        save_folder(tmp_path / "v", turned)
    save_folder(tmp_path / "v", turned, keep_pairing=True)
    ids = given["input_ids"][:1]
    assert torch.equal(build_model(load_folder(tmp_path / "v"))(ids), turned(ids))


def test_projections_of_global_tokens_change_their_pairing_too() -> None:
    patterns = Window.around(2) | Global()
    spec = ModelSpec.of("longformer", **SMALL, positions=Rotary(pairing="halves"), patterns=patterns)
    model = build(spec, seed=1).eval()
    state, other = change_pairing(model.state_dict(), spec, "adjacent")
    ids = torch.randint(0, 61, (1, 9), generator=torch.Generator().manual_seed(0))
    tokens = Tokens.range(9).with_global([[0, 4]])
    assert off(restore(other, state)(ids, tokens=tokens), model(ids, tokens=tokens)) < 1e-5


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("bert", {"token_types": 0}, "type_vocab_size"),
        ("bert", {"order": "pre", "final_norm": True}, "order, final_norm"),
        ("bert", {"patterns": Window.around(4)}, "patterns"),
        (
            "bert",
            {"head": Head("embed", pool="mean", unit=True), "tied": False, "output_bias": False},
            "head",
        ),
        ("bert", {"kv_heads": 2}, "kv_heads"),
        ("roberta", {"positions": Learned(512)}, "positions"),
        ("roformer", {"positions": Rotary(500.0, pairing="adjacent")}, "positions"),
        ("roformer", {"positions": Rotary(pairing="adjacent", trainable=True)}, "positions"),
        ("roformer", {"linear": Linear("elu+1"), "attention_dropout": 0.0}, "linear"),
    ],
    ids=str,
)
def test_what_transformers_cannot_say_is_saved_as_headway_s_own(
    family: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    model = build(ModelSpec.of(family, **{**SMALL, **changes}), seed=1).eval()
    assert why in str(why_not_plain(model.spec))
    save_folder(tmp_path / "m", model)
    folder = load_folder(tmp_path / "m")
    assert folder.config["model_type"] == "headway"
    assert folder.spec == model.spec
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(build_model(folder)(ids), model(ids))


def test_row_84_a_roformer_is_a_wobert_with_rotary_positions() -> None:
    wobert, roformer = catalog.spec("wobert-chinese-plus-base"), catalog.spec("roformer-chinese-base")
    assert isinstance(wobert.positions, Learned)
    assert roformer.positions == Rotary(10000.0, pairing="adjacent")
    rest = {"family": "wobert", "positions": wobert.positions, "trained_context": 512}
    assert replace(roformer, **rest) == wobert


def test_row_85_wobert_is_saved_as_the_bert_that_it_is(tmp_path: Path) -> None:
    spec = ModelSpec.of("wobert", **SMALL)
    model = build(spec, seed=1).eval()
    save_folder(tmp_path / "m", model)
    assert load_folder(tmp_path / "m").spec == spec
    assert why_not_plain(spec) is None
    theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path / "m", attn_implementation="eager")
    given, tokens = inputs(theirs)
    assert isinstance(model, Encoder)
    assert off(seen(run(model, given, tokens), tokens), seen(theirs(**given).logits, tokens)) < 1e-5


def test_row_85_nezha_is_headway_s_own(tmp_path: Path) -> None:
    """Fixed vectors for distances up to 64 on keys; on values, as in the paper, they are not here, so its folders are
    not read."""
    spec = ModelSpec.of("nezha", **SMALL)
    assert spec.positions == Relative(64, sinusoidal=True)
    model = build(spec, seed=1).eval()
    save_folder(tmp_path / "m", model)
    assert config_from_spec(spec)["model_type"] == "headway"
    assert why_not_plain(spec) == "family (nezha)"
    again = build_model(load_folder(tmp_path / "m"))
    ids = torch.randint(0, 61, (1, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(again(ids), model(ids))
    with pytest.raises(ConfigError, match="'nezha' is not a family that headway knows"):
        spec_from_config({"model_type": "nezha"})
    assert all(pattern == Full() for pattern in spec.patterns)


@pytest.mark.parametrize("name", ["bert-base-uncased", "roberta-base", "roformer-chinese-base"])
def test_the_catalog_s_encoders_have_the_parameters_of_theirs(name: str) -> None:
    spec = catalog.spec(name)
    auto: Any = transformers.AutoModelForMaskedLM
    with torch.device("meta"):
        theirs = auto.from_config(transformers.AutoConfig.for_model(**config_from_spec(spec)))
    count = sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    assert count == spec.parameter_count
    assert isinstance(spec.positions, Learned | Rotary)


def test_row_85_models_prints_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["models"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    four = {
        "bert": ("bert-base-chinese", "char", "absolute"),
        "wobert": ("wobert-chinese-base", "word", "absolute"),
        "nezha": ("nezha-cn-base", "char", "classic relative"),
        "roformer": ("roformer-chinese-base", "word", "RoPE"),
    }
    for family, (name, unit, positions) in four.items():
        assert [name, family, unit, *positions.split()] in [
            line[: 3 + len(positions.split())] for line in lines
        ]
    assert cli(["models", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["family"] for row in report["compared"]] == [*four]
    assert [row["name"] for row in report["models"]] == [*catalog.names()]
    (bert,) = (row for row in report["models"] if row["name"] == "bert-base-uncased")
    assert (bert["parameters"], bert["kind"], bert["context"]) == (109_514_298, "encoder", 512)


def test_inspect_says_what_an_encoder_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Case("bert", "masked-lm").config
    transformers.BertForPreTraining(config).save_pretrained(tmp_path / "bert")
    peer(Case("roformer", "tag", {"embedding_size": 32})).save_pretrained(tmp_path / "roformer")
    assert cli(["inspect", str(tmp_path / "bert")]) == 0
    said = capsys.readouterr().out
    for part in (
        "family         bert; transformers loads it",
        "kind           encoder; gives masked-lm: logits of the token that stands there",
        "norms          LayerNorm post, behind the embedding; eps 1e-12",
        "context        20 tokens; refuses more than 20",
        "keys, values   none are kept",
        "not used       bert.pooler.dense.bias, bert.pooler.dense.weight, cls.seq_relationship.bias",
        "positions      Learned(size=20, offset=0)",
    ):
        assert part in said, part
    assert cli(["inspect", str(tmp_path / "roformer")]) == 0
    said = capsys.readouterr().out
    for part in (
        "vocabulary 61 of 32 columns, 2 token types",
        "pairing adjacent (transformers' roformer rotates adjacent pairs)",
        "20 tokens; runs beyond it too",
        "labels         no, yes, perhaps",
    ):
        assert part in said, part
    assert "not used" not in said
    assert cli(["inspect", str(tmp_path / "roformer"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["kv_bytes_per_token"], report["unused"]) == ("encoder", None, [])


def test_inspect_says_what_an_encoder_decoder_keeps(tmp_path: Path) -> None:
    size: dict[str, Any] = {"vocab": 61, "width": 48, "layers": 2, "heads": 4, "hidden": 80}
    source = ModelSpec.of("transformer", **size, causal=False, patterns=Full(), head=Head("states"))
    spec = ModelSpec.of("transformer", **{**size, "layers": 3}, encoder=source, tied=True)
    save_folder(tmp_path / "m", build(spec, seed=0), dtype=torch.bfloat16)
    found = inspect(tmp_path / "m")
    assert found.kind == "encoder-decoder"
    assert found.kv_bytes_per_token == found.memory_bytes_per_token == 3 * 2 * 48 * 2
    model = build_model(load_folder(tmp_path / "m"))
    assert isinstance(model, EncoderDecoder)
    cache = model.make_cache(model.encode(torch.zeros(1, 5, dtype=torch.long)))
    assert sum(keys.k.nbytes + keys.v.nbytes for keys in cache.memory) == 5 * found.memory_bytes_per_token
    text = inspect_text(found)
    assert "576 B per token of the target, 576 B per token of the source" in text
    assert "encoder        2 layers, width 48" in text


@pytest.mark.parametrize("name", ["bert-base-chinese", "transformer-base"])
def test_plan_is_for_decoders(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["plan", name]) == 1
    assert f"{name} is an encoder" in capsys.readouterr().err
