"""Texts of one batch with different adapters: each equals its text alone, on a model with only those adapters."""

from collections.abc import Callable, Sequence
from copy import deepcopy

import pytest
import torch

from headway.cache import PAGE
from headway.errors import ConfigError
from headway.generate import Beams, Engine, GenerationConfig, NgramDraft, Reader, generate
from headway.models import Decoder, EncoderDecoder, build
from headway.nn import Lora, attach, merge, set_active
from headway.nn.adapters import Adapter
from headway.patterns import Causal, Window
from tests.generate.conftest import small
from tests.generate.engines import SUMS, drain, ids_of, text_of, used
from tests.models.test_encoder import seq2seq
from tests.pairwise import chequered
from tests.tolerance import assert_within_reference

OWN: list[Sequence[str] | None] = [None, [], ["tone"], ["style"], ["style", "tone"], None]
PROMPTS = [[7, 8, 9], [7, 8, 9], [7, 8, 9], [7, 8, 9], [7, 8, 9], [20, 30, 40, 50]]


def with_adapters(model: Decoder | EncoderDecoder, *, magnitude: bool = False) -> Decoder:
    """Returns a copy with "tone" on all layers and "style", of another rank, on some; both change the logits."""
    adapted = deepcopy(model)
    for name, lora, targets in (
        ("tone", Lora(rank=2, alpha=3.0, magnitude=magnitude), ()),
        ("style", Lora(rank=3, alpha=4.0), ("q_proj", "down_proj")),
    ):
        adapter = Adapter.fresh(adapted, lora, targets, seed=len(targets))
        generator = torch.Generator().manual_seed(len(targets))
        for value in adapter.tensors.values():
            value += 0.3 * torch.randn(value.shape, generator=generator).to(value.dtype)
        attach(adapted, adapter, name)
    return adapted.eval()  # type: ignore[return-value]


MODELS: dict[str, Callable[[], Decoder]] = {
    "native steps": lambda: with_adapters(small(Causal(), context=512)),
    "windows": lambda: with_adapters(small(Window.last(70), context=512)),
    "magnitudes": lambda: with_adapters(small(Causal(), context=512), magnitude=True),
    "sums": lambda: with_adapters(build(SUMS, seed=3).eval()),  # type: ignore[arg-type]
    "modules": lambda: with_adapters(small(Causal(), context=512).double()),  # type: ignore[arg-type]
}

READINGS: dict[str, dict] = {
    "plain": {},
    "no-cache": {"use_cache": False},
    "beams": {"beams": Beams(3)},
    "chunks": {"prefill_chunk": 2},
}


def alone(
    model: Decoder, prompt: list[int], config: GenerationConfig, names: Sequence[str] | None
) -> list[int]:
    """Returns the text of a model on which only those adapters are active."""
    set_active(
        model, ["tone", "style"] if names is None else [name for name in ("tone", "style") if name in names]
    )
    try:
        return generate(model, [prompt], config)[0].ids
    finally:
        set_active(model, ["tone", "style"])


@chequered("reading,kind", list(READINGS), list(MODELS))
def test_each_text_has_its_own_adapters(reading: str, kind: str) -> None:
    model, options = MODELS[kind](), READINGS[reading]
    assert Reader(model).steps.what == ("modules" if kind == "modules" else "native")
    configs = [GenerationConfig(max_new_tokens=8, adapters=names, **options) for names in OWN]
    actual = [generation.ids for generation in generate(model, PROMPTS, configs)]
    plain = GenerationConfig(max_new_tokens=8, **options)
    assert actual == [alone(model, prompt, plain, names) for prompt, names in zip(PROMPTS, OWN, strict=True)]
    assert len({tuple(ids) for ids in actual[:4]}) == 4, "each adapter is seen"


def test_a_step_without_names_adds_all_adapters_again() -> None:
    model = MODELS["native steps"]()
    engine = Engine(Reader(model))
    for names in (["tone"], None, [], None):
        engine.add(text := text_of(0, [7, 8, 9], GenerationConfig(max_new_tokens=6, adapters=names)))
        drain(engine)
        assert ids_of(text) == alone(model, [7, 8, 9], GenerationConfig(max_new_tokens=6), names)


