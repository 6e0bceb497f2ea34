"""Writes `models/` and `tokens/`: every way a folder can be written, as small as it can be. See README.md."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import headway
from headway.api import Classifier
from headway.attention.linear import Linear as LinearAttention
from headway.checkpoints import load_folder, save_folder
from headway.checkpoints.restore import build_model
from headway.data import TokenFile
from headway.data.tokenfile import TokenFileWriter
from headway.models import Head, ModelSpec, build
from headway.patterns import Causal, Full, Pattern, parse
from headway.positions import (
    DynamicNTK,
    Learned,
    Linear,
    LinearBias,
    Llama3,
    LongRope,
    NoPositions,
    PerLayer,
    Relative,
    Rotary,
    Sinusoidal,
    SpecialOrthogonal,
    T5Bias,
    YaRN,
)
from tests.folders_0_1.common import HERE, inputs, kernels
from tests.folders_0_1.words import words

SIZE: dict[str, Any] = {
    "vocab": 24,
    "width": 8,
    "layers": 1,
    "heads": 2,
    "hidden": 6,
    "trained_context": 16,
}
GROUPED = {**SIZE, "kv_heads": 1}
DEEP = {**GROUPED, "layers": 2}
LABELS = ("no", "yes", "perhaps")
EVALUATION_FACTS = (
    *("family", "trained_context", "max_context", "init_std"),
    *("dropout", "attention_dropout", "activation_dropout", "final_dropout", "pooled_dropout"),
)
"""Fields of a spec that the logits of a model in evaluation mode do not show."""
GENERATION = {"bos_token_id": 1, "eos_token_id": [2, 3], "max_length": 20}


def halves(**facts: Any) -> Rotary:
    return Rotary(pairing="halves", **facts)


def adjacent(**facts: Any) -> Rotary:
    return Rotary(pairing="adjacent", **facts)


def patterns(*texts: str) -> list[Pattern]:
    return [parse(text) for text in texts]


def llamas() -> dict[str, ModelSpec]:
    biases = {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied": True, "max_context": 40}
    longrope = LongRope((1.0, 1.5), (2.0, 5.0), 4, factor=4.0)
    return {
        "llama": ModelSpec.of("llama", **DEEP),
        "llama-biases": ModelSpec.of("llama", **GROUPED, **biases, positions=halves(scaling=Linear(4.0))),
        "llama-dynamic": ModelSpec.of("llama", **SIZE | {"trained_context": 4}, positions=halves(
            scaling=DynamicNTK(2.0, 4))),
        "llama-yarn": ModelSpec.of("llama", **SIZE | {"trained_context": 4}, positions=halves(
            theta=500.0, scaling=YaRN(4.0, 4, beta_fast=2.0, beta_slow=0.5, mscale=0.7, mscale_all_dim=0.9))),
        "llama-3": ModelSpec.of("llama", **SIZE, positions=halves(scaling=Llama3(8.0, 1.0, 4.0, 8))),
        "llama-longrope": ModelSpec.of("llama", **SIZE | {"trained_context": 4}, positions=halves(
            scaling=longrope)),
        "mistral": ModelSpec.of("mistral", **DEEP, patterns=parse("Window.last(4)")),
        "ministral": ModelSpec.of("ministral", **DEEP, patterns=patterns("Window.last(3)", "Causal()")),
        "qwen2": ModelSpec.of("qwen2", **DEEP, patterns=patterns("Causal()", "Window.last(3)")),
        "qwen3": ModelSpec.of("qwen3", **DEEP, head_dim=6, tied=True, attention_dropout=0.1,
                              patterns=patterns("Window.last(3)", "Causal()")),
    }  # fmt: skip


def decoders() -> dict[str, ModelSpec]:
    four, parts = {**SIZE, "heads": 4, "hidden": 32}, {"qkv_bias": False, "out_bias": False}
    slopes = tuple(
        2.0 ** -(2 * (i + 1)) / 2**0.5 for i in range(4)
    )  # 2 a head, and Falcon divides by its root
    old = {"order": "pre", "qkv_bias": True, "out_bias": True, "mlp_bias": True}
    return {
        "gpt2": ModelSpec.of("gpt2", **SIZE | {"layers": 2}, positions=Learned(20)),
        "gpt2-untied": ModelSpec.of("gpt2", **SIZE, positions=Learned(16), activation="gelu", tied=False,
                                    dropout=0.3, attention_dropout=0.0, init_std=0.05),
        "gpt_bigcode": ModelSpec.of("gpt_bigcode", **SIZE, positions=Learned(16)),
        "gpt_bigcode-heads": ModelSpec.of("gpt_bigcode", **SIZE, kv_heads=2, positions=Learned(16)),
        "starcoder2": ModelSpec.of("starcoder2", **GROUPED, patterns=parse("Window.last(3)")),
        "starcoder2-plain": ModelSpec.of("starcoder2", **SIZE, **parts, mlp_bias=False, tied=False),
        "falcon": ModelSpec.of("falcon", **four),
        "falcon-parallel": ModelSpec.of("falcon", **four | {"kv_heads": 2}, order="parallel"),
        "falcon-alibi": ModelSpec.of("falcon", **four, **old | {"kv_heads": 4}, positions=LinearBias(slopes)),
        "gpt_neox": ModelSpec.of("gpt_neox", **SIZE | {"heads": 1}),
        "gpt_neox-pre": ModelSpec.of("gpt_neox", **SIZE, **parts, order="pre", tied=True),
        "phi": ModelSpec.of("phi", **GROUPED),
        "bloom": ModelSpec.of("bloom", **SIZE | {"heads": 2, "hidden": 32}),
        "mpt": ModelSpec.of("mpt", **SIZE | {"hidden": 32}, attention_scale=0.2),
    }  # fmt: skip


def encoders() -> dict[str, ModelSpec]:
    table, apart = {"positions": Learned(20)}, {"tied": False, "output_bias": False}
    later = {"positions": Learned(20, offset=2)}
    classify = Head("classify", labels=LABELS, dense="tanh")
    local = {**later, "patterns": parse("Window.around(2) | Global()")}
    return {
        "bert": ModelSpec.of("bert", **SIZE | {"layers": 2}, **table),
        "bert-classify": ModelSpec.of("bert", **SIZE, **table, **apart, head=classify, dropout=0.2),
        "bert-tag": ModelSpec.of("bert", **SIZE, **table, **apart, head=Head("tag", labels=LABELS)),
        "bert-answer": ModelSpec.of("bert", **SIZE, **table, **apart, head=Head("answer")),
        "bert-states": ModelSpec.of("bert", **SIZE, **table, **apart, head=Head("states")),
        "bert-embed": ModelSpec.of("bert", **SIZE, **table, **apart, head=Head("embed", pool="mean", unit=True)),
        "wobert": ModelSpec.of("wobert", **SIZE, **table),
        "roberta": ModelSpec.of("roberta", **SIZE, **later),
        "roberta-classify": ModelSpec.of("roberta", **SIZE, **later, **apart, head=classify),
        "roformer": ModelSpec.of("roformer", **SIZE, embedding_width=4),
        "nezha": ModelSpec.of("nezha", **SIZE, positions=Relative(3, sinusoidal=True)),
        "longformer": ModelSpec.of("longformer", **SIZE, **local),
        "longformer-classify": ModelSpec.of("longformer", **SIZE, **local, **apart, head=classify),
    }  # fmt: skip


def pairs() -> dict[str, ModelSpec]:
    gated = {"tied": False, "gated": True, "activation": "gelu_pytorch_tanh"}
    odd = {"order": "pre", "final_norm": True, "norm": "rms", "positions": Learned(16), "activation": "silu"}
    return {
        "marian": ModelSpec.of_pair("marian", **SIZE, activation="silu"),
        "marian-two-vocabs": ModelSpec.of_pair("marian", encoder={"vocab": 20, "layers": 2}, **SIZE),
        "bart": ModelSpec.of_pair("bart", **SIZE, positions=Learned(16, offset=2)),
        "mbart": ModelSpec.of_pair("mbart", **SIZE, positions=Learned(16, offset=2)),
        "t5": ModelSpec.of_pair("t5", **SIZE, positions=T5Bias(8, 9)),
        "t5-gated": ModelSpec.of_pair("t5", encoder={"layers": 2}, **SIZE, head_dim=5, **gated),
        "transformer": ModelSpec.of_pair("transformer", **SIZE, tied=True),
        "own-pair": ModelSpec.of_pair("transformer", encoder={**odd, "heads": 4}, **SIZE, logit_scale=0.5),
    }


def own() -> dict[str, ModelSpec]:
    """Those that no family of transformers can say: every branch of the key "headway"."""
    scaled = [
        adjacent(scaling=Linear(2.0)),
        adjacent(scaling=DynamicNTK(2.0, 4)),
        adjacent(scaling=YaRN(4.0, 4, attention_factor=1.1, truncate=False)),
        adjacent(
            theta=20.0, scaling=YaRN(4.0, 400, 20.0, 4.0, mscale=0.7, mscale_all_dim=0.9, truncate=False)
        ),
        adjacent(scaling=Llama3(8.0, 1.0, 4.0, 8)),
        adjacent(scaling=LongRope((1.0, 1.5), (2.0, 5.0), 4, attention_factor=1.2)),
        adjacent(scaling=LongRope((1.0, 1.5), (2.0, 5.0), 4, factor=4.0)),
    ]
    scheduled = [
        halves(schedule="quadratic"),
        halves(schedule="cosine", values=True),
        halves(dims=2),
        halves(schedule=(0.5, 0.25)),
        halves(schedule="linear", trainable=True),
        adjacent(schedule="equal"),
    ]
    marked = [
        Relative(3),
        T5Bias(8, 9),
        LinearBias((0.5, 0.125)),
        Relative(2, sinusoidal=True),
        NoPositions(),
    ]
    seen = patterns(
        "Causal() & (Window.last(3) | Sink(2))",
        "PerHead(Window(2, 0, step=2), Causal())",
        "Causal() & GlobalKeys() | Window.last(2)",
    )
    around = patterns(
        "Window(1, 2) | Global()", "Full() & Window.around(3) | Sink(1)", "Window(2, 2) | GlobalQueries()"
    )
    sees = {"causal": False, "patterns": Full(), "positions": Sinusoidal(100.0, "halves")}
    return {
        "own-patterns": ModelSpec.of("llama", **SIZE | {"layers": 3}, patterns=seen, positions=NoPositions()),
        "own-scalings": ModelSpec.of("llama", **GROUPED | {"layers": 7}, positions=PerLayer(tuple(scaled))),
        "own-schedules": ModelSpec.of("llama", **GROUPED | {"layers": 6}, positions=PerLayer(tuple(scheduled))),
        "own-biases": ModelSpec.of("llama", **SIZE | {"layers": 5}, positions=PerLayer(tuple(marked))),
        "own-shared-bias": ModelSpec.of("llama", **SIZE, positions=T5Bias(8, 9)),
        "own-orthogonal": ModelSpec.of("qwen3", **SIZE, positions=SpecialOrthogonal(adjacent(theta=50.0))),
        "own-linear": ModelSpec.of("llama", **SIZE, positions=adjacent(), linear=LinearAttention("cosine")),
        "own-linear-unsafe": ModelSpec.of(
            "llama", **SIZE, positions=halves(), linear=LinearAttention("exp", "square", "both")),
        "own-linear-encoder": ModelSpec.of(
            "llama", **SIZE, **sees, head=Head("tag", labels=LABELS),
            linear=LinearAttention("softmax", "softmax over tokens", "none", 3.0)),
        "own-encoder": ModelSpec.of(
            "bert", **SIZE | {"layers": 3}, patterns=around, positions=adjacent(), order="pre",
            final_norm=True, norm="rms", norm_bias=False, norm_eps=1e-3, embedding_norm=False, embedding_width=4,
            embedding_scale=3.0, token_types=3, qkv_bias=False, attention_scale=0.4, gated=True, activation="relu",
            tied=False, head=Head("masked-lm", dense="silu"), qk_norm=True, max_context=99, activation_dropout=0.3,
            final_dropout=True, pooled_dropout=True, global_projections=True, init_std=0.5),
        "own-joint": ModelSpec.of("llama", **SIZE, patterns=Causal(), positions=Learned(16, offset=2), order="joint"),
    }  # fmt: skip


def drawn(spec: ModelSpec, seed: int) -> Any:
    """A model whose every trained number is normal with standard deviation 0.3, gains around 1."""
    model = build(spec, dtype=torch.float32, seed=0)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            is_gain = "norm" in name and name.endswith("weight")
            p.copy_(torch.randn(p.shape, generator=g) * 0.3 + is_gain)
    return model.eval()


def save(name: str, model: Any, path: Path) -> None:
    """In bfloat16, but for one folder in float32, with a tokenizer, and one in float16; in shards where it says so."""
    dtype = {"llama": None, "mistral": torch.float16}.get(name, torch.bfloat16)
    if name == "bert-classify":
        Classifier(model.bfloat16(), independent=True).save(path)
        return
    tokenizer = words() if name == "llama" else None
    starts = (
        {"decoder_start_token_id": 3, "eos_token_id": 0} if model.spec.encoder is not None else GENERATION
    )
    save_folder(
        path, model, dtype=dtype, tokenizer=tokenizer, generation=starts if model.spec.causal else None,
        keep_pairing=name.startswith("own"), shard_bytes=1500 if name == "ministral" else 1 << 30,
    )  # fmt: skip


def said(path: Path) -> Mapping[str, Any]:
    """What a folder says beside what its logits show."""
    folder, face = load_folder(path), headway.load(path)
    spec = folder.spec
    return {
        "model_type": folder.config["model_type"],
        "face": type(face).__name__,
        "independent": getattr(face, "independent", None),
        "dtype": str(next(face.model.parameters()).dtype),
        "generation": dict(folder.generation),
        "labels": list(spec.head.labels),
        "spec": {name: getattr(spec, name) for name in EVALUATION_FACTS},
        "encoder": spec.encoder and {name: getattr(spec.encoder, name) for name in EVALUATION_FACTS},
    }


def write_models() -> None:
    shutil.rmtree(HERE / "models", ignore_errors=True)
    facts, logits = {}, {}
    specs = {**llamas(), **decoders(), **encoders(), **pairs(), **own()}
    for seed, (name, spec) in enumerate(specs.items()):
        path = HERE / "models" / name
        save(name, drawn(spec, seed), path)
        facts[name] = said(path)
        model: Any = build_model(load_folder(path), dtype=torch.float32)
        args, options = inputs(model)
        with torch.no_grad():
            logits[name] = model(*args, **options).contiguous()
        assert facts[name]["model_type"] == "headway" or not name.startswith("own"), name
    said_of_all = {"kernels": kernels(), "folders": facts}
    (HERE / "models.json").write_text(json.dumps(said_of_all) + "\n", "utf-8")
    save_file(logits, HERE / "models.safetensors")


def write_tokens() -> None:
    shutil.rmtree(HERE / "tokens", ignore_errors=True)
    expected = {}
    for name, vocab in {"uint16": 1 << 16, "uint32": (1 << 16) + 1}.items():
        path = HERE / "tokens" / f"{name}.tokens"
        with TokenFileWriter(path, vocab, fingerprint=bytes(range(32))) as out:
            for ids in ([vocab - 1, 0, 7], [5], np.arange(40)):
                out.add(ids, text_bytes=2 * len(ids))
        file = TokenFile(path)
        expected[name] = {
            "vocab": file.vocab,
            "text_bytes": file.text_bytes,
            "fingerprint": file.fingerprint.hex(),
            "documents": [file.document(i).tolist() for i in range(file.documents)],
        }
    (HERE / "tokens" / "expected.json").write_text(json.dumps(expected) + "\n", "utf-8")
