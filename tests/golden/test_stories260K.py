"""A trained LLaMA with grouped heads must print its published text on every path (karpathy/llama2.c, MIT).

`./run stories260K.bin -z tok512.bin -t 0.0` prints 256 greedy tokens after BOS, the first without its space.
"""

import re
from pathlib import Path

import pytest
import torch

from headway.checkpoints import convert, load_folder, load_model, save_folder
from headway.checkpoints.formats.llama2c import read
from headway.cli import run
from headway.generate import GenerationConfig, generate
from headway.models import Decoder
from headway.models.quantize import quantized_layers
from headway.patterns import Window
from headway.text import Tokenizer
from tests.data import data_path

STEPS = 256


@pytest.fixture(scope="module")
def source() -> Path:
    return data_path("weights/stories260K")


@pytest.fixture(scope="module")
def published(source) -> str:
    text = (source / "stories260K.md").read_text()
    return re.search(r"-t 0\.0\n(.*?)\n```", text, re.DOTALL)[1]


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory) -> Path:
    """Returns the Hugging Face folder that `headway convert` makes of the published files."""
    path = tmp_path_factory.mktemp("stories") / "hf"
    arguments = ["convert", source / "stories260K.bin", path, "--tokenizer", source / "tok512.bin"]
    assert run([str(a) for a in arguments]) == 0
    return path


@torch.no_grad()
def greedy(model: Decoder, cached: bool = True) -> list[int]:
    ids, cache = [1], model.make_cache(1) if cached else None
    while len(ids) <= STEPS and (len(ids) == 1 or ids[-1] != 1):
        inputs = torch.tensor([ids if cache is None else ids[-1:]])
        ids.append(int(model(inputs, cache=cache, logits_for=slice(-1, None))[0, -1].argmax()))
    return ids


@pytest.mark.parametrize(
    ("cached", "pairing"),
    [
        ("uncached", "halves"),
        ("cached", "adjacent"),
        ("window", "halves"),
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in (("uncached", "adjacent"), ("cached", "halves"), ("window", "adjacent"))
        ),
    ],
)
def test_it_prints_its_published_text(folder, published, tmp_path, pairing, cached):
    if pairing != "halves":
        convert(folder, tmp_path / "m", to_pairing=pairing)
        folder = tmp_path / "m"
    model = load_model(folder)
    assert model.spec.positions.pairing == pairing
    if cached == "window":
        model = Decoder(model.spec.with_patterns(Window.last(STEPS + 1))).eval().requires_grad_(False)
        model.load_state_dict(load_model(folder).state_dict())
    assert Tokenizer.load(folder).decode(greedy(model, cached != "uncached")) == published
    assert len(published) == 565


def test_after_a_round_trip_through_transformers(folder, published, tmp_path):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder)
    out = theirs.generate(
        torch.tensor([[1]]), do_sample=False, max_new_tokens=STEPS, pad_token_id=0
    )  # cached
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(out[0].tolist()) == published
    theirs.save_pretrained(tmp_path / "theirs")
    assert tokenizer.decode(greedy(load_model(tmp_path / "theirs"))) == published
    save_folder(tmp_path / "ours", load_model(tmp_path / "theirs"), tokenizer=tokenizer)
    assert tokenizer.decode(greedy(load_model(tmp_path / "ours"))) == published


@pytest.mark.parametrize("native", [True, False])
def test_in_8_bits_it_prints_the_same(folder, published, tmp_path, native):
    """By native decode steps and by modules."""
    out = str(tmp_path / "m")
    assert run(["quantize", str(folder), "--weights", "int8", out]) == 0
    model = load_model(out)
    assert len(quantized_layers(model)) == 7 * model.spec.layers
    limits = GenerationConfig(max_new_tokens=STEPS)
    ids = [1, *generate(model, [[1]], limits)[0].ids] if native else greedy(model)
    assert Tokenizer.load(folder).decode(ids) == published


@torch.no_grad()
def test_in_8_bits_by_rows_another_token_is_likelier_only_where_two_are_equally_likely(folder, tmp_path):
    """At most one of 256 tokens changes, where the two likeliest logits are within 0.05, in this smallest of models."""
    assert run(["quantize", str(folder), "--weights", "int8", "--group", "-1", str(tmp_path / "m")]) == 0
    plain, rounded = load_model(folder), load_model(tmp_path / "m")
    ids = greedy(plain)
    logits, rounded_logits = (
        torch.cat([model(torch.tensor([[token]]), cache=cache)[0] for token in ids[:-1]])
        for model, cache in ((plain, plain.make_cache(1)), (rounded, rounded.make_cache(1)))
    )
    first, second = logits.topk(2).values.T
    changed = rounded_logits.argmax(-1) != torch.tensor(ids[1:])
    assert int(changed.sum()) <= 1
    assert torch.all(first[changed] - second[changed] < 0.05)
    assert (
        float((logits.softmax(-1) * (logits.log_softmax(-1) - rounded_logits.log_softmax(-1))).sum(-1).mean())
        < 1e-3
    )


def test_pairing_there_and_back_is_the_identical_folder(folder, tmp_path):
    convert(folder, tmp_path / "adjacent", to_pairing="adjacent")
    convert(tmp_path / "adjacent", tmp_path / "halves")
    expected = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert {p.name: p.read_bytes() for p in (tmp_path / "halves").iterdir()} == expected
    changed = (tmp_path / "adjacent" / "model.safetensors").read_bytes()
    assert changed != expected["model.safetensors"]


def test_read_in_the_wrong_pairing_it_prints_something_else(source, published, folder):
    model = read(source / "stories260K.bin")
    wrong = load_model(folder)
    wrong.load_state_dict(model.state())
    assert Tokenizer.load(folder).decode(greedy(wrong)) != published


def test_the_folder_knows_where_texts_end(folder):
    assert load_folder(folder).generation["eos_token_id"] == [1, 2]
