"""The Hugging Face folder: config.json, names of tensors, rotary schemas, window conventions."""
