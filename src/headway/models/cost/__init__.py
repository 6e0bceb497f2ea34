"""Cost estimates of a model, computed from its `ModelSpec` before it is built."""

from headway.models.cost.activations import activation_bytes
from headway.models.cost.devices import DEVICES, Machine, device_named
from headway.models.cost.operations import (
    attention_pairs,
    cache_slots,
    decode_flops,
    head_flops,
    kv_bytes_per_token,
    kv_bytes_read,
    kv_bytes_stored,
    memory_bytes,
    prefill_flops,
    reach,
    receptive_field,
    train_flops,
)
from headway.models.cost.peak import training_bytes
from headway.models.cost.planning import plan
from headway.models.cost.report import LayerPlan, Report
from headway.models.cost.training_time import TrainingTime, training_time
from headway.models.cost.weights import (
    Codes,
    Kept,
    active_parameters,
    adapter_parameters,
    kept_bytes,
    matrix_weights,
    parameter_count,
    parameters,
    trained_bytes,
    weight_bytes_read,
)

__all__ = [
    "DEVICES",
    "Codes",
    "Kept",
    "LayerPlan",
    "Machine",
    "Report",
    "TrainingTime",
    "activation_bytes",
    "active_parameters",
    "adapter_parameters",
    "attention_pairs",
    "cache_slots",
    "decode_flops",
    "device_named",
    "head_flops",
    "kept_bytes",
    "kv_bytes_per_token",
    "kv_bytes_read",
    "kv_bytes_stored",
    "matrix_weights",
    "memory_bytes",
    "parameter_count",
    "parameters",
    "plan",
    "prefill_flops",
    "reach",
    "receptive_field",
    "train_flops",
    "trained_bytes",
    "training_bytes",
    "training_time",
    "weight_bytes_read",
]
