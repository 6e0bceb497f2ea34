"""`headway doctor`: what works on this machine, and why something does not."""

import os
import platform
import re
from importlib.metadata import distributions, requires, version
from typing import Any

from headway.cli._shared import print_report
from headway.report import size, table

OPTIONAL = {
    "matplotlib": 'draws the curve of a run and the picture of a recipe; pip install "headway[plots]"',
    "transformers": 'reads our folders and runs on our kernels; pip install "headway[transformers]"',
    "sentencepiece": "reads LLaMA's tokenizer.model; pip install sentencepiece",
}
VECTOR_FLAGS = ("avx", "amx", "fma", "f16c", "sve", "asimd", "bf16")
VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "TOKENIZERS_PARALLELISM",
    "NO_COLOR",
)


def command(*, measure: bool = False, json: bool = False) -> int:
    """Report what is usable on this machine, and why not. The exit code is 1 if something required is missing.

    measure: also measure peak throughput and memory bandwidth (takes seconds)
    """
    report = examine(measure)
    print_report(report, to_text(report), json)
    return 1 if report["problems"] else 0


def examine(measure: bool = False) -> dict[str, Any]:
    """Returns all facts of the report, in JSON's types."""
    import torch

    from headway import hardware, processor
    from headway.attention import BACKENDS, Status
    from headway.cores import affinity, cores

    states = [(b.name, Status(True, b.about) if b.status is None else b.status()) for b in BACKENDS.values()]
    settings = sorted(name for name in os.environ if name.startswith("HEADWAY_"))
    report: dict[str, Any] = {
        "headway": version("headway"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": {
            "name": processor.cpu_name(),
            "cores": cores(),
            "processors": len(affinity()),
            "flags": sorted(f for f in processor.cpu_flags() if f.startswith(VECTOR_FLAGS)),
            "bf16": hardware.multiplies(torch.bfloat16),
            "fp16": hardware.multiplies(torch.float16),
        },
        "memory": {"total": hardware.memory_total(), "available": hardware.memory_available()},
        "torch": {
            "version": torch.__version__,
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "mkl": torch.backends.mkl.is_available(),
            "onednn": torch.backends.mkldnn.is_available(),
            "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "native": native(),
        "backends": [{"name": name, "usable": state.usable, "why": state.what} for name, state in states],
        "packages": packages(),
        "environment": {name: os.environ[name] for name in (*settings, *VARIABLES) if name in os.environ},
    }
    if measure:
        report["measured"] = {
            "float32_flops": hardware.gemm_peak(torch.float32),
            "bfloat16_flops": hardware.gemm_peak(torch.bfloat16),
            "read_bytes_per_second": hardware.read_bandwidth(),
        }
    report["problems"], report["advice"] = judge(report)
    return report


def native() -> dict[str, Any]:
    """Returns the native library that is loaded here, or why there is none; `trouble` is what makes it slower than it
    could be, `levels` are the CPU levels of this architecture."""
    from headway.errors import BackendError
    from headway.native import levels, loader

    try:
        result = loader.search()
    except BackendError as error:
        result = loader.Found(None, str(error), str(error))
    library = result.library
    return {
        "level": library and library.level,
        "path": library and str(library.path),
        "why_missing": result.why,
        "trouble": result.trouble,
        "levels": list(levels.known()),
    }


def packages() -> list[dict[str, Any]]:
    """Returns required and optional packages with their versions; the version is None if the package is absent."""
    lines = [line for line in requires("headway") or () if "extra ==" not in line]
    needed = [re.split(r"[^\w.-]", line)[0] for line in lines]
    rows = [(name, True, "") for name in needed] + [(name, False, use) for name, use in OPTIONAL.items()]
    versions = {name: next((dist.version for dist in distributions(name=name)), None) for name, *_ in rows}
    return [{"name": name, "version": versions[name], "needed": need, "use": use} for name, need, use in rows]


def judge(report: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Returns (problems, advice): what prevents headway from working, and what makes it slower than it could be."""
    problems = [
        f"{package['name']} is missing: pip install {package['name']}"
        for package in report["packages"]
        if package["needed"] and package["version"] is None
    ]
    cpu, threads, free = report["cpu"], report["torch"]["threads"], report["memory"]["available"]
    cores, trouble = cpu["cores"], report["native"]["trouble"]
    remarks = [
        (trouble, trouble),
        (threads > cores, f"torch uses {threads} threads on {cores} cores: set OMP_NUM_THREADS={cores}"),
        (
            threads < cores,
            f"torch uses {threads} of {cores} cores: --threads or OMP_NUM_THREADS changes that",
        ),
        (not cpu["bf16"], "this CPU has no bf16 products, so float32 is the faster choice"),
        (free < 2 << 30, f"only {size(free)} of memory are free"),
    ]
    return problems, [remark for applies, remark in remarks if applies]


def to_text(report: dict[str, Any]) -> str:
    """Returns the report for a terminal."""
    cpu, torch, memory = report["cpu"], report["torch"], report["memory"]
    libraries = ", ".join(
        f"{'with' if torch[key] else 'without'} {name}"
        for key, name in (("mkl", "MKL"), ("onednn", "oneDNN"))
    )
    limited = (
        f" of {cpu['processors']} processors (performance cores only, or a CPU quota of the control group)"
        if cpu["cores"] < cpu["processors"]
        else ""
    )
    half = "never used on this CPU (no hardware for it: hundreds of times slower than bf16)"
    facts = [
        ("headway", f"{report['headway']}, Python {report['python']}, {report['system']}"),
        ("cpu", f"{cpu['name']}, {cpu['cores']} cores{limited}"),
        ("bf16", "in hardware" if cpu["bf16"] else "not in hardware"),
        ("fp16", "in hardware" if cpu["fp16"] else half),
        ("memory", f"{size(memory['available'])} free of {size(memory['total'])}"),
        ("torch", f"{torch['version']}, {torch['threads']} threads, {torch['capability']}, {libraries}"),
        ("gpu", ", ".join(torch["cuda"]) or "none"),
    ]
    if "measured" in report:
        rate = report["measured"]
        facts += [
            ("products", f"{rate['float32_flops'] / 1e9:.0f} GFLOP/s float32, "
                         f"{rate['bfloat16_flops'] / 1e9:.0f} GFLOP/s bfloat16 (torch, measured now)"),
            ("reads", f"{rate['read_bytes_per_second'] / 1e9:.1f} GB/s (measured now)"),
        ]  # fmt: skip
    missing = [(p["name"], p["use"]) for p in report["packages"] if p["version"] is None]
    present = ", ".join(f"{p['name']} {p['version']}" for p in report["packages"] if p["version"])
    parts = [
        "\n".join(f"{name:<9} {value}" for name, value in facts),
        table(
            ("backend", "usable", "what"),
            [(b["name"], b["usable"], b["why"]) for b in report["backends"]],
            "",
        ),
        "packages  " + present,
        *(["absent    " + "; ".join(f"{name} ({use})" for name, use in missing)] if missing else []),
        "variables " + (", ".join(f"{k}={v}" for k, v in report["environment"].items()) or "none set"),
        "\n".join(f"problem   {line}" for line in report["problems"]),
        "\n".join(f"advice    {line}" for line in report["advice"]),
        "" if report["problems"] else "everything that headway needs is here",
    ]
    return "\n\n".join(part for part in parts if part)
