"""Reference implementations of the classes that the documents print, under their own names and with their own
arguments.

Plain PyTorch, each short enough to read in one sitting, importing nothing from the engine. A reader of the documents
can try them first, and tests use them as oracles for the rest of headway. Where a document is wrong, the code does the
right thing and the docstring says so.
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
