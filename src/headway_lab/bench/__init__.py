"""The cost of attention and whole models on this machine, beside their peers, measured side by side in one run.

`attention`, `decoders`, `train` and `growth` are the benches, generators of rows. All but the last make a `Problem` for
each row (headway's side, its peers, the work), which `measure` times beside a limit of the machine; `growth` runs each
of its `forms` in a process of its own. docs/benchmarks.md explains every figure.
"""
