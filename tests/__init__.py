"""The tests mirror the package; those that carry the design stand at the top of this folder."""
