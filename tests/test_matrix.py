"""Families of every kind beside everything that is done with a model: adapters, few bits, native steps, drafts, ranks,
caches of 8 bits, stored beginnings, exact logits, servers. Each is right, or is refused with the words of `HOLES`.

The models are small, with weights of deviation 0.2: every token matters. In float64 two ways of computing them differ
by roundings of 1e-16 through some layers: by less than 1e-9.
"""

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.api import LanguageModel
from headway.errors import HeadwayError
from headway.generate import Engine, GenerationConfig, NgramDraft, Reader, Sampling, generate
from headway.generate.ranks import led
from headway.models import Decoder
from headway.models.lowering import Lowered
from headway.models.quantize import quantize_model
from headway.models.tensor_parallel import shard
from headway.nn import Adapter, Lora, attach, block_linears, merge
from headway.nn.weights import Nf4, Plain
from headway.nn.weights import rounded as rounded_weights
from headway.nn.weights.rounded import dequantized_linear
from headway.parallel import Exchange, TensorParallel
from tests.checkpoints.hf import off
from tests.generate.bits import Bits
from tests.generate.engines import drain, ids_of, text_of
from tests.parallel.simulation import simulate
from tests.small_families import ENCODERS, FAMILIES, TOKENIZER, VOCAB, model_of

QUICK = ("gemma2", "lfm2")
PROMPT = [*range(7, 150), 7, 8, 9, 7, 8]
IDS = torch.randint(VOCAB, (2, 23), generator=torch.Generator().manual_seed(1))
CLOSE = 1e-9


def adapted(model: Any) -> Any:
    adapter = Adapter.fresh(model, Lora(rank=2))
    draw = torch.Generator().manual_seed(2)
    for value in adapter.tensors.values():
        value.add_(torch.randn(value.shape, generator=draw) * 0.1)
    attach(model, adapter, dtype=model.stack.like.dtype)
    return model


def adapters(name: str) -> None:
    """A step of training changes what is of the adapter and nothing else; merged weights compute the same."""
    model = adapted(model_of(name, torch.float64))
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    trained = {key for key, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(IDS, targets=IDS).total.backward()
    optimizer.step()
    changed = {key for key, p in model.named_parameters() if not torch.equal(p, before[key])}
    assert changed <= trained
    assert {key for key in changed if ".experts." not in key} == {k for k in trained if ".experts." not in k}
    with torch.no_grad():
        beside = model(IDS)
        merge(model)
        assert off(model(IDS), beside) < CLOSE


def rounded_inputs(x: Tensor, *args: Any) -> Tensor:
    """The product with int8 or int4 weights as the kernels make it: x in 8 bits, in groups of 32 inputs."""
    groups = x.unflatten(-1, (-1, 32))
    unit = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return dequantized_linear(((groups / unit).round() * unit).flatten(-2), *args)


@torch.no_grad()
def rounded(name: str, weights: str) -> None:
    """In float64 a model computes with exactly the weights that its codes stand for, which are near its own; in
    float32, with inputs of 8 bits, too, to some that lie in the middle of two of them."""
    dense, exact, fast = (model_of(name, dtype) for dtype in (torch.float64, torch.float64, torch.float32))
    for model in (exact, fast):
        if weights == "nf4":
            for layer in block_linears(model).values():
                layer.keep(Nf4.pack(layer.matrix))
        else:
            quantize_model(model, weights)
    for key, layer in block_linears(dense).items():
        kept = block_linears(exact)[key].kept
        assert not isinstance(kept, Plain), key
        stood = kept.dequantize(torch.float64)
        assert off(stood, layer.weight) < {"int8": 0.01, "int4": 0.15, "nf4": 0.15}[weights]
        layer.weight.copy_(stood)
    assert off(exact(IDS), dense(IDS)) < CLOSE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounded_weights, "dequantized_linear", rounded_inputs)
        assert off(fast(IDS).double(), exact(IDS)) < 0.01


