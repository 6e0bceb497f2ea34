"""The families that are not of LLaMA's form, as they lie in the Hugging Face folder: data, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from headway.checkpoints.hf.layouts.bart import BART, MBART
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.bert import BERT
from headway.checkpoints.hf.layouts.bloom import BLOOM
from headway.checkpoints.hf.layouts.falcon import FALCON
from headway.checkpoints.hf.layouts.gpt2 import GPT2
from headway.checkpoints.hf.layouts.gpt_bigcode import GPT_BIGCODE
from headway.checkpoints.hf.layouts.gpt_neox import GPT_NEOX
from headway.checkpoints.hf.layouts.longformer import LONGFORMER
from headway.checkpoints.hf.layouts.marian import MARIAN
from headway.checkpoints.hf.layouts.mpt import MPT
from headway.checkpoints.hf.layouts.phi import PHI
from headway.checkpoints.hf.layouts.roberta import ROBERTA
from headway.checkpoints.hf.layouts.roformer import ROFORMER
from headway.checkpoints.hf.layouts.starcoder2 import STARCODER2
from headway.checkpoints.hf.layouts.t5 import T5

_ALL = (
    BERT,
    ROBERTA,
    ROFORMER,
    LONGFORMER,
    GPT2,
    GPT_BIGCODE,
    FALCON,
    STARCODER2,
    GPT_NEOX,
    PHI,
    BLOOM,
    MPT,
    MARIAN,
    BART,
    MBART,
    T5,
)
LAYOUTS: Mapping[str, Layout] = MappingProxyType({layout.family: layout for layout in _ALL})
SAVED_AS: Mapping[str, str] = MappingProxyType({"wobert": "bert"})
"""Families whose folders are another's."""


def layout_of(family: str) -> Layout | None:
    """The layout that a family's folders have; None where they are of LLaMA's form, or headway's own."""
    return LAYOUTS.get(SAVED_AS.get(family, family))


__all__ = ["LAYOUTS", "SAVED_AS", "Layout", "layout_of"]
