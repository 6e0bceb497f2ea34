"""llama.cpp's own converter writes the same tensors, bit for bit, and the same metadata for our folders as we do, and
its file gives our logits, here and in llama.cpp."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

from headway.checkpoints import convert, load_model, save_folder
from headway.checkpoints.formats.gguf.model import write_model
from headway.checkpoints.restore import fill
from headway.models import ModelSpec
from headway.positions import NoPositions
from headway.storage.gguf import GGUF, read_gguf
from headway.storage.gguf_blocks import F32, dequantize
from headway.storage.tensors import Tensors
from headway.text import Tokenizer
from tests.checkpoints.gguf_files import FACTORED, weights
from tests.checkpoints.gguf_files import SPECS as PLAIN
from tests.checkpoints.hf import off
from tests.checkpoints.llama_cpp import as_gemma, converted, served
from tests.data import data_path, llama_cpp_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SPECS = {**PLAIN, **FACTORED}
BYTES = {
    **dict.fromkeys(
        (
            *(
                "gpt_oss",
                "seed_oss",
                "cohere",
                "cohere2",
                "olmo",
                "olmo2",
                "olmo3",
                "glm",
                "glm4",
                "stablelm",
            ),
            *(
                "starcoder2",
                "phi",
                "gpt_neox",
                "falcon",
                "gpt2",
                "gpt_bigcode",
                "bloom",
                "mpt",
                "olmoe",
                "lfm2",
            ),
            *("lfm2_moe", "jais2", "hunyuan", "exaone4", "exaone4, windows", "minimax_m2", "qwen2_moe"),
            *("qwen3_moe", "qwen3_next", "qwen3.5", "qwen3.5, a value of each key"),
            *("nemotron-h", "nemotron-h, experts"),
            *("falcon-h1", "falcon-h1, norms", *FACTORED),
        ),
        "gpt-2",
    ),
    "qwen3.5, experts": "qwen2",  # transformers pre-tokenizes this family so, whatever the folder says
}
"""The byte-level vocabulary of each family whose converter requires one; the others take LLaMA's pieces."""
FEW = ("gemma3n",)
"""Families with an embedding table of 256 columns for each layer, which are tested with few tokens."""
REFUSED = {
    "llama, divided": "HeadwayForCausalLM",  # transformers has no scaling with such divisors
    "cohere2": "rotary_pct",  # which transformers 5 no longer writes
    "gpt_neox": "rotary_pct",
    "gpt2": "n_ctx",  # which transformers 5 no longer writes, either
    "minimax_m2": "rotary_dim",  # transformers writes the rotated share of each head instead
    "mpt": "MptForCausalLM",  # transformers' class; the converter knows only that of the authors
    "falcon": "shape '[4, 3, 16, 64]'",  # transformers says num_kv_heads is the number of heads, and means one
}
"""What the converter refuses, and a part of its error."""
OURS = {
    *("vocab_size", "attention.key_length", "attention.value_length", "attention.head_count_kv"),
    *("rope.dimension_count", "rope.freq_base", "expert_feed_forward_length", "feed_forward_length"),
    *("attention.scale", "residual_scale", "embedding_scale", "logit_scale"),  # Bamba's, at their defaults
}
"""Keys that we write and the converter omits, since they follow from others."""
THEIRS = {
    *(
        "vocab_size",
        "rope.scaling.type",
        "attention.sliding_window_pattern",
        "attention.layer_norm_rms_epsilon",
    ),
    *(
        "rope.scaling.finetuned",
        "rope.freq_base",
        "rope.dimension_count",
    ),  # of Granite's hybrids without positions
    *("expert_count", "expert_shared_feed_forward_length"),  # of models without experts
}
"""Keys that only the converter writes, for defaults and for what the model does not have."""
OURS_OF = {
    "mistral, windows": {"attention.sliding_window"},
    "llama 3.1": {"rope.scaling.original_context_length"},
}
"""Keys that the converter drops for a family, although they carry information."""
THEIRS_OF = {"phi3": {"attention.sliding_window", "rope.scaling.original_context_length"}}
"""Keys that the converter writes for a family without windows and without scaled positions."""
OTHER = {
    "full_attention_interval": "4, where a folder says which layers attend and no number",
    "context_length": "2^20 in hybrids without positions",
}
"""Keys to which the converter gives another value, and which."""
PAIRED = ("granite 4 h", "granite 4 h, experts", "smollm3", "nemotron-h, experts")
"""Families with layers without positions whose queries and keys the converter reorders into pairs nevertheless."""
WRONG = {
    "qwen2, yarn": "attention_factor becomes what llama.cpp multiplies by 1 + 0.1 ln factor",
    "bamba": "half of a head is rotated, and the converter puts all of it in pairs, and says all of it",
    "nemotron-h": "it takes every folder that transformers 5 reads for one with experts, and feed-forwards for states",
    "glm": "it reads layernorm_epsilon, which transformers calls rms_norm_eps, and says 1e-5",
}
"""Families that the converter turns into another model, and how."""
LACKING = ("gemma3n",)
"""Families for which llama.cpp requires keys that no layer uses and that transformers 5 folders lack."""
ELSEWHERE: dict[str, str] = {
    "exaone4, windows": "it has windows, and layers without positions, in models of 64 layers alone",
}
"""What llama.cpp computes differently, and why."""
TABLED = ("gemma3n", "gemma4", "gemma4, e")
"""Families with norms after GELU, which amplify the rounding of llama.cpp's GELU table beyond the bound."""
MERGES = ("gemma4", "gemma4, e")
"""Families for whose vocabularies the converter writes merges ("gemma4") where we write scores ("llama")."""
KINDS = (str, int, float, bool)
NARROW = ("qwen2", "qwen2, yarn", "smollm3")
"""Families whose folders do not state the head dimension."""


