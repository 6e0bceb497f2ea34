"""Checkpoints: reads and writes Hugging Face folders, reads other formats, converts rotary pairings; atomic writes."""

from headway.checkpoints.adapters import load_adapter, merged_state, save_adapter
from headway.checkpoints.bases import Base
from headway.checkpoints.folder import Folder, load_folder
from headway.checkpoints.formats.conversion import convert
from headway.checkpoints.heads import change_pairing
from headway.checkpoints.hf.config import config_from_spec, spec_from_config, unsupported_by_transformers
from headway.checkpoints.inspection import inspect
from headway.checkpoints.restore import build_model, load_model
from headway.checkpoints.saving import save_folder, save_state

__all__ = [
    "Base",
    "Folder",
    "build_model",
    "change_pairing",
    "config_from_spec",
    "convert",
    "inspect",
    "load_adapter",
    "load_folder",
    "load_model",
    "merged_state",
    "save_adapter",
    "save_folder",
    "save_state",
    "spec_from_config",
    "unsupported_by_transformers",
]
