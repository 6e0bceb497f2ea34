"""What a model costs, counted from its spec before it is built: functions of a `ModelSpec`."""

from headway.models.cost.key_values import cache_slots, kv_bytes_per_token, kv_bytes_read, kv_bytes_stored
from headway.models.cost.operations import attention_pairs, decode_flops, prefill_flops, train_flops
from headway.models.cost.planning import LayerPlan, Machine, Report, plan
from headway.models.cost.receptive_fields import reach, receptive_field
from headway.models.cost.training import activation_bytes, training_bytes
from headway.models.cost.weights import (
    matrix_weights,
    parameter_count,
    parameters,
    weight_bytes,
    weight_bytes_read,
)

__all__ = [
    "LayerPlan",
    "Machine",
    "Report",
    "activation_bytes",
    "attention_pairs",
    "cache_slots",
    "decode_flops",
    "kv_bytes_per_token",
    "kv_bytes_read",
    "kv_bytes_stored",
    "matrix_weights",
    "parameter_count",
    "parameters",
    "plan",
    "prefill_flops",
    "reach",
    "receptive_field",
    "train_flops",
    "training_bytes",
    "weight_bytes",
    "weight_bytes_read",
]