def few_pieces(home: Path) -> Path:
    """Trains a SentencePiece model of 290 pieces and returns its file."""
    path = home / "few.model"
    with path.open("wb") as out:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the cat sat on the mat", "a dog and a cat ran"] * 9),
            model_writer=out, model_type="bpe", vocab_size=290, byte_fallback=True, minloglevel=2,
            normalization_rule_name="identity", remove_extra_whitespaces=False,
        )  # fmt: skip
    return path


def folder_of(name: str, home: Path) -> Path:
    """Writes a transformers folder with a vocabulary that the converter knows, and returns it."""
    pieces = few_pieces(home) if name in FEW else data_path("tokenizers/llama2/tokenizer.model")
    vocabulary = llama_cpp_path(f"models/ggml-vocab-{BYTES.get(name)}.gguf") if name in BYTES else pieces
    tokenizer = Tokenizer.load(vocabulary)
    if name in BYTES:
        tokenizer.backend.add_special_tokens(["<|user|>"])  # for GLM
    spec = replace(SPECS[name], vocab=-(-tokenizer.backend.get_vocab_size() // 16) * 16)
    if name in NARROW:
        spec = replace(spec, head_dim=spec.width // spec.heads)
    state = weights(spec)
    if name in FEW:  # 22 layers make rounding large
        state |= {
            key: 0.1 * state[key]
            for key in state
            if key.endswith(("feedforward_layernorm.weight", "layer.norm.weight"))
        }
    write_model(home / "start.gguf", spec, state, F32, tokenizer=tokenizer.gguf_metadata(spec.vocab))
    if name in FACTORED:
        save_folder(home / "folder", fill(spec, state), tokenizer=tokenizer)
    else:
        convert(home / "start.gguf", home / "folder", tokenizer=tokenizer)
    if name not in BYTES:
        shutil.copy(pieces, home / "folder" / "tokenizer.model")
    return home / "folder"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str | None]]:
    """Returns every family's folder and the converter's error for it; one process for all, since it starts slowly."""
    home = tmp_path_factory.mktemp("converter")
    folders = {}
    for name in SPECS:
        (home / name).mkdir()
        folders[name] = folder_of(name, home / name)
    errors = converted({folder: folder.with_name("theirs.gguf") for folder in folders.values()})
    return {name: (folder, errors[folder]) for name, folder in folders.items()}


def tensors(file: GGUF) -> dict[str, torch.Tensor]:
    """Returns the dequantized tensors of a file."""
    stored = Tensors(file.tensors)
    return {
        name: dequantize(stored[name], entry.type).view(entry.numbers) for name, entry in file.tensors.items()
    }


def keys(file: GGUF) -> dict[str, Any]:
    """Returns the metadata of a file's architecture, without the prefix of its name."""
    name = file.metadata["general.architecture"]
    stripped = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items()}
    architecture = {key: value for key, value in stripped.items() if f"{name}.{key}" in file.metadata}
    return {key: value if isinstance(value, KINDS) else list(value) for key, value in architecture.items()}


