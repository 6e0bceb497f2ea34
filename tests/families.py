"""Lists the causal language models of the installed `transformers`: which load, and what the others lack.

    python -m tests.families

A model type loads if its class for `AutoModelForCausalLM` is among its layout's architectures.
"""

from collections.abc import Mapping

from transformers import CONFIG_MAPPING, __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headway.checkpoints.hf.layouts import LAYOUTS
from headway.checkpoints.hf.wrapped import TEXT
from headway.models.missing import MISSING, missing

CLASSES: Mapping[str, tuple[str, ...]] = {
    name: (found,) if isinstance(found, str) else tuple(found)
    for name, found in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
}
"""Model type -> its classes for `AutoModelForCausalLM`."""
THERE = tuple(name for name in LAYOUTS if name in CONFIG_MAPPING)
"""Layouts whose model type the installed release has."""


def loads(name: str) -> bool:
    """Returns whether a model type, or its text model, loads."""
    return name in TEXT or (
        name in LAYOUTS and any(kind in LAYOUTS[name].architectures for kind in CLASSES[name])
    )


def main() -> None:
    """Prints the list."""
    loading = [name for name in CLASSES if loads(name)]
    print(f"transformers {__version__}: {len(loading)} of {len(CLASSES)} causal model types load\n")
    print(f"loads: {', '.join(loading)}\n")
    for name in CLASSES:
        if not loads(name):
            print(f"{name:26} {'; '.join(missing(name)) or 'no reason is given'}")
    for name in loading:
        if any(name in names.split() for names in MISSING.values()):
            print(f"{name} loads, and headway.models.missing says that it does not")


if __name__ == "__main__":
    main()
