"""The main job on real input: three acts on this machine, from the patterns to a trained model and the
checks."""