def rotated(spec: ModelSpec, tensor: str) -> bool:
    """Returns whether the layer of a tensor such as "blk.3.attn_q.weight" has positions."""
    if spec.positions == NoPositions():
        return False
    return not isinstance(spec.layer_positions[int(tensor.split(".")[1])], NoPositions)


@pytest.mark.parametrize("name", SPECS)
def test_its_file_is_ours(made: Any, name: str) -> None:
    """Compares the tensors' types and bits, and the metadata key by key."""
    folder, error = made[name]
    if name in REFUSED:
        assert REFUSED[name] in str(error)
        return
    if name in WRONG:
        return
    assert error is None
    convert(folder, folder.with_name("ours.gguf"))
    ours, theirs = (read_gguf(folder.with_name(f"{side}.gguf")) for side in ("ours", "theirs"))
    assert ours.metadata["general.architecture"] == theirs.metadata["general.architecture"]
    our_tensors, their_tensors = tensors(ours), tensors(theirs)
    zeros = {tensor for tensor, value in our_tensors.items() if name in LACKING and not value.any()}
    assert our_tensors.keys() - zeros == their_tensors.keys()
    for tensor in their_tensors:
        assert ours.tensors[tensor].type == theirs.tensors[tensor].type, tensor
        assert our_tensors[tensor].shape == their_tensors[tensor].shape, tensor
        if (
            name in PAIRED
            and tensor.endswith(("attn_q.weight", "attn_k.weight"))
            and not rotated(SPECS[name], tensor)
        ):
            continue
        if tensor == "rope_freqs.weight":  # the converter computes it in float32
            torch.testing.assert_close(our_tensors[tensor], their_tensors[tensor], rtol=2.0**-21, atol=0.0)
        else:
            assert torch.equal(our_tensors[tensor], their_tensors[tensor]), tensor
    our_keys, their_keys = keys(ours), keys(theirs)
    assert our_keys.keys() - their_keys.keys() <= OURS | OURS_OF.get(name, set())
    assert their_keys.keys() - our_keys.keys() <= THEIRS | THEIRS_OF.get(name, set())
    shared = (our_keys.keys() & their_keys.keys()) - OTHER.keys()
    assert {key: our_keys[key] for key in shared} == {key: their_keys[key] for key in shared}
    parts = ("tokens",) if name in MERGES else ("model", "pre", "tokens", "merges")
    for key in (f"tokenizer.ggml.{part}" for part in parts):
        assert list(ours.metadata.get(key, "")) == list(theirs.metadata.get(key, "")), key


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_a_file_gives_our_logits_here_and_in_llama_cpp(
    made: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes the converter's file if it wrote one, else ours. The server's log-probabilities must be within 1e-4 of the
    largest; with GELU, which ggml looks up in a table of half precision, within 2^-11."""
    folder, error = made[name]
    unusable = error or name in WRONG or name in LACKING
    file = folder.with_name("start.gguf" if unusable else "theirs.gguf")
    model, reread = load_model(folder), load_model(file)
    most_id = 280 if name in FEW else 500
    ids = torch.randint(0, most_id, (15,), generator=torch.Generator().manual_seed(0)).tolist()
    logits = model(torch.tensor([ids]))[0]
    assert off(reread(torch.tensor([ids]))[0], logits) < 1e-5
    if name in ELSEWHERE:
        return
    if name in TABLED:
        as_gemma(model, monkeypatch)
        logits = model(torch.tensor([ids]))[0]
    bound = 2.0**-11 if "gelu" in model.spec.activation else 1e-4
    with served(file) as log_probs:
        for count in (4, 15):
            assert off(log_probs(ids[:count], model.spec.vocab), logits[count - 1].log_softmax(-1)) < bound
