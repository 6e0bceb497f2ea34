"""Surgery: turns a model into another one. Its function changes, so every operation measures it before and after.

Operations are pure functions (spec, state) -> (spec, state), where `state` has the names of `Decoder.state_dict()`.
`operate` takes a folder, the result of an operation and a text, and writes a new folder with a report; `lengthen` does
this for an encoder, `quantize_folder` for weights of 8 or 4 bits.
"""

from headway.checkpoints.rewriting import Change, Rewritten
from headway.surgery.context import METHODS, open_layers, parse_layers, put_window, stretch_context
from headway.surgery.heads import POOLS, Pooled, compare_pools, kept_by_mean, pool_heads, verdict
from headway.surgery.longformer import lengthen, make_longformer
from headway.surgery.operation import Text, operate, row_length
from headway.surgery.quantize import quantize_folder

__all__ = [
    "METHODS",
    "POOLS",
    "Change",
    "Pooled",
    "Rewritten",
    "Text",
    "compare_pools",
    "kept_by_mean",
    "lengthen",
    "make_longformer",
    "open_layers",
    "operate",
    "parse_layers",
    "pool_heads",
    "put_window",
    "quantize_folder",
    "row_length",
    "stretch_context",
    "verdict",
]
