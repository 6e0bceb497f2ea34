"""docs/api.md: the public names. `python -m tests.public_names` writes it anew."""

import importlib
import inspect
import re
import typing
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
STABLE = {
    "headway": (
        "ALiBi Bias Causal Choice Chunk Full Global GlobalKeys GlobalQueries Heads HeadwayError KeyValues "
        "LanguageModel Learned ModelSpec NoPositions Partial Pattern PerHead RelativeBias RelativeKey Rotary Sampling "
        "Sink Sinusoidal SoftCap Tokens Window attend attend_keys attention_weights load"
    ),
    "headway.patterns": "draw pairs parse visible",
    "headway.positions": (
        "DynamicNTK LinearBias LinearScaling Llama3 LongRope PerLayer PositionScheme Proportional Relative Scaling "
        "SpecialOrthogonal T5Bias YaRN"
    ),
    "headway.attention": "Backend Capabilities choose plan register",
    "headway.attention.linear_attention": "LinearAttentionSpec linear_attend",
    "headway.attention.delta": "DeltaSpec SSDSpec delta_attend",
    "headway.nn": "Attention FeedForward LinearAttention Lora RMSNorm RotaryEmbedding attach detach merge",
    "headway.cache": "BatchCache CacheSpec PagedCache choose_cache",
    "headway.models": "Decoder Encoder EncoderDecoder FAMILIES Family Head blank build",
    "headway.models.cost": "Report kv_bytes_per_token parameter_count plan receptive_field",
    "headway.checkpoints": (
        "Folder convert inspect load_adapter load_folder load_model save_adapter save_folder"
    ),
    "headway.text": "ChatTemplate StreamDecoder Tokenizer train_bpe",
    "headway.data": "TokenFile TokenFileWriter encode_corpus pack",
    "headway.train": (
        "Callback CallbackContext Objective Task TextConfig TrainConfig TrainResult TrainingError evaluate fit "
        "read_config train"
    ),
    "headway.generate": "Beams Draft Generation GenerationConfig ModelDraft NgramDraft generate score stream",
    "headway.surgery": "make_longformer operate pool_heads quantize_folder stretch_context",
    "headway.recipes": "Recipe read_recipe run_recipe",
    "headway.api": "Answerer Classifier Embedder MaskedLM Tagger TextEncoder Translator",
    "headway.endpoints": "Endpoint open_endpoint",
    "headway.compat": "scaled_dot_product_attention",
    "headway.errors": (
        "BackendError CacheError CheckpointError ConfigError DataError EndpointError PatternError"
    ),
}
"""The stable names of each module."""

OTHERS = (
    "headway.parallel",
    "headway.instruct",
    "headway.judge",
    "headway.similarity",
    "headway.metrics",
    "headway.classic",
)
"""Modules with documented names, none of which is stable yet."""

MODULES = (*STABLE, *OTHERS)
INTRODUCTION = """# Public names

Programs may rely on the stable names: later versions add to them and rename nothing. Everything else in a module is
internal. Commands and their options are another surface (`headway --help`), as are the names of files.
"""
FURTHER = """# Internal names

These are documented and tested, and `headway-lab` uses them. A minor version may rename them; see CHANGELOG.md.
Stable names of `headway` are not repeated.
"""


def names_of(name: str) -> list[str]:
    """Returns the public names of a module, `__all__` or the functions and classes that it defines, without those that
    are stable names of `headway`."""
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None)
    if names is None:
        members = vars(module).items()
        names = [n for n, v in members if getattr(v, "__module__", None) == name and not n.startswith("_")]
    return sorted(names if name == "headway" else set(names) - set(STABLE["headway"].split()))


def about(value: object) -> str:
    """The first sentence of a class's or function's docstring; nothing for other values."""
    if isinstance(value, ModuleType) or inspect.isclass(value) or inspect.isroutine(value):
        paragraph = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
        return paragraph.partition(". ")[0].rstrip(".:").replace("|", "\\|")
    return "a table" if isinstance(value, typing.Mapping) else ""


def listed() -> dict[str, list[str]]:
    """Returns the names on the page, stable and internal, by module."""
    stable, _, internal = PAGE.read_text().partition("# Internal names")
    names: dict[str, list[str]] = {name: [] for name in MODULES}
    for module, rows in re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", stable, re.MULTILINE | re.DOTALL):
        names[module] += re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)
    for module, line in re.findall(r"^\| `([\w.]+)` \| (.*) \|$", internal, re.MULTILINE):
        names[module] += re.findall(r"`(\w+)`", line)
    return {module: sorted(listed) for module, listed in names.items()}


def page() -> str:
    """Returns the whole page."""
    parts, internal = [INTRODUCTION], [FURTHER, "| module | names |", "|---|---|"]
    for name in MODULES:
        module, stable = importlib.import_module(name), STABLE.get(name, "").split()
        rows = [f"| `{public}` | {about(getattr(module, public))} |" for public in stable]
        if rows:
            parts.append("\n".join([f"## {name}", "", "| name | what it is |", "|---|---|", *rows, ""]))
        rest = [public for public in names_of(name) if public not in stable]
        if rest:
            internal.append(f"| `{name}` | {', '.join(f'`{public}`' for public in rest)} |")
    return "\n".join([*parts, *internal, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
