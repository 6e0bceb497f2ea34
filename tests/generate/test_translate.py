"""Encoder-decoders write what transformers does: greedy and by beams, sources of different lengths in one batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM
from transformers import GenerationConfig as TheirConfig

from headway.checkpoints.folder import load_folder
from headway.checkpoints.restore import build_model
from headway.errors import ConfigError, DataError, HeadwayError
from headway.generate import Beams, GenerationConfig, Sampling
from headway.generate.translate import translate
from headway.models import EncoderDecoder, ModelSpec, build

V, PAD, EOS, START = 40, 39, 7, 39
SIZE: dict[str, Any] = {
    "vocab_size": V,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
T5 = {"vocab_size": V, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "marian": ("marian", {**SIZE, "scale_embedding": True}, {"forced_eos_token_id": EOS}),
    "bart": ("bart", SIZE, {"forced_bos_token_id": 3, "forced_eos_token_id": EOS}),
    "t5": ("t5", {**T5, "feed_forward_proj": "gated-gelu"}, {}),
    "mt5": ("mt5", T5, {}),
    "pegasus": ("pegasus", {**SIZE, "activation_function": "relu"}, {"forced_eos_token_id": EOS}),
    # this family has no position for the padding id, from which the other families' targets start
    "m2m_100": ("m2m_100", SIZE, {"decoder_start_token_id": EOS, "forced_bos_token_id": 3}),
}
SOURCES = [[5, 9, 1, 7], [4, 7], [2, *range(20, 32), 7], [3, 3, 3, 3, 7]]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Any, dict[str, Any]]:
    """Returns (transformers' model, ours, the content of generation_config.json)."""
    family, settings, forced = FAMILIES[request.param]
    ids = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None, "decoder_start_token_id": START}
    theirs = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **settings, **ids))
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, p in theirs.named_parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=g) * 0.3 + (key.endswith("weight") and p.dim() == 1))
        if hasattr(theirs, "final_logits_bias"):
            theirs.final_logits_bias[:, EOS] = 1.5
    theirs.generation_config = TheirConfig(**{**ids, **forced}, bad_words_ids=[[PAD]])
    path: Path = tmp_path_factory.mktemp("theirs")
    theirs.eval().save_pretrained(path)
    folder = load_folder(path)
    ours = build_model(folder)
    assert isinstance(ours, EncoderDecoder)
    return theirs, ours, dict(folder.generation)


def asked(
    theirs: Any, sources: list[list[int]], **options: Any
) -> list[list[tuple[list[int], float | None]]]:
    """Returns (new ids, score) of each hypothesis of each source, by transformers."""
    longest = max(map(len, sources))
    ids = torch.tensor([s + [PAD] * (longest - len(s)) for s in sources])
    mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in sources])
    with torch.inference_mode():
        out = theirs.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=12, output_scores=True,
            return_dict_in_generate=True, **options,
        )  # fmt: skip
    scores = out.sequences_scores.tolist() if options.get("num_beams", 1) > 1 else [None] * len(out.sequences)
    hypotheses = []
    for row, score in zip(out.sequences[:, 1:].tolist(), scores, strict=True):
        end = row.index(EOS) + 1 if EOS in row else len(row)
        hypotheses.append((row[:end], score))
    n = options.get("num_return_sequences", 1)
    return [hypotheses[i : i + n] for i in range(0, len(hypotheses), n)]


@pytest.mark.parametrize("cached", [True, False])
def test_row_25_greedy_is_theirs(pair: tuple[Any, Any, dict[str, Any]], cached: bool) -> None:
    theirs, ours, generation = pair
    expected = [ids for ((ids, _),) in asked(theirs, SOURCES)]
    outputs = translate(
        ours, SOURCES, GenerationConfig(max_new_tokens=12, use_cache=cached), generation=generation
    )
    assert [output.ids for output in outputs] == expected
    assert [output.finish_reason == "eos" for output in outputs] == [ids[-1] == EOS for ids in expected]
    assert [output.prompt_tokens for output in outputs] == [4, 2, 14, 5]
    assert len({tuple(ids) for ids in expected}) > 1
    by_one_beam = translate(
        ours, SOURCES, GenerationConfig(max_new_tokens=12, beams=Beams(1)), generation=generation
    )
    assert [output.ids for output in by_one_beam] == expected


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"length_penalty": 2.0},
        {"length_penalty": 0.0, "early_stopping": True},
        {"early_stopping": "never"},
    ],
    ids=str,
)
def test_row_26_beams_are_theirs(pair: tuple[Any, Any, dict[str, Any]], how: dict[str, Any]) -> None:
    theirs, ours, generation = pair
    beams = Beams(4, n_best=3, with_greedy=False, **how)
    outputs = translate(
        ours, SOURCES, GenerationConfig(max_new_tokens=12, beams=beams), generation=generation
    )
    expected = asked(theirs, SOURCES, num_beams=4, num_return_sequences=3, **how)
    for output, texts in zip(outputs, expected, strict=True):
        assert [list(h.ids) for h in output.hypotheses] == [ids for ids, _ in texts]
        assert [h.score for h in output.hypotheses] == pytest.approx(
            [s for _, s in texts], abs=1e-5, rel=1e-5
        )


