"""The families of the Hugging Face folder as data: the layouts that the modules of this package define."""

from importlib import import_module
from pkgutil import iter_modules

from headway.checkpoints.hf.config_keys import OURS
from headway.checkpoints.hf.layouts.base import Layout
from headway.models import FAMILIES

_BY_FAMILY = {
    value.family: value
    for module in iter_modules(__path__)
    for value in vars(import_module(f"{__name__}.{module.name}")).values()
    if isinstance(value, Layout)
}
LAYOUTS: dict[str, Layout] = {name: _BY_FAMILY[name] for name in sorted(_BY_FAMILY, key=list(FAMILIES).index)}
"""`model_type` -> layout, in the order of the families."""


def layout_of(family: str) -> Layout | None:
    """Returns the layout of a family's folders; None if transformers has no such family."""
    also = (layout for layout in LAYOUTS.values() if family in layout.also)
    return LAYOUTS.get(family) or next(also, None)


def layouts_for(family: str) -> list[Layout]:
    """Returns the layouts that a family's specs may be written as: its own and, if generic or absent, the generic
    ones."""
    family_layout = layout_of(family)
    first = [] if family_layout is None else [family_layout]
    if family_layout is not None and not family_layout.generic:
        return first
    return [
        *first,
        *(layout for layout in LAYOUTS.values() if layout.generic and layout is not family_layout),
    ]


def family_rows() -> list[dict[str, str | None]]:
    """Returns every family of `headway.models.FAMILIES` as a row of a report, in its order: its name, the `model_type`
    of its folders, its class in transformers, and its description."""
    rows: list[dict[str, str | None]] = []
    for name, family in FAMILIES.items():
        layout = layout_of(name)
        kind, first = (OURS, None) if layout is None else (layout.family, next(iter(layout.architectures)))
        rows.append({"family": name, "model_type": kind, "architecture": first, "about": family.about})
    return rows
