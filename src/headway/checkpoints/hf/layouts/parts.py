"""Parts of a config that several families have, each both read and written."""

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader
from headway.checkpoints.hf.layouts.base import Part
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.positions import Learned


def learned(rows: int, key: str = "max_position_embeddings", offset: int = 0) -> Part:
    """A trained table of positions, of `rows` unless the config says how many, from row `offset` on."""

    def read(given: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        size = given.whole(key)
        return {"positions": Learned(size, offset=offset), "trained_context": size}

    return Part({key: rows}, read, lambda spec: {key: table_size(spec)})


def table_size(spec: ModelSpec) -> int:
    """The positions of a trained table, or the trained context, where reading will notice that there is none."""
    return spec.positions.size if isinstance(spec.positions, Learned) else spec.trained_context


def scaled_embedding(usual: bool) -> Part:
    """Embeddings times sqrt(M), or as they are."""
    return Part(
        {"scale_embedding": usual},
        lambda given, fields: {
            "embedding_scale": fields["width"] ** 0.5 if given.flag("scale_embedding") else 1.0
        },
        lambda spec: {"scale_embedding": spec.embedding_scale != 1.0},
    )


def stated(family: str) -> Part:
    """The scaling of positions, which must be there: transformers has one of its own for the family."""

    def read(given: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        if not any(given.get(key) for key in ("rope_scaling", "rope_parameters")):
            raise ConfigError(
                f"config.json: there are no rope_parameters, and transformers has a scaling of its own for {family}: "
                "state them, as it does in the files that it writes"
            )
        return {}

    return Part(read=read)