def native(name: str) -> None:
    """Steps as native calls, whose logits are those of the whole text."""
    model = model_of(name)
    Lowered(model)  # raises the reason where there is none
    with torch.no_grad():
        whole = model(IDS)
    reader = Reader(model)
    assert reader.steps.what == "native"
    tables = [reader.cache.open(), reader.cache.open()]
    reader.read([(table, ids[:9].tolist()) for table, ids in zip(tables, IDS, strict=True)], [[], []])
    reader.cache.end()
    for at in range(9, 23):
        logits = reader.read(
            [(table, [int(ids[at])]) for table, ids in zip(tables, IDS, strict=True)], [[0], [0]]
        )
        reader.cache.end()
        assert off(logits, whole[:, at]) < 1e-4


def greedy(model: Any, prompt: Any = PROMPT, **options: Any) -> list[int]:
    named = {key: options.pop(key) for key in ("draft",) if key in options}
    (made,) = generate(model, [list(prompt)], GenerationConfig(**{"max_new_tokens": 12, **options}), **named)
    return made.ids


def decoded(name: str) -> None:
    """Greedy texts are the arg max of the whole text, token by token."""
    model, ids = model_of(name), list(PROMPT)
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert greedy(model) == ids[len(PROMPT) :]


def drafted(name: str) -> None:
    """Guesses change no text, drawn or not."""
    model, draft = model_of(name), NgramDraft(tokens=3, least=1)
    for sampling in (Sampling(), Sampling(temperature=0.8)):
        plain = greedy(model, sampling=sampling, max_new_tokens=20)
        assert greedy(model, sampling=sampling, max_new_tokens=20, draft=draft) == plain


def int8_cache(name: str) -> None:
    """The texts are those of a cache of 8 bits that is filled by hand."""
    model = model_of(name)
    cache, new = model.make_cache(1, dtype=torch.int8), list(PROMPT)
    made: list[int] = []
    with torch.no_grad():
        for _ in range(8):
            new = [int(model(torch.tensor([new]), cache=cache)[0, -1].argmax())]
            made += new
    assert greedy(model, kv_cache_dtype="int8", max_new_tokens=8) == made


def prefixes(name: str) -> None:
    """A text whose beginning is stored reads little of it, and is the same."""
    engine, read = Engine(Reader(model_of(name), keep=1 << 24)), list[int]()
    reads = engine.reader.read

    def counted(chunks: Any, *args: Any) -> Any:
        read.append(sum(len(ids) for _, ids in chunks))
        return reads(chunks, *args)

    engine.reader.read = counted  # type: ignore[method-assign]
    config, texts, counts = GenerationConfig(max_new_tokens=12, prefix_cache=True), [], []
    for number in range(2):
        read.clear()
        texts.append(text_of(number, PROMPT, config))
        engine.add(texts[-1])
        drain(engine)
        counts.append(sum(read))
    assert counts[1] <= counts[0] - 128
    assert ids_of(texts[0]) == ids_of(texts[1]) == greedy(engine.reader.model)


def exact(name: str) -> None:
    """Logits are the same bits however a text is read."""
    model, bits = model_of(name), Bits()
    config = GenerationConfig(max_new_tokens=12, prefix_cache=True)
    for step_tokens in (None, 50, 17):
        engine = Engine(bits.watch(Reader(model, exact=True)), step_tokens=step_tokens)
        for number, begin in enumerate((0, 40, 100)):
            engine.add(text_of(number, PROMPT[begin:], config))
            if step_tokens is None:
                drain(engine)
        drain(engine)
    assert bits.agreed > 60
    assert not bits.differed


