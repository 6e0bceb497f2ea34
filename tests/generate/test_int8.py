"""Generating from an int8 cache: the same text from Python and from the shell, and what is refused."""

import io
import json
import re

import pytest
import torch

import headway
from headway.api import LanguageModel
from headway.attention.linear_attention import LinearAttentionSpec
from headway.cache import KV_DTYPES, kv_dtype
from headway.cli import run
from headway.errors import CacheError, ConfigError
from headway.generate import GenerationConfig, Reader, Sampling, generate
from headway.models import ModelSpec, build, catalog, cost
from headway.models.cost.planning import Machine, plan
from tests.generate.conftest import MIXED, small
from tests.generate.plain import HOT, PROMPTS
from tests.text.conftest import byte_level
from tests.text.test_chat import TURNS, with_template

MODEL = small(MIXED)
UNKNOWN = "kv_cache_dtype: there is no 'int4' (did you mean \"int8\"?); there are auto, int8"


def by_hand(prompt: list[int], count: int) -> list[int]:
    """Returns the greedy continuation, token by token, from a cache that is made by hand."""
    cache, ids = MODEL.make_cache(1, dtype=torch.int8), list(prompt)
    with torch.no_grad():
        new = ids
        for _ in range(count):
            logits = MODEL(torch.tensor([new]), cache=cache)
            new = [int(logits[0, -1].argmax())]
            ids += new
    return ids[len(prompt) :]


def test_greedy_is_the_argmax_over_what_is_stored() -> None:
    generations = generate(MODEL, PROMPTS, GenerationConfig(max_new_tokens=12, kv_cache_dtype="int8"))
    assert [g.ids for g in generations] == [by_hand(prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
def test_chunks_and_company_change_no_text(sampling: Sampling) -> None:
    settings = {"max_new_tokens": 14, "sampling": sampling, "kv_cache_dtype": "int8"}
    together = [g.ids for g in generate(MODEL, PROMPTS, GenerationConfig(**settings))]
    for chunk in (1, 4):
        generations = generate(MODEL, PROMPTS, GenerationConfig(**settings, prefill_chunk=chunk))
        assert [g.ids for g in generations] == together
    assert [g.ids for g in generate(MODEL, PROMPTS, GenerationConfig(**settings), batch_size=1)] == together


def test_the_cache_is_in_int8_when_it_is_asked_for() -> None:
    for name, dtype in (("auto", torch.float32), ("int8", torch.int8)):
        reader = Reader(MODEL, kv_dtype=kv_dtype(name))
        reader.read([(reader.cache.open(), [1, 2, 3])], [[2]])
        assert {t.dtype for layer in reader.cache.layers for t in layer.tensors[:2]} == {dtype}


def test_what_is_not_there_is_refused() -> None:
    assert set(KV_DTYPES) == {"auto", "int8"}
    with pytest.raises(ConfigError, match=re.escape(UNKNOWN)):
        GenerationConfig(kv_cache_dtype="int4")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: there is no \['int8'\].*; there are auto, int8"):
        GenerationConfig(kv_cache_dtype=["int8"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_cache_dtype='int8' needs use_cache=True, got "):
        GenerationConfig(kv_cache_dtype="int8", use_cache=False)
    with pytest.raises(ConfigError, match=r"no option 'kv_dtype' \(did you mean"):
        LanguageModel(MODEL).generate([1], kv_dtype="int8")  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "small"
    LanguageModel(small(context=512), with_template(byte_level(), TURNS)).save(path)
    return str(path)


def test_generate_and_chat_take_it(folder: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    lm, ids = headway.load(folder), {}
    for name in ("auto", "int8"):
        command = ["generate", folder, "the cat", "-n", "40", "-t", "0", "--json", "--kv-cache-dtype", name]
        assert run(command) == 0
        ids[name] = json.loads(capsys.readouterr().out)["ids"]
        assert ids[name] == lm.generate("the cat", max_new_tokens=40, kv_cache_dtype=name).ids
    assert ids["auto"] != ids["int8"], "the option has an effect that can be seen"
    calls = []
    stream_chat = LanguageModel.stream_chat
    monkeypatch.setattr(
        LanguageModel, "stream_chat", lambda self, m, **o: calls.append(o) or stream_chat(self, m, **o)
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert run(["chat", folder, "-n", "3", "--kv-cache-dtype", "int8"]) == 0
    assert calls[0]["kv_cache_dtype"] == "int8"


@pytest.mark.parametrize("command", [["generate", "MODEL", "a"], ["plan", "mistral-7b"]])
def test_the_shell_says_what_there_is(
    folder: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [folder if word == "MODEL" else word for word in command]
    assert run([*command, "--kv-cache-dtype", "int4"]) == 1
    assert UNKNOWN in capsys.readouterr().err


def test_a_plan_counts_a_byte_a_number_and_four_a_scale(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Machine(name="box", memory=32 << 30, bandwidth=20e9, peak=500e9)
    spec = catalog.spec("llama-2-7b")
    plain, rounded = (
        plan(spec, model="m", context=4096, batch=2, machine=box, kv_dtype=d) for d in (None, torch.int8)
    )
    row = spec.layers * 2 * spec.kv_heads
    assert plain.kv == 2 * 4096 * row * spec.head_dim * 2
    assert rounded.kv == 2 * 4096 * row * (spec.head_dim + 4)
    assert plain.moved - rounded.moved == plain.kv - rounded.kv
    assert (plain.weights, plain.dtype, plain.kv_dtype) == (rounded.weights, "bfloat16", "bfloat16")
    assert rounded.kv_dtype == "int8"
    assert [layer.reads for layer in rounded.layers] == [layer.reads for layer in plain.layers] == [4096]
    monkeypatch.setattr(Machine, "here", staticmethod(lambda dtype: box))
    assert run(["plan", "llama-2-7b", "--kv-cache-dtype", "int8"]) == 0
    assert "1 x 4096 tokens in bfloat16, keys and values in int8, on box" in capsys.readouterr().out


def test_a_model_holds_what_was_counted() -> None:
    cache = MODEL.make_cache(2, dtype=torch.int8)
    with torch.no_grad():
        MODEL(torch.zeros(2, 40, dtype=torch.int64), cache=cache)
    assert cache.nbytes == cost.kv_bytes_stored(MODEL.spec, 40, torch.int8, batch=2)
    assert cost.kv_bytes_per_token(MODEL.spec, torch.int8) == 2 * 2 * 2 * (8 + 4)


def test_sums_over_keys_are_not_kept_in_8_bits() -> None:
    spec = ModelSpec.of(
        "llama", vocab=330, width=32, layers=2, heads=4, hidden=48, mixers=LinearAttentionSpec()
    )
    with pytest.raises(
        CacheError, match=r"dtype torch.int8 is for keys and values, but all layers keep states"
    ):
        generate(build(spec, seed=0), [[1, 2]], GenerationConfig(max_new_tokens=2, kv_cache_dtype="int8"))
