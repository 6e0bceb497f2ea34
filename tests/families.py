"""The causal language models of the installed `transformers`: which load here, and what the others lack.

    python -m tests.families

A model type loads where its class for `AutoModelForCausalLM` is one of its layout's.
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
"""Model type -> its classes."""
THERE = tuple(name for name in LAYOUTS if name in CONFIG_MAPPING)
"""The layouts of types that this release has."""


def loads(name: str) -> bool:
    """Whether a model type loads, or its text model."""
    return name in TEXT or (
        name in LAYOUTS and any(kind in LAYOUTS[name].architectures for kind in CLASSES[name])
    )


def main() -> None:
    """Print the list."""
    there = [name for name in CLASSES if loads(name)]
    print(f"transformers {__version__}: {len(there)} of {len(CLASSES)} causal model types load\n")
    print(f"loads: {', '.join(there)}\n")
    for name in CLASSES:
        if not loads(name):
            print(f"{name:26} {'; '.join(missing(name)) or 'no reason is given'}")
    for name in there:
        if any(name in names.split() for names in MISSING.values()):
            print(f"{name} loads, and headway.models.missing says that it does not")


if __name__ == "__main__":
    main()
