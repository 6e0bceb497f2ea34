"""What attention costs on this machine, beside its peers: cases as data, measured side by side in one run.

`cases` says what is measured, `peers` against what, `timing` how, `limits` what the machine could do at best;
`run` puts them together into rows, `memory` does so for what is held. docs/benchmarks.md explains every figure.
"""
