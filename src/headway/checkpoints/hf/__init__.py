"""The Hugging Face folder: config.json, names of tensors, schemas of rotary positions, conventions of windows."""