def ranks(name: str) -> None:
    """Two ranks that share the layers compute what one does, and write the same text."""
    model = model_of(name, torch.float64)
    with torch.no_grad():
        whole = model(IDS)

    def rank(exchange: Exchange) -> tuple[float, list[int] | None]:
        own = copy.deepcopy(model)
        shard(own, TensorParallel(exchange))
        with torch.no_grad():
            far = off(own(IDS), whole)
        return far, led(own, lambda: greedy(own)) if isinstance(own, Decoder) else None

    (far, made), (other, _) = simulate(2, rank)
    assert max(far, other) < CLOSE
    assert made is None or made == greedy(model)


def served(name: str) -> None:
    """A chat of a server is what `generate` writes."""
    pytest.importorskip("uvicorn", reason="headway[serve] is not installed")
    from headway.serve.models import Models
    from headway.serve.served import Decoding
    from headway.serve.worker import Worker
    from tests.serve.conftest import placed, running
    from tests.serve.test_guard import ask

    lm, worker = LanguageModel(model_of(name), TOKENIZER), Worker(256)
    said = [{"role": "user", "content": "What is it?"}]
    asked = {"model": name, "messages": said, "max_tokens": 9, "temperature": 0}
    with running(Models(placed(Decoding(name, lm, worker, keep=1 << 24))), worker) as house:
        status, told = ask(house, "/v1/chat/completions", asked)
    assert status == 200, told
    ids = TOKENIZER.render_chat(said, add_generation_prompt=True)
    assert told["choices"][0]["message"]["content"] == lm.generate(ids, max_new_tokens=9, temperature=0).text


COLUMNS: Mapping[str, Callable[[str], None]] = {
    "adapters": adapters,
    "int8": lambda name: rounded(name, "int8"),
    "int4": lambda name: rounded(name, "int4"),
    "nf4": lambda name: rounded(name, "nf4"),
    "native steps": native,
    "decoding": decoded,
    "drafts": drafted,
    "int8 cache": int8_cache,
    "prefixes": prefixes,
    "exact": exact,
    "ranks": ranks,
    "server": served,
}
OF_ANY = ("adapters", "int8", "int4", "nf4", "ranks")
"""Columns of encoders, too."""
EXPERTS = "gpt-oss qwen3-moe mixtral qwen2-moe glm-4.5"
NORMED = "the kernels norm queries and keys before they rotate them"
CLAMPED = "the kernels do not know the activation 'clamped_swiglu'"
HOLES: Mapping[tuple[str, str], str] = {
    ("native steps", "hunyuan"): NORMED,
    ("exact", "hunyuan"): f"{NORMED}; leave exact out",
    ("native steps", "gpt-oss"): CLAMPED,
    ("exact", "gpt-oss"): f"{CLAMPED}; leave exact out",
    ("native steps", "falcon-h1"): "the kernels know softmax attention, and no AttentionBeside",
    ("exact", "falcon-h1"): "the kernels know softmax attention, and no AttentionBeside; leave exact out",
    ("native steps", "nemotron-h"): "the kernels of a step know no SSD",
    ("exact", "nemotron-h"): "the kernels of a step know no SSD; leave exact out",
    (
        "drafts",
        "qwen3.5 lfm2 falcon-h1 nemotron-h",
    ): "whose cache is a state that no token can be taken out of again; leave the draft out",
    ("ranks", "qwen3.5 lfm2 falcon-h1 nemotron-h"): "tensor parallel: ranks cannot share the heads of",
}
"""Column and names -> what the error says."""


def hole(column: str, name: str) -> str | None:
    return next((why for (c, names), why in HOLES.items() if c == column and name in names.split()), None)


@pytest.mark.parametrize(("name", "column"), [
    pytest.param(name, column, marks=() if name in QUICK else pytest.mark.slow)
    for name in FAMILIES for column in COLUMNS if column in OF_ANY or name not in ENCODERS
])  # fmt: skip
def test_a_family_beside_what_is_done_with_it(name: str, column: str) -> None:
    why = hole(column, name)
    if why is None:
        COLUMNS[column](name)
        return
    with pytest.raises(HeadwayError, match=re.escape(why)):
        COLUMNS[column](name)
