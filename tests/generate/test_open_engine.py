"""An engine that stays open: calls find what earlier calls stored, and never what another model stored."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway.api import LanguageModel
from headway.errors import ConfigError
from headway.generate import GenerationConfig, Reader
from headway.generate.loop import OpenEngine, weights_of
from headway.models import Decoder, ModelSpec, build
from headway.models.quantize import quantize_model
from headway.nn import Lora, adapters
from headway.patterns import Causal
from tests.cache.page_counts import page_counts
from tests.generate.conftest import MIXED, small

PROMPT = [7, 8, 9] * 50


@pytest.fixture
def lm() -> LanguageModel:
    return LanguageModel(small(Causal(), context=512))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the list to which every step appends its number of tokens."""
    counts: list[int] = []
    plain = Reader.read

    def counting(self: Reader, chunks: Any, *rest: Any) -> Any:
        counts.append(sum(len(ids) for _, ids in chunks))
        return plain(self, chunks, *rest)

    monkeypatch.setattr(Reader, "read", counting)
    return counts


def ids(lm: LanguageModel, prompt: list[int] = PROMPT, **options: Any) -> list[int]:
    return lm.generate(prompt, **{"max_new_tokens": 3, "prefix_cache": True, **options}).ids


def alone(lm: LanguageModel) -> list[int]:
    return LanguageModel(lm.model).generate(PROMPT, max_new_tokens=3).ids


def test_a_call_reads_what_no_earlier_one_stored(lm: LanguageModel, read: list[int]) -> None:
    assert ids(lm) == alone(lm)
    del read[:]
    assert ids(lm) == alone(lm)
    assert read[0] == 150 - 128, "two pages of 64 are there"
    del read[:]
    ids(lm, prefix_cache=False)
    assert read[0] == 150
    for count in (150, 150 - 128):
        del read[:]
        ids(lm, kv_cache_dtype="int8")
        assert read[0] == count
    lm.close()
    del read[:]
    ids(lm)
    assert read[0] == 150
    with pytest.raises(ConfigError, match="prefix_cache needs use_cache=True"):
        ids(lm, use_cache=False)


def nudge(model: Decoder) -> None:
    model.model.blocks[0].self_attn.v_proj.weight.data.add_(0.1)


def trained(model: Decoder) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model(torch.tensor([PROMPT])).logsumexp(-1).mean().backward()
    optimizer.step()


def adapted(model: Decoder) -> None:
    adapters.attach(model, adapters.Adapter.fresh(model, Lora(rank=2)), "tone")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "adapters" in name:
                p.add_(0.3)


def hooked(model: Decoder) -> None:
    model.model.blocks[0].register_forward_hook(lambda module, args, out: out + 1.0)


def quantized(model: Decoder) -> None:
    quantize_model(model, "int4")


CHANGES: dict[str, Callable[[Decoder], None]] = {
    "data": nudge,
    "training": trained,
    "adapter": adapted,
    "hook": hooked,
    "quantized": quantized,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed_finds_nothing(lm: LanguageModel, read: list[int], change: str) -> None:
    ids(lm)
    CHANGES[change](lm.model)
    del read[:]
    changed = ids(lm)
    assert read[0] == 150
    assert changed == alone(lm)


def test_adapters_that_are_switched_and_merged_are_other_models(lm: LanguageModel, read: list[int]) -> None:
    adapted(lm.model)
    before = ids(lm)
    changes: list[Callable[[], None]] = [
        lambda: adapters.set_active(lm.model, []),
        lambda: adapters.set_active(lm.model, ["tone"]),
        lambda: adapters.merge(lm.model),
        lambda: adapters.unmerge(lm.model),
    ]
    for change in changes:
        change()
        del read[:]
        assert ids(lm) == alone(lm)
        assert read[0] == 150
    assert ids(lm) == before


def test_a_model_that_is_left_alone_is_the_same(lm: LanguageModel) -> None:
    before = weights_of(lm.model)
    lm.generate([1], max_new_tokens=2)
    with torch.no_grad():
        lm.model(torch.tensor([[1, 2]]))
    assert weights_of(lm.model) == before


def test_threads_share_the_engine_of_a_model() -> None:
    lm = LanguageModel(small(MIXED))
    expected = [lm.generate([n, 1], max_new_tokens=6).ids for n in range(4)]
    texts: list[Any] = [None] * 4
    begin = threading.Barrier(4)

    def work(n: int) -> None:
        begin.wait()
        texts[n] = (
            lm.generate([n, 1], max_new_tokens=6).ids
            if n % 2
            else [d.token for d in lm.stream([n, 1], max_new_tokens=6)]
        )

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [[token for token in text if token is not None] for text in texts] == expected


def test_a_stream_that_is_left_frees_its_pages(lm: LanguageModel) -> None:
    stream = lm.stream(PROMPT, max_new_tokens=50)
    next(stream)
    engine = lm.engine.engine(lm.model, GenerationConfig())
    assert len(engine.running) == 1
    stream.close()  # type: ignore[attr-defined]
    assert engine.is_idle
    assert sum(counts["used"] for counts in page_counts(engine.reader.cache.pool)) == 0


@pytest.mark.parametrize("keep", [0, 20 * 64 * 2 * 2 * 8 * 4])
def test_memory_is_given_back(keep: int) -> None:
    """After much longer texts, at most twice the memory that is to be kept stays allocated."""
    model = small(MIXED, context=4096)
    lm = LanguageModel(model)
    lm.engine.keep = keep
    prompts = [[n] * 900 for n in range(4)]
    expected = [LanguageModel(model).generate(p, max_new_tokens=3).ids for p in prompts]
    answers = lm.generate(prompts, max_new_tokens=3, prefix_cache=True, batch_size=1)
    assert [g.ids for g in answers] == expected
    reader = lm.engine.engine(lm.model, GenerationConfig()).reader
    cache = reader.cache
    layers = [layer.tensors for layer in cache.layers]  # type: ignore[union-attr]
    assert sum(t.nbytes for tensors in layers for t in tensors) <= 2 * keep
    assert cache.pool.idle <= keep
    table = reader.open(prompts[3])
    assert len(table) == (896 if keep else 0), "the latest text is kept as a whole"
    cache.pool.close(table)
    for n in reversed(range(4)):
        assert lm.generate(prompts[n], max_new_tokens=3, prefix_cache=True).ids == expected[n]


def test_a_model_and_its_copies_have_engines_of_their_own(lm: LanguageModel) -> None:
    expected, engine = ids(lm), lm.engine
    for other in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm))):
        assert isinstance(other.engine, OpenEngine)
        assert other.engine is not engine
        assert other.model is not lm.model
        assert ids(other) == expected
    lm.model = build(ModelSpec.of_depth(1, 330), seed=9).eval()
    assert ids(lm) == alone(lm)