def test_row_26_beams_score_no_less_than_greedy(pair: tuple[Any, Any, dict[str, Any]]) -> None:
    _, ours, generation = pair
    greedy, best = (
        translate(ours, SOURCES, GenerationConfig(max_new_tokens=12, beams=Beams(n)), generation=generation)
        for n in (1, 5)
    )
    assert all(b.score > g.score - 1e-6 for b, g in zip(best, greedy, strict=True))


def test_a_source_alone_gives_what_it_gives_beside_others(pair: tuple[Any, Any, dict[str, Any]]) -> None:
    _, ours, generation = pair
    for settings in (
        GenerationConfig(max_new_tokens=12, beams=Beams(3)),
        GenerationConfig(
            max_new_tokens=12, sampling=Sampling(temperature=1.0, repetition_penalty=1.3), seed=5
        ),
    ):
        together = translate(ours, SOURCES, settings, generation=generation)
        for i, source in enumerate(SOURCES):
            (alone,) = translate(ours, [source], settings, generation=generation, requests=[i])
            assert alone.ids == together[i].ids
        in_twos = translate(ours, SOURCES, settings, generation=generation, batch_size=2)
        assert [output.ids for output in in_twos] == [output.ids for output in together]


def test_row_15_keys_of_the_source_are_computed_once(pair: tuple[Any, Any, dict[str, Any]]) -> None:
    _, ours, generation = pair
    calls: list[str] = []
    handles = [
        layer.register_forward_hook(lambda module, args, out, name=name: calls.append(name))
        for name, layer in ours.named_modules()
        if name.endswith(("cross_attn.k_proj", "cross_attn.v_proj", "encoder.layers.0.self_attn.k_proj"))
    ]
    for beams in (None, Beams(4)):
        calls.clear()
        translate(ours, SOURCES, GenerationConfig(max_new_tokens=12, beams=beams), generation=generation)
        assert len(calls) == len(set(calls)) == len(handles) == 5
    for handle in handles:
        handle.remove()


def test_padding_is_never_written_and_training_goes_on() -> None:
    """The padding token has by far the largest logit."""
    model = build(ModelSpec.of_pair("marian", vocab=9, width=16, layers=1, heads=2, hidden=16), seed=0)
    assert isinstance(model, EncoderDecoder)
    assert model.lm_head.bias is not None
    model.lm_head.bias.data[8] = 100.0
    ids = {"decoder_start_token_id": 8, "eos_token_id": 0}
    free = translate(model, [[1, 2]], GenerationConfig(max_new_tokens=5), generation=ids)
    assert free[0].ids == [8] * 5
    for config in ({**ids, "pad_token_id": 8}, {**ids, "bad_words_ids": [[8]]}):
        assert (
            8 not in translate(model, [[1, 2]], GenerationConfig(max_new_tokens=5), generation=config)[0].ids
        )
    assert model.training
    assert translate(model, [[1, 2]], GenerationConfig(max_new_tokens=0), generation=ids)[0].ids == []


class Letters:
    """A tokenizer that writes ids as letters."""

    def decode(self, ids: Any, *, after: Any = (), special: Any = ()) -> str:
        assert [*after] == [], "a source is no beginning of its text"
        return "".join(chr(97 + i) for i in ids)


