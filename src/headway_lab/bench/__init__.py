"""The cost of attention and whole models on this machine, compared with peers that are measured in the same run.

`attention`, `decoders`, `train`, `serving`, `embeddings` and `growth` are the benches, generators of rows. The first
three and `embeddings` make a `Problem` for each row (headway's side, its peers, the work), which `measure` times and
relates to a limit of the machine; `serving` runs each server in a process of its own, and `growth` each of its `forms`.
docs/benchmarks.md explains every figure.
"""
