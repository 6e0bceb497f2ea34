"""Small models of `transformers` to be accelerated, and a step of each."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

LENGTH, VOCAB = 23, 61


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


GROUPED = {**SIZES, "num_key_value_heads": 2}


WINDOWED = {"sliding_window": 5}


EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


PAIR = {
    "vocab_size": VOCAB,
    "d_model": 32,
    **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
       (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))},
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", GROUPED),
    "Mistral": ("ForCausalLM", {**GROUPED, **WINDOWED}),
    "Qwen2": ("ForCausalLM", {**GROUPED, **WINDOWED, "use_sliding_window": True, "max_window_layers": 1}),
    "Qwen3": ("ForCausalLM", {**GROUPED, "head_dim": 8}),
    "Gemma2": ("ForCausalLM", {**GROUPED, **WINDOWED, "head_dim": 8, "attn_logit_softcapping": 2.0}),
    "Phi3": ("ForCausalLM", {**GROUPED, **WINDOWED}),
    "GPT2": ("LMHeadModel", SIZES),
    "GPTNeoX": ("ForCausalLM", SIZES),
    "Phi": ("ForCausalLM", GROUPED),
    "Starcoder2": ("ForCausalLM", {**GROUPED, **WINDOWED}),
    "Olmo2": ("ForCausalLM", GROUPED),
    "Cohere": ("ForCausalLM", GROUPED),
    "Qwen2Moe": (
        "ForCausalLM",
        {**GROUPED, **EXPERTS},
    ),  # makes the mask of a window although no layer has one
    "Qwen3Moe": ("ForCausalLM", {**GROUPED, **EXPERTS, "num_experts_per_tok": 2, "head_dim": 8}),
    "Mixtral": ("ForCausalLM", {**GROUPED, **WINDOWED, "num_local_experts": 4}),
    "GptOss": ("ForCausalLM", {**GROUPED, **WINDOWED, "num_local_experts": 4, "head_dim": 8}),
    "Granite": ("ForCausalLM", {**GROUPED, "residual_multiplier": 0.22, "logits_scaling": 3.0}),
    "Lfm2": (
        "ForCausalLM",
        {**GROUPED, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "full_attention"]},
    ),
    "ModernBert": ("ForMaskedLM", {**SIZES, "cls_token_id": 1, "sep_token_id": 2}),
    "Bert": ("ForMaskedLM", SIZES),
    "Roberta": ("ForMaskedLM", {**SIZES, "pad_token_id": 0}),
    "Longformer": ("ForMaskedLM", {**SIZES, "attention_window": 4}),
    "Marian": ("MTModel", PAIR),
}


DECODERS = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Phi3", "GPT2", "Phi", "Cohere"]


def random_weights(model: Any) -> Any:
    """Draws the matrices of a model anew, with a standard deviation of 0.3, and returns it."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def made(family: str) -> Any:
    """Returns a small model with random weights."""
    task, sizes = FAMILIES[family]
    return random_weights(
        getattr(transformers, family + task)(getattr(transformers, family + "Config")(**sizes))
    )


def sunk(family: str) -> Any:
    """Returns a model with a sink logit for each head, which eager attention computes as a column or as a factor."""
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8} if family == "GptOss" else {}
    config = getattr(transformers, family + "Config")(**GROUPED, **sizes, **WINDOWED)
    model = random_weights(getattr(transformers, family + "ForCausalLM")(config))
    for block in model.model.layers:
        nn.init.normal_(block.self_attn.sinks)
    return model


def inputs(model: Any) -> dict[str, Tensor]:
    """Returns two rows, one with padding on the left (on the right for encoders), and labels for most tokens."""
    ids, mask = torch.randint(3, VOCAB, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.long)
    decoder = model.can_generate() and not model.config.is_encoder_decoder
    mask[0, slice(0, 9) if decoder else slice(-9, None)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 9] = -100  # in a decoder this is the label of a padding slot
    arguments = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if model.config.model_type == "longformer":
        arguments["global_attention_mask"] = torch.zeros_like(mask).index_fill(1, torch.tensor([0, 3]), 1)
    return arguments


def run(model: Any, arguments: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns the loss, the logits without gradient, and the gradients of a step in training mode."""
    model.zero_grad()
    dropout_free(model.train())
    loss = model(**arguments).loss
    loss.backward()
    with torch.no_grad():
        logits = model.eval()(
            **{
                name: t
                for name, t in arguments.items()
                if name != "labels" or model.config.is_encoder_decoder
            }
        )
    return (
        loss.detach(),
        logits.logits,
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
    )


def dropout_free(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0


def close(ours: Tensor, theirs: Tensor, share: float) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=share * float(theirs.abs().max()) + 1e-30)
