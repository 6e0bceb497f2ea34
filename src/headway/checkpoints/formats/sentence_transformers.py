"""Reads and writes the files of sentence-transformers that say how token states are pooled into a text's embedding.

modules.json               the steps: Transformer, Pooling, Normalize
1_Pooling/config.json      pooling_mode_cls_token, pooling_mode_lasttoken or pooling_mode_mean_tokens
sentence_bert_config.json  max_seq_length, do_lower_case
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.models import Head, ModelSpec
from headway.models.head import Pool
from headway.storage.files import json_text, write_file
from headway.storage.reading import read_json, read_json_array

MODULES, LIMITS = "modules.json", "sentence_bert_config.json"
STEPS = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
"""The folder of each step's settings."""
POOLS: dict[str, Pool] = {
    "pooling_mode_cls_token": "first",
    "cls": "first",
    "pooling_mode_lasttoken": "last",
    "lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "mean": "mean",
}


@dataclass(frozen=True)
class SentenceConfig:
    """head: pooling and normalization.   model: the encoder's folder.   longest: maximal tokens of a text, or None."""

    head: Head
    model: Path
    longest: int | None


def read_sentence_config(folder: Path) -> SentenceConfig | None:
    """Returns the configuration of a folder; None if it has none of sentence-transformers.

    Raises ConfigError for unknown steps or poolings, which would give other embeddings, and for do_lower_case.
    """
    if not (folder / MODULES).is_file():
        return None
    modules = read_json_array(folder / MODULES)
    if not all(isinstance(step, dict) for step in modules):
        raise ConfigError(f"{folder / MODULES} must be a list of modules, each an object with type and path")
    steps = [(str(step.get("type", "")).rpartition(".")[2], str(step.get("path", ""))) for step in modules]
    kinds = [kind for kind, _ in steps]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(
            f"{folder / MODULES} has the modules {', '.join(kinds) or '(none)'}; supported are Transformer, Pooling "
            "and optionally Normalize, in this order"
        )
    pooling = folder / steps[1][1] / "config.json"
    model = folder / steps[0][1]
    limits = model / LIMITS
    more = read_json(limits) if limits.is_file() else {}
    if more.get("do_lower_case"):
        raise ConfigError(
            f"{limits}: do_lower_case is unsupported; set it to false and add a Lowercase normalizer to tokenizer.json"
        )
    longest = more.get("max_seq_length")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ConfigError(f"{limits}: max_seq_length must be a number of tokens, got {longest!r}")
    head = Head("embed", pool=_pool(read_json(pooling), pooling), unit="Normalize" in kinds)
    return SentenceConfig(head, model, longest)


def write_sentence_config(folder: Path, spec: ModelSpec) -> None:
    """Writes the files that describe an embedder's head (pooling, normalization) into a folder being filled."""
    kinds = list(STEPS)[: 3 if spec.head.unit else 2]
    steps = [
        {"idx": i, "name": str(i), "path": STEPS[kind], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    modes = {key: POOLS[key] == spec.head.pool for key in POOLS if key.startswith("pooling_mode_")}
    (folder / STEPS["Pooling"]).mkdir()
    write_file(folder / MODULES, json_text(steps))
    write_file(
        folder / STEPS["Pooling"] / "config.json",
        json_text({"word_embedding_dimension": spec.width, **modes}),
    )
    write_file(folder / LIMITS, json_text({"max_seq_length": spec.trained_context, "do_lower_case": False}))


def _pool(config: dict[str, Any], file: Path) -> Pool:
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if isinstance(config.get("pooling_mode"), str):
        chosen.append(config["pooling_mode"])
    if len(chosen) != 1 or chosen[0] not in POOLS:
        raise ConfigError(
            f"{file}: pooling mode {' and '.join(chosen) or 'none'} is unsupported; set exactly one of "
            f"{', '.join(POOLS)}"
        )
    return POOLS[chosen[0]]
