"""Small intact model folders for the fuzzer to break: Llama-like families, encoders, decoders, encoder-decoders."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models

from headway.attention.linear_attention import LinearAttentionSpec
from headway.checkpoints import save_folder
from headway.checkpoints.hf.layouts import LAYOUTS
from headway.checkpoints.hf.layouts.base import Layout
from headway.models import Head, ModelSpec, build
from headway.models.expert_families import EXPERTS
from headway.models.hybrid_families import HYBRIDS
from headway.patterns import Causal, Global, PerHead, Window
from headway.positions import DynamicNTK, LinearScaling, Llama3, LongRope, NoPositions, Rotary, YaRN
from tests.checkpoints import decoder_rows, expert_rows, gemma3n_rows, gemma4_rows

SCALINGS = (
    None, LinearScaling(2.0), DynamicNTK(2.0, 64), YaRN(4.0, 16), Llama3(8.0, 1.0, 4.0, 16),
    LongRope((1.0, 1.1), (1.0, 2.0), 16, 4.0),
)  # fmt: skip
LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "ministral")
SIZE: dict[str, Any] = {"vocab": 11, "width": 8, "layers": 2, "heads": 2, "hidden": 8}


def llama(root: Path) -> list[Path]:
    """Saves every Llama-like family, with all rotary scalings; some in shards, one with model_type "headway"."""
    folders = []
    for i, family in enumerate(LLAMAS * 2):
        patterns = (Window.last(3), Causal()) if family in ("qwen2", "ministral") else Causal()
        spec = ModelSpec.of(
            family, **SIZE, kv_heads=1, patterns=patterns, tied=i % 2 == 0, head_dim=4, trained_context=64,
            positions=Rotary(pairing="halves", scaling=SCALINGS[i % len(SCALINGS)]),
        )  # fmt: skip
        spec = spec if i != 9 else ModelSpec(**{**vars(spec), "positions": Rotary(pairing="adjacent")})
        folders.append(saved(root / f"{i}", spec, 600 if i % 3 == 0 else 10**9))
        vocabulary = models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])
        (folders[-1] / "tokenizer.json").write_text(Backend(vocabulary).to_str())
    return folders


def saved(path: Path, spec: ModelSpec, shard_bytes: int = 10**9) -> Path:
    save_folder(
        path, build(spec, seed=0), keep_pairing=True, shard_bytes=shard_bytes, generation={"eos_token_id": 2}
    )
    return path


LABELS = {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}
BERT: dict[str, Any] = {
    "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12,
    "max_position_embeddings": 20,
}  # fmt: skip
DISTILBERT: dict[str, Any] = {
    "vocab_size": 11, "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12, "max_position_embeddings": 20,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 11,
    "n_positions": 16,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "n_inner": 12,
}
FALCON: dict[str, Any] = {
    "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 16,
}  # fmt: skip
NEOX: dict[str, Any] = {
    "vocab_size": 11, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 16,
}  # fmt: skip
LLAMA_ALIASES = ("internlm3", "iquestcoder")
KIN = NEOX | {"num_key_value_heads": 1, "rms_norm_eps": 1e-5}
OPT = {key: value for key, value in NEOX.items() if key != "intermediate_size"} | {"ffn_dim": 12}
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
MINISTRAL = {"rope_theta": 500.0, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 4}
XGLM: dict[str, Any] = {
    "vocab_size": 11, "d_model": 8, "num_layers": 2, "attention_heads": 2, "ffn_dim": 12,
    "max_position_embeddings": 16,
}  # fmt: skip
GPT1 = {key: value for key, value in GPT2.items() if key != "n_inner"}
NEO: dict[str, Any] = {
    "vocab_size": 11, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "intermediate_size": 12,
    "max_position_embeddings": 16, "window_size": 3,
}  # fmt: skip
PAIR: dict[str, Any] = {
    "vocab_size": 11, "d_model": 8, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 1, "encoder_ffn_dim": 12, "decoder_ffn_dim": 10, "max_position_embeddings": 16,
    "pad_token_id": 10, "decoder_start_token_id": 10,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": 11, "d_model": 8, "d_kv": 6, "d_ff": 12, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "n_positions": 16,
}  # fmt: skip
Case = tuple[str, str, dict[str, Any]]
"""The family, the kind of head and the config."""
ENCODERS: list[Case] = [
    *(("bert", task, BERT) for task in ("masked-lm", "states", "answer")),
    *(("bert", task, BERT | LABELS) for task in ("classify", "tag")),
    ("roberta", "masked-lm", BERT), ("roberta", "classify", BERT | LABELS),
    ("roberta", "tag", BERT | {"num_labels": 3}),
    ("roformer", "masked-lm", BERT | {"embedding_size": 8, "rotary_value": False}), ("roformer", "answer", BERT),
    ("longformer", "masked-lm", BERT | {"attention_window": [2, 4]}),
    ("longformer", "answer", BERT | {"attention_window": 4}),
    ("xlm-roberta", "masked-lm", BERT), ("camembert", "classify", BERT | LABELS), ("data2vec-text", "states", BERT),
    ("roberta-prelayernorm", "tag", BERT | LABELS), ("electra", "masked-lm", BERT | {"embedding_size": 6}),
    ("distilbert", "masked-lm", DISTILBERT), ("megatron-bert", "answer", BERT), ("ernie", "masked-lm", BERT),
    ("jina_embeddings_v3", "classify", BERT | LABELS), ("nomic_bert", "masked-lm", BERT | {"head_dim": 6}),
    ("modernbert", "masked-lm", BERT | {"pad_token_id": 0}),
    ("eurobert", "masked-lm", BERT | {"num_key_value_heads": 1}),
    ("eurobert", "classify", BERT | LABELS | {"classifier_pooling": "mean"}),
]  # fmt: skip
DECODERS: list[Case] = [
    ("gpt2", "lm", GPT2), ("gpt2", "lm", GPT2 | {"tie_word_embeddings": False}),
    ("gpt_bigcode", "lm", GPT2), ("gpt_bigcode", "lm", GPT2 | {"multi_query": False}),
    ("falcon", "lm", FALCON), ("falcon", "lm", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 1}),
    ("falcon", "lm", FALCON | {"multi_query": False, "bias": True, "parallel_attn": False}),
    ("starcoder2", "lm", NEOX | {"num_key_value_heads": 1, "sliding_window": 5}),
    ("gpt_neox", "lm", NEOX | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rotary_pct": 0.5}),
    ("phi", "lm", NEOX | {"num_key_value_heads": 1}),
    ("bloom", "lm", {"vocab_size": 11, "hidden_size": 8, "n_layer": 2, "n_head": 2}),
    ("smollm3", "lm", KIN | {"no_rope_layers": [1, 0]}), ("phi3", "lm", KIN),
    *((family, "lm", KIN | {"head_dim": 8}) for family in ("glm", "glm4", "ernie4_5", "helium", "seed_oss")),
    *((family, "lm", KIN | {"head_dim": 8}) for family in LLAMA_ALIASES),
    ("exaone4", "lm", KIN | {"sliding_window_pattern": 2}), ("cohere", "lm", NEOX),
    ("cohere2", "lm", NEOX | {"sliding_window": 5, "sliding_window_pattern": 2}),
    *((family, "lm", KIN) for family in ("arcee", "hyperclovax", "hunyuan_v1_dense")),
    ("cwm", "lm", KIN | {"head_dim": 8, "sliding_window": 5, "rope_parameters": LLAMA3}),
    *((family, "lm", KIN | {"rope_parameters": LLAMA3}) for family in ("apertus", "apertus1p5_text")),
    ("exaone", "lm", KIN),
    ("ministral3", "lm", KIN | {"head_dim": 8, "rope_parameters": MINISTRAL}),
    ("granite_swa", "lm", KIN | {"sliding_window": 5, "layer_rope_theta": [500.0, 0]}),
    *((family, "lm", NEOX) for family in ("olmo", "nemotron", "jais2", "persimmon", "nanochat")),
    ("modernbert-decoder", "lm", NEOX), ("bert", "lm", BERT | {"is_decoder": True}),
    ("ctrl", "lm", GPT1 | {"dff": 12}), ("xglm", "lm", XGLM),
    ("stablelm", "lm", NEOX | {"num_key_value_heads": 1}), ("gptj", "lm", GPT2 | {"rotary_dim": 2}),
    ("codegen", "lm", GPT2 | {"n_head": 4, "rotary_dim": 2}), ("opt", "lm", OPT), ("biogpt", "lm", NEOX),
    ("gpt_neo", "lm", NEO | {"attention_types": [[["global", "local"], 1]]}), ("openai-gpt", "lm", GPT1),
    *((family, "lm", NEOX) for family in ("granite", "olmo2", "olmo3")),
    *((family, "lm", NEOX | {"head_dim": 8, "num_key_value_heads": 1, "pad_token_id": 0})
      for family in ("gemma", "gemma2", "vaultgemma", "gemma3_text")),
    ("gemma3n_text", "lm", gemma3n_rows.CASES["gemma3n"][1]),
    ("gemma4_text", "lm", gemma4_rows.CASES["gemma4, e2b"][1]),
    *((family, "lm", {key: value for key, value in config.items() if "rope" not in key and "max_pos" not in key})
      for family, config in dict([*decoder_rows.CASES.values(), *expert_rows.CASES.values()]).items()
      if family in (*EXPERTS, *HYBRIDS)),
    ("mpt", "lm", {"vocab_size": 11, "d_model": 6, "n_layers": 2, "n_heads": 3, "max_seq_len": 16}),
]  # fmt: skip
PAIRS: list[Case] = [
    ("marian", "lm", PAIR | {"scale_embedding": True, "activation_function": "swish"}),
    ("marian", "lm", PAIR | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 9, "pad_token_id": 8}),
    ("bart", "lm", PAIR), ("bart", "lm", PAIR | {"tie_word_embeddings": False}), ("mbart", "lm", PAIR),
    *((family, "lm", PAIR) for family in ("plbart", "mvp", "blenderbot", "pegasus", "m2m_100")), ("mt5", "lm", T5),
    ("t5", "lm", T5), ("t5", "lm", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
]  # fmt: skip


def keys_of(config: dict[str, Any]) -> list[str]:
    """Returns the keys that mean something to the config's family, whether the config has them or not."""
    layout = LAYOUTS.get(config.get("model_type", ""))
    common = ["rope_scaling", "rope_parameters", "rope_theta", "headway", "head_dim", "num_key_value_heads"]
    if layout is None:
        return common
    parts = (key for part in layout.parts for key in part.keys)
    return [*parts, *layout.more, *layout.only, *layout.harmless, *common]


