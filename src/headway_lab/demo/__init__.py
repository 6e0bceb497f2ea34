"""The library's main use on real input: three acts on this machine, from patterns to a trained model and its checks."""
