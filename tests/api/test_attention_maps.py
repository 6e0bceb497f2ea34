"""Attention maps and hidden states of a loaded model, against its own layers and against `transformers`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import headway
from headway.api import AttentionMap, LanguageModel, MaskedLM, TextEncoder, Translator
from headway.errors import ConfigError, DataError
from headway.models import build
from headway.patterns import visible
from headway.tokens import Tokens
from tests.api.maps import IDS, SPECS, loaded, maps_of
from tests.checkpoints import decoders, hf, seq2seq
from tests.generate.conftest import MIXED, small
from tests.small_bert import TEXTS, bert
from tests.text.conftest import byte_level


def joined_heads(call: Callable[[], Any], layers: list[Any]) -> list[Tensor]:
    """Returns the inputs of the layers' output projections while `call` runs, [T, H, E] each."""
    inputs: list[Tensor] = []
    handles = [
        layer.o_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0])) for layer in layers
    ]
    call()
    for handle in handles:
        handle.remove()
    return [
        joined.unflatten(1, (layer.heads.query_heads, -1))
        for joined, layer in zip(inputs, layers, strict=True)
    ]


def mean_of(attention_map: AttentionMap) -> Tensor:
    """Returns the weights times the values for each query, [T, H, E]."""
    rows = [
        torch.einsum("hs,hse->he", attention_map.row(i), attention_map.values(i))
        for i in range(len(attention_map.queries))
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("name", SPECS)
def test_weights_times_values_are_what_the_output_projection_is_given(name: str) -> None:
    """In float64, up to the rounding of sums of about twenty terms."""
    lm = loaded(SPECS[name])
    inputs = joined_heads(lambda: maps_of(lm), [block.self_attn for block in lm.model.model.blocks])
    maps = maps_of(lm)
    assert [*maps] == [0, 1]
    for attention_map, expected in zip(maps.values(), inputs, strict=True):
        assert torch.allclose(mean_of(attention_map), expected, rtol=1e-12, atol=1e-12)
        assert attention_map.weights().dtype == torch.float64


def test_those_of_the_kernels_too() -> None:
    """In float32 a weight is off by its score's rounding, |score| < 30 ulps at most, and so is the mean of values."""
    lm = LanguageModel(small(MIXED), byte_level())
    text = "the cat sat on the mat, and " * 8
    inputs = joined_heads(lambda: lm.attention(text), [block.self_attn for block in lm.model.model.blocks])
    for attention_map, expected in zip(lm.attention(text).values(), inputs, strict=True):
        largest = attention_map.values().abs().max()
        assert (mean_of(attention_map) - expected).abs().max() <= 30 * torch.finfo(
            torch.float32
        ).eps * largest


@pytest.mark.parametrize("name", SPECS)
def test_rows_are_the_whole_and_layers_and_heads_are_chosen(name: str) -> None:
    lm = loaded(SPECS[name])
    maps = maps_of(lm)
    whole = maps[1].weights()
    count = len(maps[1].queries)
    assert whole.shape == (4, count, count)
    for i in (0, 3, -1):
        assert torch.allclose(maps[1].row(i), whole[:, i], rtol=1e-12, atol=1e-14)
    chosen = maps_of(lm, layers=-1, heads=[3, 0])
    assert [*chosen] == [1]
    assert chosen[-1] is chosen[1]
    assert torch.allclose(chosen[1].weights([2, 5]), whole[[3, 0]][:, [2, 5]], rtol=1e-12, atol=1e-14)
    assert torch.equal(chosen[1].values(2), maps[1].values(2)[[3, 0]])


@pytest.mark.parametrize("name", [name for name in SPECS if "linear attention" not in name])
def test_a_row_is_a_distribution_over_what_the_pattern_allows(name: str) -> None:
    lm = loaded(SPECS[name])
    for layer, attention_map in maps_of(lm).items():
        tokens = Tokens.range(len(attention_map.queries))
        tokens = tokens.with_global([0]) if name == "global projections" else tokens
        assert attention_map.pattern == lm.spec.patterns[layer]
        allowed = visible(attention_map.pattern, tokens, tokens)[0]
        assert torch.equal(attention_map.weights() > 0, allowed.expand(4, -1, -1))
        assert torch.allclose(
            attention_map.weights().sum(-1), torch.ones(4, len(attention_map.queries)).double()
        )


def test_tokens_are_told_by_their_texts() -> None:
    lm = loaded(SPECS["window with sinks, full"])
    assert lm.attention("the cat")[0].keys == ("<|begin|>", "the", " c", "at")
    assert lm.attention("猫")[0].keys[1:] == tuple(
        lm.tokenizer.token(i) for i in lm.tokenizer.encode("猫")[1:]
    )
    by_number = LanguageModel(lm.model).attention(torch.tensor([7, 11]))[0]
    assert by_number.keys == by_number.queries == ("7", "11")
    assert repr(by_number) == (
        "AttentionMap(layer 0, heads 0, 1, 2, 3, 2 queries x 2 keys, Window.last(5) | Causal() & Sink(2))"
    )


class _Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is computed."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.most = max(self.most, tensor.numel())
        return out


@pytest.mark.parametrize("name", ["window with sinks, full", "linear attention, rotated"])
def test_a_row_takes_memory_in_proportion_to_the_keys(name: str) -> None:
    """No tensor has more elements than the keys, which are 32 each; all weights would be 1500 for each key."""
    spec = SPECS[name]
    kind, model, count = LanguageModel if spec.causal else TextEncoder, build(spec, seed=3).eval(), 1500
    attention_map = kind(model, byte_level()).attention("?" * count, layers=[1])[1]  # type: ignore[arg-type]
    with _Largest() as largest:
        attention_map.row(count // 2)
    assert 0 < largest.most <= 32 * len(attention_map.keys)


# -- transformers --------------------------------------------------------------------------------------------------


LLAMA = hf.config_dict("llama")
MISTRAL = hf.config_dict("mistral", sliding_window=5)
QWEN3 = hf.config_dict("qwen3", head_dim=8)


def close(ours: Any, theirs: Any) -> None:
    """Compares in float32; both models have the same weights of deviation 0.3, in three layers."""
    assert len(ours) == len(theirs)
    for actual, expected in zip(ours, theirs, strict=True):
        assert hf.off(actual, expected[0]) < 2e-5


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", *decoders.MAIN])
def test_decoders_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    configs = {"llama": LLAMA, "mistral": MISTRAL, "qwen3": QWEN3}
    model = hf.peer(configs[name]) if name in configs else decoders.theirs(name)
    if decoders.kernel(model.config) == "sdpa":
        model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    lm = headway.load(tmp_path)
    with torch.no_grad():
        eager = decoders.kernel(model.config) == "eager"
        out = model(torch.tensor([IDS]), output_hidden_states=True, output_attentions=eager)
    ours, theirs = lm.hidden_states(IDS), out.hidden_states
    if (
        name == "mamba 2"
    ):  # theirs begin behind the first layer and end with the last one without and with its norm
        ours, theirs = ours[1:], (*theirs[:-2], theirs[-1])
    if (
        model.config.model_type == "nemotron_h"
    ):  # theirs are one for each sub-layer: [mixer, mlp, mixer] are two layers
        following = [*model.config.layers_block_type[1:], None]
        ends = [i for i, kind in enumerate(following, 1) if kind not in ("mlp", "moe")]
        theirs = [theirs[i] for i in (0, *ends)]
    if (
        name == "gemma3n"
    ):  # theirs hold all streams, also behind the last layer, where ours are joined and normed
        ours, theirs = ours[:-1], [streams[0] for streams in theirs[:-1]]
    close(ours, theirs)
    if eager and lm.spec.softmax_layers:
        rows = [attention_map.weights() for attention_map in lm.attention(IDS).values()]
        if (
            lm.spec.sink_logit
        ):  # theirs sum to 1 over the keys; the sink's share is taken from their outputs instead
            rows = [row / row.sum(-1, keepdim=True) for row in rows]
        close(rows, out.attentions)
    first, last = lm.hidden_states(IDS, layers=[0, -1])
    assert torch.equal(first, lm.hidden_states(IDS)[0])
    with torch.no_grad():
        assert torch.equal(last, lm.model.hidden(torch.tensor([IDS]))[0])


def test_encoders_are_those_of_transformers(tmp_path: Path) -> None:
    path, model = bert(tmp_path, "ForMaskedLM", attn_implementation="eager")
    filler = headway.load(path, dtype="float32")
    assert isinstance(filler, MaskedLM)
    for text in (TEXTS[0], ("the cat sat", "who ran home")):
        maps = filler.attention(text)
        (encoded,) = filler.need_tokenizer().inputs([text])
        with torch.no_grad():
            out = model(
                torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.token_types]),
                output_hidden_states=True, output_attentions=True,
            )  # fmt: skip
        assert maps[0].keys[0] == "[CLS]"
        close(filler.hidden_states(text), out.hidden_states)
        close([attention_map.weights() for attention_map in maps.values()], out.attentions)
    with pytest.raises(ConfigError, match="text 0 has 26 tokens, but this model reads at most 24"):
        filler.attention("the " * 24)