def test_text_is_without_the_end(pair: tuple[Any, Any, dict[str, Any]]) -> None:
    _, ours, generation = pair
    for beams in (None, Beams(3, n_best=2)):
        settings = GenerationConfig(max_new_tokens=12, beams=beams)
        for output in translate(ours, SOURCES, settings, generation=generation, tokenizer=Letters()):
            assert output.text == Letters().decode([i for i in output.ids if i != EOS])
            assert all(len(h.text) == len(h.ids) - (h.finish_reason == "eos") for h in output.hypotheses)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"generation": {}}, "decoder_start_token_id .* must be one token id, got None"),
        ({"generation": {"decoder_start_token_id": 99}}, r"must be a token id in 0\.\.8, got 99"),
        ({"generation": {"decoder_start_token_id": 8, "bad_words_ids": [[1, 2]]}}, "only single ids"),
        ({"generation": {"decoder_start_token_id": 8, "bad_words_ids": [1]}}, r"only single ids, as \[id\]"),
        (
            {"generation": {"decoder_start_token_id": 8, "forced_eos_token_id": [0, 1]}},
            "must be one token id, got",
        ),
        (
            {"settings": GenerationConfig(prefill_chunk=2)},
            "prefill_chunk=2 has no effect on an encoder-decoder",
        ),
        ({"settings": GenerationConfig(stop=["a"])}, r"stop=\['a'\] has no effect"),
        ({"settings": GenerationConfig(max_new_tokens=60)}, "was trained on 32"),
        ({"sources": [[1], [1] * 33]}, "source 1 has 33 tokens, more than the 32 of this model's encoder"),
        ({"sources": []}, "the batch is empty"),
        ({"sources": [[1], [9]]}, "prompt 1: token id 9"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
        ({"requests": [1, 2]}, "2 numbers for 1 sources"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    spec = ModelSpec.of_pair(
        "marian", vocab=9, width=16, layers=1, heads=2, hidden=16, trained_context=32, dropout=0.0
    )
    arguments = {"sources": [[1, 2]], "settings": None, "generation": {"decoder_start_token_id": 8}, **change}
    with pytest.raises((ConfigError, DataError), match=message):
        translate(build(spec, seed=0), arguments.pop("sources"), arguments.pop("settings"), **arguments)  # type: ignore[arg-type]


def test_broken_weights_name_the_step() -> None:
    model = build(ModelSpec.of_pair("marian", vocab=9, width=16, layers=1, heads=2, hidden=16), seed=0)
    assert isinstance(model, EncoderDecoder)
    assert model.lm_head.bias is not None
    model.lm_head.bias.data.fill_(float("nan"))
    with pytest.raises(HeadwayError, match="request 0 at step 0 are not numbers"):
        translate(model, [[1, 2]], generation={"decoder_start_token_id": 8})


@pytest.mark.parametrize("beams", [None, Beams(3, length_penalty=0.0, with_greedy=False)], ids=str)
def test_a_prefix_is_what_targets_begin_with(
    pair: tuple[Any, Any, dict[str, Any]], beams: Beams | None
) -> None:
    """In transformers prefixes are decoder_input_ids; the same ids must follow them, each source with its own
    prefix."""
    theirs, ours, generation = pair
    if "forced_bos_token_id" in generation:  # transformers drops it if the decoder gets more than its start
        generation = {**generation, "forced_bos_token_id": None}
    prefixes = [[11], [2, 30], [9, 9, 9], []]
    config = GenerationConfig(max_new_tokens=12, beams=beams)
    outputs = translate(ours, SOURCES, config, generation=generation, prefixes=prefixes)
    width = 1 if beams is None else beams.width
    for source, prefix, output in zip(SOURCES, prefixes, outputs, strict=True):
        begun = torch.tensor([[generation["decoder_start_token_id"], *prefix]])
        with torch.inference_mode():
            out = theirs.generate(
                input_ids=torch.tensor([source]), decoder_input_ids=begun, max_new_tokens=12 - len(prefix),
                num_beams=width, length_penalty=0.0, forced_bos_token_id=None,
            )  # fmt: skip
        row = out[0, 1:].tolist()
        expected = row[: row.index(EOS, len(prefix)) + 1] if EOS in row[len(prefix) :] else row
        assert output.ids[: len(prefix)] == prefix
        assert output.ids == expected
    with pytest.raises(DataError, match="3 prefixes for 4 sources; give one for each"):
        translate(ours, SOURCES, config, generation=generation, prefixes=prefixes[:3])
    with pytest.raises(ConfigError, match="prefix: token id 40 is outside the model's vocabulary of 40"):
        translate(ours, SOURCES, config, generation=generation, prefixes=[[V]] * 4)
