"""Names that other trainers use for our settings."""

from collections.abc import Mapping

from pydantic.fields import FieldInfo

from headway.errors import did_you_mean

ELSEWHERE = {
    "task": ("objective",),
    "lr": ("learning_rate", "max_lr"),
    "clip": ("grad_clip", "max_grad_norm"),
    "steps": ("max_steps", "max_iters"),
    "epochs": ("num_train_epochs", "num_epochs"),
    "micro_batch": ("per_device_train_batch_size", "micro_batch_size"),
    "batch_tokens": ("batch_size", "gradient_accumulation_steps"),
    "out": ("output_dir", "out_dir"),
    "model": ("model_name_or_path",),
    "data": ("data_path",),
    "context": ("block_size", "model_max_length"),
    "warmup": ("warmup_ratio", "warmup_steps"),
    "keep_best": ("load_best_model_at_end", "save_top_k"),
    "best_by": ("metric_for_best_model", "monitor"),
    "early_stopping_patience": ("early_stopping", "stop_patience"),
    "log_every": ("logging_steps",),
    "eval_every": ("eval_steps",),
    "save_every": ("save_steps",),
    "keep_last": ("save_total_limit",),
    "save_in_background": ("async_save", "async_mode"),
    "adapter": ("peft_type", "use_lora", "use_peft"),
    "rank": ("r", "lora_r", "lora_rank"),
    "alpha": ("lora_alpha",),
    "adapter_targets": ("target_modules", "lora_target_modules"),
    "adapter_dropout": ("lora_dropout",),
    "base": ("load_in_4bit", "quantization"),
    "depth": ("num_layers", "n_layer"),
    "dtype": ("bf16",),
    "vocab": ("vocab_size",),
}
"""Our setting -> its names elsewhere, which are too different for a search by similarity."""


def known_as(key: str, fields: Mapping[str, FieldInfo]) -> str:
    """Returns a hint for an unknown setting: ` (here it is "lr": ...)` for a name used elsewhere, else the most similar
    name of ours, else the empty string."""
    foreign = key.removeprefix("--").replace("-", "_")
    for ours, names in ELSEWHERE.items():
        if foreign in names and ours in fields:
            return f' (here it is "{ours}": {fields[ours].description})'
    return did_you_mean(key, fields)