@pytest.mark.parametrize("name", ["marian", "mbart", "t5 1.1"])
def test_translators_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = seq2seq.theirs(name)
    model.save_pretrained(tmp_path)
    translator = headway.load(tmp_path)
    assert isinstance(translator, Translator)
    source, target = seq2seq.SOURCE[0].tolist(), seq2seq.TARGET[0].tolist()
    with torch.no_grad():
        out = model(
            input_ids=seq2seq.SOURCE[:1], decoder_input_ids=seq2seq.TARGET[:1],
            output_hidden_states=True, output_attentions=True,
        )  # fmt: skip
    maps, states = translator.attention(source, target), translator.hidden_states(source, target)
    for ours, theirs in (
        (maps.encoder, out.encoder_attentions),
        (maps.decoder, out.decoder_attentions),
        (maps.cross, out.cross_attentions),
    ):
        close([attention_map.weights() for attention_map in ours.values()], theirs)
    close(states.encoder, out.encoder_hidden_states)
    close(states.decoder, out.decoder_hidden_states)
    assert (maps.cross[0].queries, maps.cross[0].keys) == (
        tuple(map(str, target)),
        tuple(map(str, source)),
    )


# -- refusals ------------------------------------------------------------------------------------------------------


def test_what_is_not_there_is_refused() -> None:
    lm = loaded(SPECS["window with sinks, full"])
    for options, match in (
        ({"layers": [2]}, r"layers: 2 is not in 0\.\.1 \(or -2\.\.-1, counted from the end\)"),
        ({"layers": [0, -2]}, r"layers: give one or more numbers without duplicates"),
        ({"layers": []}, "layers: give one or more numbers"),
        ({"heads": 4}, r"heads: 4 is not in 0\.\.3"),
        ({"heads": ["a"]}, "heads: 'a' is not in"),
    ):
        with pytest.raises(ConfigError, match=match):
            lm.attention("the cat", **options)
    with pytest.raises(ConfigError, match=r"layers: 3 is not in 0\.\.2"):
        lm.hidden_states("the cat", layers=3)
    with pytest.raises(DataError, match="take one text or its token ids, got several"):
        lm.attention(["the cat", "a dog"])
    with pytest.raises(DataError, match="prompt 0: token id 330 at place 1 is outside"):
        lm.hidden_states([0, 330])
    maps = lm.attention("the cat", layers=[0])
    with pytest.raises(KeyError, match="layer 1; there are maps of 0"):
        maps[1]
    with pytest.raises(DataError, match=r"there is no query 4; the text has 4 tokens, 0\.\.3"):
        maps[0].row(4)
