"""Folders with weights of 8 or 4 bits: what `quantization_config` says, how the numbers lie, and under which names."""
