"""Forms of a linear layer's weights: a table that loading, quantizing, training, decoding and sharing go by."""

from headway.nn.weights.base import Weight
from headway.nn.weights.compressed import CompressedWeight
from headway.nn.weights.nf4 import Nf4
from headway.nn.weights.plain import Plain
from headway.nn.weights.rounded import Int4, Int8, Rounded, from_codes

WEIGHTS: dict[str, type[Weight]] = {form.name: form for form in (Plain, CompressedWeight, Int8, Int4, Nf4)}
"""Every form by its name."""

__all__ = ["WEIGHTS", "CompressedWeight", "Int4", "Int8", "Nf4", "Plain", "Rounded", "Weight", "from_codes"]
