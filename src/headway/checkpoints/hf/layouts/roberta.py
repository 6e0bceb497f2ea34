"""RoBERTa and its kin as `transformers` stores them (Liu et al. 2019): over other texts (XLM-R: Conneau et al. 2019;
CamemBERT: Martin et al. 2019), trained otherwise (data2vec: Baevski et al. 2022), with its norms in front (Wettig et
al. 2022), or with windows (Longformer: Beltagy et al. 2020)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader
from headway.checkpoints.hf.layouts.base import Layout, Part
from headway.checkpoints.hf.layouts.encoders import LM_HEAD, MODULES, ONLY, encoder_layout, head_names
from headway.checkpoints.hf.windows import from_foreign
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.patterns import Global, Pattern
from headway.patterns.primitives import Kind
from headway.patterns.program import interval, without
from headway.positions import Learned


def _behind_padding(family: str) -> Part:
    """Positions, which begin behind the row of padding. Raises ConfigError for a padding id that leaves no rows."""

    def read(given: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        rows, pad = given.whole("max_position_embeddings"), given.get("pad_token_id")
        if type(pad) is not int or not 0 <= pad < rows - 1:
            raise ConfigError(
                f'config.json: positions of a {family} begin behind row "pad_token_id" of a table of {rows} rows '
                f"(max_position_embeddings), so it must be in 0..{rows - 2}; got {pad!r}"
            )
        size = rows - pad - 1
        return {"positions": Learned(size, offset=pad + 1), "trained_context": size}

    def write(spec: ModelSpec) -> dict[str, Any]:
        table = spec.positions if isinstance(spec.positions, Learned) else Learned(spec.trained_context)
        offset = max(table.offset, 1)
        return {"max_position_embeddings": table.size + offset, "pad_token_id": offset - 1}

    return Part({"max_position_embeddings": 512, "pad_token_id": 1}, read, write)


def _layout(family: str, name: str, parts: tuple[Part, ...] = (), **names: Any) -> Layout:
    """The layout of one of them; `names` as in `encoder_layout`."""
    parts = (_behind_padding(family), *parts)
    classifier = head_names("classifier. dense out_proj")
    # hidden_act does not apply in front of the vocab
    return encoder_layout(
        family, name, LM_HEAD, classifier, activations=("gelu", "tanh"), parts=parts, **names
    )


_decoding = partial(_layout, decoder="ForCausalLM")
ROBERTA = _decoding("roberta", "Roberta")
XLM_ROBERTA = _decoding("xlm-roberta", "XLMRoberta", base="roberta")
CAMEMBERT = _decoding("camembert", "Camembert", base="roberta")
DATA2VEC = _decoding("data2vec-text", "Data2VecText", base="data2vec_text")
PRE_NORMS = {"input_layernorm": "attention.LayerNorm", "post_attention_layernorm": "intermediate.LayerNorm"}
PRELAYERNORM = _decoding(
    *("roberta-prelayernorm", "RobertaPreLayerNorm"),
    base="roberta_prelayernorm",
    modules={**MODULES, **PRE_NORMS},
    stack={"norm": "LayerNorm"},
)


def _read_windows(given: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """One window for all layers, or a list with one for each."""
    windows, layers = given.get("attention_window"), fields["layers"]
    each = windows if isinstance(windows, list) else [windows] * layers
    if len(each) != layers:
        raise ConfigError(
            f"config.json: attention_window lists {len(each)} layers, but num_hidden_layers is {layers}"
        )
    if None in each:
        raise ConfigError(
            "config.json: every layer of a longformer has an attention_window, got null; for one that sees all, "
            "take a window of twice the longest row"
        )
    return {"patterns": tuple(from_foreign("attention_window", w) | Global() for w in each)}


def _write_windows(spec: ModelSpec) -> dict[str, Any]:
    windows = [_others(pattern) for pattern in spec.patterns]
    return {"attention_window": windows[0] if len(set(windows)) == 1 else windows}


def _others(pattern: Pattern) -> int:
    """w of a window of w / 2 on either side; 2 where there is none, which reading it again will notice."""
    bounds = interval(without(pattern, Kind.GLOBAL_KEYS, Kind.GLOBAL_QUERIES))
    return 2 if bounds is None else 2 * (bounds[0] or 1)


LONGFORMER = _layout(
    *("longformer", "Longformer", (Part({"attention_window": 512}, _read_windows, _write_windows),)),
    modules={
        **MODULES,
        **{f"self_attn.{n[0]}_global_proj": f"attention.self.{n}_global" for n in ("query", "key", "value")},
    },
    only={
        **ONLY,
        "attention_mode": ("longformer",),
        "ignore_attention_mask": (False,),
        "onnx_export": (False, True, None),
    },
)
