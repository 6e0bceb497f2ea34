"""What calls that write or score texts can be asked for, beside the texts.

Options of writing are the fields of `GenerationConfig`, of its `Sampling` (temperature, top_k, ...) and of `Beams`
(length_penalty, n_best, ...), by name; `beams` is a number of them, or a `Beams`. What a model or a call says itself is
none: ids that are forbidden, forced or a prefix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict

from headway.api.pretrained import BATCH, check_options
from headway.errors import ConfigError
from headway.generate import Beams, GenerationConfig, Sampling

_SAMPLING, _BEAMS, _CONFIG = (
    tuple(field.name for field in fields(kind) if field.name not in own)
    for kind, own in (
        (Sampling, ()),
        (Beams, ("width",)),
        (GenerationConfig, ("sampling", "forbidden", "prefix", "forced_first", "forced_last")),
    )
)


class Scoring(TypedDict, total=False):
    """How to score texts.

    batch_size: rows read at once; changes no result but by rounding.   beyond_context: go on past the trained context.
    special: control tokens written in the texts are control tokens, not text.
    """

    batch_size: int
    beyond_context: bool
    special: bool


def config_of(
    call: str, options: Mapping[str, Any], unused: Sequence[int], also: Sequence[str] = ()
) -> tuple[GenerationConfig, dict[str, Any]]:
    """The config of a call's options, for a model that never has an `unused` id; and those of them in `also`.

    Raises ConfigError for an option that is none, for what a search is asked where no number of beams is given, and as
    `GenerationConfig`."""
    check_options(call, options, (*_CONFIG, *_SAMPLING, *_BEAMS, *also))
    sampling, search, more, given = (
        {name: options[name] for name in names if name in options}
        for names in (_SAMPLING, _BEAMS, also, _CONFIG)
    )
    if isinstance(given.get("beams"), int):
        given["beams"] = Beams(given["beams"], **search)
    elif search:
        raise ConfigError(
            f"{next(iter(search))} is about a beam search, and no number of beams was given; add beams=4 (--beams 4), "
            "or leave it out"
        )
    return GenerationConfig(**given, sampling=Sampling(**sampling), forbidden=unused), more


def scoring_of(call: str, how: Scoring) -> tuple[dict[str, Any], bool]:
    """The options of `headway.generate.score`, and `special`."""
    check_options(call, how, tuple(Scoring.__annotations__))
    options: dict[str, Any] = {"batch_size": BATCH, **how}
    return options, options.pop("special", False)