def test_a_native_step_in_bfloat16_is_as_near_as_each_text_is_alone() -> None:
    models = {t: MODELS["native steps"]().to(t) for t in (torch.float64, torch.bfloat16)}
    name_lists = OWN[:5]

    def logits(dtype: torch.dtype, requested: list[Sequence[str] | None]) -> torch.Tensor:
        reader = Reader(models[dtype])
        chunks = [(reader.open([], names), [7]) for names in requested]
        return reader.read(chunks, [[0]] * len(requested), adapters=requested)

    exact, low = (
        torch.cat([logits(t, [names]) for names in name_lists]) for t in (torch.float64, torch.bfloat16)
    )
    assert_within_reference(logits(torch.bfloat16, name_lists), exact, low)
    assert (exact[0] - exact[1]).abs().max() > 0.1


def test_drafts_of_texts_with_adapters_are_checked_with_them() -> None:
    model, draft = MODELS["native steps"](), NgramDraft(tokens=3, least=1)
    prompts = [[5, 6] * 10] * 4
    configs = [GenerationConfig(max_new_tokens=20, adapters=names) for names in OWN[:4]]
    actual = generate(model, prompts, configs, draft=draft)
    plain = GenerationConfig(max_new_tokens=20)
    assert [generation.ids for generation in actual] == [
        alone(model, prompt, plain, names) for prompt, names in zip(prompts, OWN, strict=False)
    ]


def test_beginnings_are_shared_by_texts_of_the_same_adapters_alone() -> None:
    model = MODELS["native steps"]()
    engine, prompt = Engine(Reader(model, keep=1 << 24)), [*range(2 * PAGE + 1)]
    read: list[int] = []
    begin = engine.reader.cache.begin

    def counted(chunks: Sequence[tuple[object, Sequence[int]]]) -> object:
        read.append(sum(len(ids) for _, ids in chunks))
        return begin(chunks)  # type: ignore[arg-type]

    engine.reader.cache.begin = counted  # type: ignore[method-assign, assignment]
    name_lists: list[Sequence[str] | None] = [
        None,
        ["tone"],
        [],
        ["style", "tone"],
        ("tone",),
        ["tone", "style"],
        [],
    ]
    for number, names in enumerate(name_lists):
        config = GenerationConfig(max_new_tokens=1, adapters=names, prefix_cache=True)
        engine.add(text_of(number, prompt, config))
        drain(engine)
    # None shares with both names in any order: they are all names
    assert read == [129, 129, 129, 1, 1, 1, 1]
    assert used(engine) == 0


def test_names_that_are_not_added_are_refused() -> None:
    model = MODELS["native steps"]()
    engine = Engine(Reader(model))
    with pytest.raises(ConfigError, match=r"'tones' is not active \(did you mean"):
        engine.add(text_of(0, [7], GenerationConfig(max_new_tokens=1, adapters=["tones"])))
    with pytest.raises(ConfigError, match="adapters is a list of names, got 'tone'; write a single name as"):
        GenerationConfig(adapters="tone")
    with pytest.raises(ConfigError, match=r"adapters is a list of names, got \[1\]"):
        GenerationConfig(adapters=[1])  # type: ignore[list-item]
    set_active(model, ["style"])
    with pytest.raises(ConfigError, match="'tone' is not active; active and not merged: style"):
        generate(model, [[7]], GenerationConfig(adapters=["tone"]))
    merge(model)
    with pytest.raises(ConfigError, match="'style' is not active; active and not merged: none"):
        generate(model, [[7]], GenerationConfig(adapters=["style"]))


def test_an_encoder_decoder_reads_its_sources_for_all_texts_alike() -> None:
    model = with_adapters(build(seq2seq(), seed=5).eval())  # type: ignore[arg-type]
    reader = Reader(model)
    reader.check_adapters(None)
    with pytest.raises(ConfigError, match="an encoder-decoder has the same adapters for all texts"):
        reader.check_adapters(["tone"])