def told(layout: Layout) -> dict[str, Any]:
    """Returns the values that the layout takes for absent keys."""
    return {key: value for key, value in layout.defaults.items() if value is not None}


def foreign(root: Path, cases: list[Case]) -> list[Path]:
    """Saves a folder for each case; its config.json also has every key for which the family has a default."""
    folders = []
    for i, (family, task, settings) in enumerate(cases):
        layout = LAYOUTS[family]
        name = next(name for name, kind in layout.architectures.items() if kind == task)
        config = {**told(layout), **settings, "model_type": family, "architectures": [name]}
        folders.append(saved(root / f"{i}", layout.spec(config), 900 if i % 3 == 2 else 10**9))
        file = folders[-1] / "config.json"
        file.write_text(json.dumps({**config, **json.loads(file.read_text())}))
    return folders


def encoders(root: Path) -> list[Path]:
    """Saves every encoder family with every kind of head; Longformer and Nezha in headway's own format."""
    nezha = ModelSpec.of("nezha", **SIZE).with_head(Head("embed", pool="mean"))
    patterns = PerHead(Window.around(1), Window.around(2, step=2)) | Global()
    dilated = ModelSpec.of("longformer", **SIZE, patterns=patterns, positions=NoPositions())
    native = [saved(root / name, spec) for name, spec in (("nezha", nezha), ("dilated", dilated))]
    return foreign(root, ENCODERS) + native


def decoders(root: Path) -> list[Path]:
    """Saves every decoder family that is not Llama-like, and linear attention in headway's own format."""
    linear = ModelSpec.of("llama", **SIZE, kv_heads=1).with_mixer(LinearAttentionSpec())
    return [*foreign(root, DECODERS), saved(root / "linear", linear)]


def pairs(root: Path) -> list[Path]:
    """Saves every encoder-decoder family, and the Transformer of 2017 in headway's own format."""
    spec = ModelSpec.of_pair("transformer", **SIZE, encoder={"layers": 1})
    return [*foreign(root, PAIRS), saved(root / "2017", spec)]
