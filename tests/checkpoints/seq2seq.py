"""The oracle for encoder-decoders: transformers models of small configs with random weights, also in float64.

Weights have standard deviation 0.3: at 0.02 attention is nearly uniform and wrong positions, scales or norms hide.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.mt5.modeling_mt5 import MT5LayerNorm
from transformers.models.pegasus.modeling_pegasus import PegasusSinusoidalPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5LayerNorm


@dataclass(frozen=True)
class Case:
    """A family and its config. T5 does not scale scores, and initializes the weights of queries smaller by d_kv^-0.5
    instead; so does this oracle, unless `sharp`: then they are as large as all others."""

    family: str
    settings: dict[str, Any]
    sharp: bool = False


V = 61
SINES = MarianSinusoidalPositionalEmbedding | PegasusSinusoidalPositionalEmbedding
PAIR: dict[str, Any] = {
    "vocab_size": V,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 60,
    "eos_token_id": 0,
    "decoder_start_token_id": 60,
    "forced_eos_token_id": 0,
}
MARIAN = {**PAIR, "scale_embedding": True, "activation_function": "swish"}
APART = {**MARIAN, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 53, "pad_token_id": 52}
T5 = {"vocab_size": V, "d_model": 48, "d_kv": 10, "d_ff": 80, "num_layers": 2, "num_heads": 4}
NEW_T5 = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
SCALED = {**PAIR, "scale_embedding": True}
M2M = {**PAIR, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "max_position_embeddings": 96}
MILD: dict[str, Case] = {
    "marian": Case("marian", MARIAN),
    "marian, relu, not scaled": Case("marian", {**PAIR, "activation_function": "relu"}),
    "marian, two vocabs": Case("marian", APART),
    "marian, two vocabs, untied": Case("marian", {**APART, "tie_word_embeddings": False}),
    "bart": Case("bart", PAIR),
    "bart, scaled, gelu_new": Case(
        "bart", {**PAIR, "scale_embedding": True, "activation_function": "gelu_new"}
    ),
    "bart, untied": Case("bart", {**PAIR, "tie_word_embeddings": False}),
    "mbart": Case("mbart", {**PAIR, "scale_embedding": True}),
    "mbart, relu": Case("mbart", {**PAIR, "activation_function": "relu"}),
    "t5 1.0": Case("t5", T5),
    "t5 1.0, more layers, few buckets": Case(
        "t5",
        {
            **T5,
            "num_decoder_layers": 3,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 9,
        },
    ),
    "t5 1.1": Case("t5", {**NEW_T5, "num_decoder_layers": 3}),
    "t5, gated-silu, tied": Case("t5", {**T5, "feed_forward_proj": "gated-silu"}),
    "mt5": Case("mt5", {**T5, "num_decoder_layers": 3}),
    "plbart": Case("plbart", {**PAIR, "attention_dropout": 0.0}),
    "mvp": Case("mvp", PAIR),
    "blenderbot": Case("blenderbot", {**SCALED, "activation_function": "relu"}),
    "blenderbot, untied": Case("blenderbot", {**PAIR, "tie_word_embeddings": False}),
    "pegasus": Case("pegasus", {**SCALED, "activation_function": "relu"}),
    "pegasus, untied": Case("pegasus", {**PAIR, "tie_word_embeddings": False}),
    "m2m_100": Case("m2m_100", M2M),
    "m2m_100, not scaled, untied": Case(
        "m2m_100",
        {**M2M, "scale_embedding": False, "activation_function": "gelu", "tie_word_embeddings": False},
    ),
}
SHARP = {f"{name}, sharp": replace(case, sharp=True) for name, case in MILD.items() if case.family == "t5"}
CASES = MILD | SHARP
SOURCE = torch.randint(0, 53, (2, 13), generator=torch.Generator().manual_seed(1))
TARGET = torch.randint(0, 53, (2, 11), generator=torch.Generator().manual_seed(2))


def theirs(name: str) -> Any:
    """Returns a case's transformers model: trained parameters (norm gains around 1) and logit biases are normal."""
    case = CASES[name]
    model = AutoModelForSeq2SeqLM.from_config(
        AutoConfig.for_model(case.family, **case.settings), attn_implementation="eager"
    )
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.requires_grad:
                gain = key.endswith("weight") and p.dim() == 1
                small = key.endswith("Attention.q.weight") and not case.sharp
                std = 0.3 * (case.settings["d_kv"] ** -0.5 if small else 1.0)
                p.copy_(torch.randn(p.shape, generator=g) * std + gain)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(0, 0.3, generator=g)
        if name.startswith(("t5 1.1", "mt5")):  # transformers ties it until a file says otherwise
            model.lm_head.weight = torch.nn.Parameter(torch.randn(V, 48, generator=g) * 0.3)
    return model.eval()


def on_sdpa(model: Any) -> Any:
    """Returns a copy of the model on transformers' other attention kernel."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("sdpa")
    return model


def exact(model: Any) -> Any:
    """Returns a copy of the model entirely in float64: transformers' T5 computes a norm's mean square in float32 for
    any input, and Marian's sines were rounded to float32."""
    model = copy.deepcopy(model).double()
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, T5LayerNorm | MT5LayerNorm):
                norm = torch.nn.RMSNorm(part.weight.shape, part.variance_epsilon)
                norm.weight = part.weight
                setattr(module, name, norm)
            elif isinstance(part, M2M100SinusoidalPositionalEmbedding):
                rows, columns = part.weights.shape
                rate = 10000.0 ** (-torch.arange(columns // 2, dtype=torch.float64) / (columns // 2 - 1))
                angle = torch.outer(torch.arange(rows, dtype=torch.float64), rate)
                sines = torch.cat((angle.sin(), angle.cos()), 1)
                sines[part.padding_idx] = 0
                assert float((sines - part.weights).abs().max()) < 1e-5
                part.weights = sines
            elif isinstance(part, SINES):
                rows, columns = part.weight.shape
                rate = 10000.0 ** (-torch.arange(0, columns, 2, dtype=torch.float64) / columns)
                angle = torch.outer(torch.arange(rows, dtype=torch.float64), rate)
                sines = torch.cat((angle.sin(), angle.cos()), 1)
                assert float((sines - part.weight).abs().max()) < 1e-7
                part.weight.data = sines
    return model


def logits(
    model: Any, source: Tensor = SOURCE, target: Tensor = TARGET, mask: Tensor | None = None
) -> Tensor:
    """Returns the logits of a transformers model."""
    return model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits  # type: ignore[no-any-return]
