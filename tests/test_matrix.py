"""Every kind of family with every feature: adapters, quantized weights, native steps, drafts, ranks, 8-bit caches,
prefix caches, exact logits, servers. Each combination is right, or is refused with the words of `HOLES`.

The models are small, with weights of standard deviation 0.2, so that every token matters. In float64 two ways to
compute them differ by roundings of 1e-16 through some layers: by less than 1e-9.
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
    """A training step changes the adapter and nothing else; merged weights compute the same."""
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
        unmerged = model(IDS)
        merge(model)
        assert off(model(IDS), unmerged) < CLOSE


def rounded_inputs(x: Tensor, *args: Any) -> Tensor:
    """Computes the product with int8 or int4 weights as the kernels do: x rounded to 8 bits in groups of 32 inputs."""
    groups = x.unflatten(-1, (-1, 32))
    unit = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return dequantized_linear(((groups / unit).round() * unit).flatten(-2), *args)


@torch.no_grad()
def rounded(name: str, weights: str) -> None:
    """In float64 a model computes with exactly its dequantized weights, which are near the original ones; in float32
    also with inputs of 8 bits, up to inputs that are at the middle of two codes."""
    dense, exact, fast = (model_of(name, dtype) for dtype in (torch.float64, torch.float64, torch.float32))
    for model in (exact, fast):
        if weights == "nf4":
            for layer in block_linears(model).values():
                layer.keep(Nf4.pack(layer.matrix))
        else:
            quantize_model(model, weights)
    for key, layer in block_linears(dense).items():
        quantized = block_linears(exact)[key].kept
        assert not isinstance(quantized, Plain), key
        dequantized = quantized.dequantize(torch.float64)
        assert off(dequantized, layer.weight) < {"int8": 0.01, "int4": 0.15, "nf4": 0.15}[weights]
        layer.weight.copy_(dequantized)
    assert off(exact(IDS), dense(IDS)) < CLOSE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounded_weights, "dequantized_linear", rounded_inputs)
        assert off(fast(IDS).double(), exact(IDS)) < 0.01


def native(name: str) -> None:
    """Decode steps run as native calls, with the logits of a full forward."""
    model = model_of(name)
    Lowered(model)  # raises the reason if the model has no native steps
    with torch.no_grad():
        whole = model(IDS)
    reader = Reader(model)
    assert reader.steps.what == "native"
    tables = [reader.cache.open(), reader.cache.open()]
    reader.read([(table, ids[:9].tolist()) for table, ids in zip(tables, IDS, strict=True)], [[], []])
    reader.cache.end()
    for position in range(9, 23):
        logits = reader.read(
            [(table, [int(ids[position])]) for table, ids in zip(tables, IDS, strict=True)], [[0], [0]]
        )
        reader.cache.end()
        assert off(logits, whole[:, position]) < 1e-4


def greedy(model: Any, prompt: Any = PROMPT, **options: Any) -> list[int]:
    arguments = {key: options.pop(key) for key in ("draft",) if key in options}
    (completion,) = generate(
        model, [list(prompt)], GenerationConfig(**{"max_new_tokens": 12, **options}), **arguments
    )
    return completion.ids


def decoded(name: str) -> None:
    """Greedy decoding gives the arg max of full forwards, token by token."""
    model, ids = model_of(name), list(PROMPT)
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert greedy(model) == ids[len(PROMPT) :]


def drafted(name: str) -> None:
    """Draft tokens change no text, greedy or sampled."""
    model, draft = model_of(name), NgramDraft(tokens=3, least=1)
    for sampling in (Sampling(), Sampling(temperature=0.8)):
        plain = greedy(model, sampling=sampling, max_new_tokens=20)
        assert greedy(model, sampling=sampling, max_new_tokens=20, draft=draft) == plain


def int8_cache(name: str) -> None:
    """Generation with an 8-bit cache gives the text of such a cache filled by hand."""
    model = model_of(name)
    cache, pending = model.make_cache(1, dtype=torch.int8), list(PROMPT)
    expected: list[int] = []
    with torch.no_grad():
        for _ in range(8):
            pending = [int(model(torch.tensor([pending]), cache=cache)[0, -1].argmax())]
            expected += pending
    assert greedy(model, kv_cache_dtype="int8", max_new_tokens=8) == expected


def prefixes(name: str) -> None:
    """A prompt whose prefix is cached reads only the rest, and gives the same text."""
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
    """Logits have the same bits however a sequence is cut into steps."""
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
    """Two tensor-parallel ranks compute what one process does, and generate the same text."""
    model = model_of(name, torch.float64)
    with torch.no_grad():
        whole = model(IDS)

    def rank(exchange: Exchange) -> tuple[float, list[int] | None]:
        local = copy.deepcopy(model)
        shard(local, TensorParallel(exchange))
        with torch.no_grad():
            difference = off(local(IDS), whole)
        return difference, led(local, lambda: greedy(local)) if isinstance(local, Decoder) else None

    (difference, ids), (other_difference, _) = simulate(2, rank)
    assert max(difference, other_difference) < CLOSE
    assert ids is None or ids == greedy(model)


def served(name: str) -> None:
    """A server's chat reply is the text of `generate`."""
    pytest.importorskip("uvicorn", reason="headway[serve] is not installed")
    from headway.serve.models import Models
    from headway.serve.served import Decoding
    from headway.serve.worker import Worker
    from tests.serve.conftest import placed, running
    from tests.serve.test_guard import ask

    lm, worker = LanguageModel(model_of(name), TOKENIZER), Worker(256)
    messages = [{"role": "user", "content": "What is it?"}]
    request = {"model": name, "messages": messages, "max_tokens": 9, "temperature": 0}
    with running(Models(placed(Decoding(name, lm, worker, keep=1 << 24))), worker) as house:
        status, reply = ask(house, "/v1/chat/completions", request)
    assert status == 200, reply
    ids = TOKENIZER.render_chat(messages, add_generation_prompt=True)
    assert reply["choices"][0]["message"]["content"] == lm.generate(ids, max_new_tokens=9, temperature=0).text


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
"""Columns that hold for encoders, too."""
EXPERTS = "gpt-oss qwen3-moe mixtral qwen2-moe glm-4.5"
NORMED = "the kernels do not support qk_norm='rotated'"
CLAMPED = "the kernels do not support the activation 'clamped_swiglu'"
HOLES: Mapping[tuple[str, str], str] = {
    ("native steps", "hunyuan"): NORMED,
    ("exact", "hunyuan"): f"{NORMED}; leave exact out",
    ("native steps", "gpt-oss"): CLAMPED,
    ("exact", "gpt-oss"): f"{CLAMPED}; leave exact out",
    ("native steps", "falcon-h1"): "the kernels do not support AttentionBeside",
    ("exact", "falcon-h1"): "the kernels do not support AttentionBeside; leave exact out",
    ("native steps", "nemotron-h"): "the kernels do not support SSD",
    ("exact", "nemotron-h"): "the kernels do not support SSD; leave exact out",
    (
        "drafts",
        "qwen3.5 lfm2 falcon-h1 nemotron-h",
    ): "whose state cannot be rolled back to drop rejected tokens; leave the draft out",
    ("ranks", "qwen3.5 lfm2 falcon-h1 nemotron-h"): "tensor parallel does not support",
}
"""Column and families -> text of the error."""


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
