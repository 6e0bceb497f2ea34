"""headway inside `transformers`, for existing code that uses its models.

import headway.integrations.transformers                 attn_implementation="headway": headway's attention only
accelerate(model)                                        all that headway computes faster, in a loaded model
restore(model)                                           undoes it"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "headway.integrations.transformers needs the package `transformers` (5.23 or newer), which cannot be "
        'imported; pip install "headway[transformers]"'
    ) from error

from headway.integrations.transformers import own_attention  # noqa: F401
from headway.integrations.transformers.accelerate import Report, accelerate, restore
from headway.integrations.transformers.interface import NAME, Seen, attention, declared, seen

__all__ = ["NAME", "Report", "Seen", "accelerate", "attention", "declared", "restore", "seen"]
