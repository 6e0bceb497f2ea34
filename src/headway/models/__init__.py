"""Decoders: one spec, one module, the families as data, and the arithmetic of both."""

from headway.models import catalog
from headway.models.decoder import Decoder
from headway.models.families import FAMILIES, Family
from headway.models.initialise import initialise_
from headway.models.spec import ModelSpec

__all__ = ["FAMILIES", "Decoder", "Family", "ModelSpec", "catalog", "initialise_"]
