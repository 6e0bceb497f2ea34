"""XLM-R, CamemBERT, data2vec and RoBERTa with its norms in front as `transformers` stores them (Conneau et al. 2019;
Martin et al. 2019; Baevski et al. 2022; Wettig et al. 2022)."""

from functools import partial
from typing import Any

from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.encoders import LM_HEAD, MODULES, MORE, encoder_layout
from headway.checkpoints.hf.layouts.roberta import CLASSIFIER, read_roberta, write_roberta

PRE_NORMS = {"input_layernorm": "attention.LayerNorm", "post_attention_layernorm": "intermediate.LayerNorm"}


def _layout(family: str, name: str, **names: Any) -> Layout:
    """The layout of one of them; `names` as in `encoder_layout`."""
    read = partial(read_roberta, family=family)
    more = {**MORE, "pad_token_id": 1}
    names |= {"classifier": CLASSIFIER, "more": more, "decoder": "ForCausalLM"}
    return encoder_layout(family, name, read, write_roberta, LM_HEAD, **names)


XLM_ROBERTA = _layout("xlm-roberta", "XLMRoberta", base="roberta")
CAMEMBERT = _layout("camembert", "Camembert", base="roberta")
DATA2VEC = _layout("data2vec-text", "Data2VecText", base="data2vec_text")
PRELAYERNORM = _layout(
    "roberta-prelayernorm",
    "RobertaPreLayerNorm",
    base="roberta_prelayernorm",
    modules={**MODULES, **PRE_NORMS},
    stack={"norm": "LayerNorm"},
)
