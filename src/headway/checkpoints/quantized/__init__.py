"""Folders with 8-bit or 4-bit weights: their `quantization_config`, storage formats, and names of layers."""
