"""The classes that the documents print, under their own names and with their own arguments.

Plain torch, each short enough to read in one sitting, importing nothing from the engine: what a reader of the
documents tries first, and oracles for the rest of headway. Where a document slips, the right thing is done
and the docstring says so.
"""

from headway.classic.attention import MultiHeadMaskedSelfAttention
from headway.classic.llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb, rotate_half
from headway.classic.masking import causal_mask, masked_softmax, padding_scores
from headway.classic.multiquery import MultiQueryAttention
from headway.classic.rotary import apply_rotary_emb, precompute_freqs_cis

__all__ = [
    "LlamaRMSNorm",
    "LlamaRotaryEmbedding",
    "MultiHeadMaskedSelfAttention",
    "MultiQueryAttention",
    "apply_rotary_emb",
    "apply_rotary_pos_emb",
    "causal_mask",
    "masked_softmax",
    "padding_scores",
    "precompute_freqs_cis",
    "rotate_half",
]
