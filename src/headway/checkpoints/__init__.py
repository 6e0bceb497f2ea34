"""Checkpoints: the Hugging Face folder in and out, foreign formats in, pairing conversion; atomic writes."""

from headway.checkpoints.adapters import load_adapter, merged_state, save_adapter
from headway.checkpoints.bases import Base
from headway.checkpoints.folder import Folder, load_folder
from headway.checkpoints.formats.conversion import Check, Conversion, convert
from headway.checkpoints.heads import change_pairing
from headway.checkpoints.hf.config import config_from_spec, spec_from_config, unsupported_by_transformers
from headway.checkpoints.inspection import inspect
from headway.checkpoints.restore import build_model, load_model
from headway.checkpoints.saving import save_folder, save_state
from headway.storage.dtypes import choose_dtype
from headway.storage.files import atomic_folder, atomic_write, current_folder
from headway.storage.tensors import Tensors, open_tensors, write_tensors

__all__ = [
    "Base",
    "Check",
    "Conversion",
    "Folder",
    "Tensors",
    "atomic_folder",
    "atomic_write",
    "build_model",
    "change_pairing",
    "choose_dtype",
    "config_from_spec",
    "convert",
    "current_folder",
    "inspect",
    "load_adapter",
    "load_folder",
    "load_model",
    "merged_state",
    "open_tensors",
    "save_adapter",
    "save_folder",
    "save_state",
    "spec_from_config",
    "unsupported_by_transformers",
    "write_tensors",
]
