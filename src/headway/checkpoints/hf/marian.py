"""The Transformer of 2017 as a Marian model, which transformers has a class for (Junczys-Dowmunt et al. 2018)."""

from __future__ import annotations

from dataclasses import replace

from headway.models import ModelSpec


def marian_spec(spec: ModelSpec) -> ModelSpec | None:
    """The spec of the Marian model that computes the same where its biases of attention and of the output, which the
    Transformer of 2017 has not, are 0; None for what is not one of its translators.

    What else Marian cannot express (norms in front, cosines between sines, another epsilon) is as it was."""
    if spec.family != "transformer" or spec.encoder is None:
        return None
    source, target = (
        replace(one, family="marian", qkv_bias=True, out_bias=True) for one in (spec.encoder, spec)
    )
    return replace(target, output_bias=True, encoder=source)
