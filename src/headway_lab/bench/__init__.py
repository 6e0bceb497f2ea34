"""What attention costs on this machine, beside its peers: cases as data, measured side by side in one run.

`cases` lists what is measured, `problems` and `peers` build its sides, `measure` times them beside a limit of the
machine and gives `rows`; `attention` and `growth` are the benches. docs/benchmarks.md explains every figure.
"""
