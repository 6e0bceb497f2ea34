"""Self-instruct: instructions that a model generates from a few seed tasks (Wang et al. 2022; Stanford Alpaca)."""

from headway.instruct.items import Item, read_seeds
from headway.instruct.make import Made, Neighbours, lcs_length, make_instructions, rouge_l, words

__all__ = ["Item", "Made", "Neighbours", "lcs_length", "make_instructions", "read_seeds", "rouge_l", "words"]
