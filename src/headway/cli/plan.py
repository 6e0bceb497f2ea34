"""`headway plan MODEL`: memory, data movement and time of a model, and the kernel and cache of each layer."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headway.cli._options import Count, says
from headway.cli._plan_text import shares_table, time_text, to_text, training_verdict
from headway.cli._shared import note, print_report, set_threads
from headway.errors import ConfigError
from headway.report import bytes_of

if TYPE_CHECKING:
    import torch

    from headway.checkpoints import Folder
    from headway.models import ModelSpec
    from headway.models.cost import Codes, Kept, Machine, Report
    from headway.models.cost.processes import ProcessShare


def command(
    model: Annotated[str, says(metavar="MODEL")],
    *,
    context: int | None = None,
    batch: int = 1,
    source: int | None = None,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    weights: str | None = None,
    prefill_chunk: Count | None = None,
    patterns: str | None = None,
    processes: Count | None = None,
    mesh: str | None = None,
    device: str | None = None,
    memory: str | None = None,
    rows: Count | None = None,
    epochs: Count | None = None,
    hours: float | None = None,
    json: bool = False,
    threads: int | None = None,
) -> None:
    """Predict whether a model fits, what it moves and how fast it is, before anything runs. No weights are loaded or
    downloaded.

    model: a name of the catalog, a folder with a config.json, a GGUF file, or a Hub id
    context: tokens per row [default: the trained context]
    batch: number of rows
    source: tokens per source row of an encoder-decoder [default: as --context]
    weights: int8, int4: quantized as by headway quantize [default: the folder's]
    prefill_chunk: read prompts in chunks of this many tokens
    patterns: other patterns, e.g. 'Window.last(1024); Causal()', repeated over the layers
    processes: also the share of each of N processes in a training step
    mesh: how they divide it: dp=2,cp=4 [default: dp only]
    device: an accelerator by its data sheet, e.g. A100-80G, instead of this machine; one per process
    memory: memory, e.g. 24GiB, instead of what is free here or what the device has
    rows: rows of a data set: report the minimum time to train on it
    epochs: passes over the rows [default: 1]
    hours: duration of an actual training: report its fraction of the peak
    """
    import torch

    from headway.cache import kv_dtype
    from headway.models.cost import training_time
    from headway.models.cost.planning import expert_rows, plan, what_fits
    from headway.models.cost.processes import process_shares, whole_vocabs
    from headway.models.difference import BF16
    from headway.models.quantize import weight_kind
    from headway.parallel import Mesh
    from headway.patterns import parse
    from headway.storage.dtypes import named_dtype

    requested = named_dtype(dtype)
    if requested == torch.float16:
        raise ConfigError(
            f"plan: --dtype {dtype}: float16 products are hundreds of times slower than bfloat16 on most CPUs; use "
            "bfloat16, or float32, in which float16 files run"
        )
    if rows is None and (epochs, hours) != (None, None):
        raise ConfigError(
            "plan: --epochs and --hours are for the time of a training; give its number of --rows too"
        )
    stored = kv_dtype(kv_cache_dtype)
    set_threads(threads)
    spec, storage = find_model(model)
    storage = BF16._replace(why="a size of the catalog has no file") if storage is None else storage
    if requested is not None:
        storage = storage._replace(dtype=requested, why="asked for")
    if weights is not None:
        storage = storage._replace(quantized=weight_kind(weights))
    if patterns is not None:
        spec = spec.with_patterns([parse(part) for part in patterns.split(";")])
    options: dict[str, Any] = {
        "model": model,
        "context": spec.trained_context if context is None else context,
        "batch": batch,
        "source": source,
        "dtype": storage.dtype,
        "kv_dtype": stored,
        "quantized": storage.quantized,
        "prefill_chunk": prefill_chunk,
        "machine": machine_of(device, memory, storage.dtype),
    }
    report = plan(spec, **options)
    alternatives = (
        [] if report.fits else [*what_fits(report, lambda **other: plan(spec, **{**options, **other}))]
    )
    report = replace(
        report, notes=(f"{report.dtype}: {storage.why}; --dtype asks for another", *report.notes)
    )
    output = {**vars(report), "what_fits": {option: other.needed for option, other in alternatives}}
    text = to_text(report, spec, alternatives)
    among, shares, again = Mesh.of(mesh, processes or 1), [], []
    if processes is not None or mesh is not None:
        shared = (spec, among, options["context"], batch, storage.dtype)
        how = expert_rows(report.machine.device)
        shares = process_shares(*shared, expert_rows=how)
        again = process_shares(*shared, expert_rows=how, gradient_checkpointing="block")
        output, text = {**output, "processes": shares}, f"{text}\n\n{shares_table(shares)}"
        for vocab in whole_vocabs(spec, among.tp):
            text += (
                f"\n\ntp={among.tp} does not divide a vocab of {vocab}: its embedding and output layer are whole in "
                "each process"
            )
    whole, redone = held(report, shares), held(report, again, checkpointed=True)
    room = report.machine.memory
    output |= {"training_needed": whole, "training_fits": whole <= room, "checkpointed_fits": redone <= room}
    text += f"\n\n{training_verdict(report, whole, redone, len(shares))}"
    if rows is not None:
        training = training_time(
            spec,
            options["context"],
            rows,
            report.machine.peak,
            epochs=epochs or 1,
            devices=among.ranks if device is not None else 1,
            hours=hours,
            source=source,
        )
        output["training_time"] = training
        text += f"\n\n{time_text(training, report.machine)}"
    print_report(output, text, json)


def machine_of(device: str | None, memory: str | None, dtype: "torch.dtype") -> "Machine":
    """Returns a device by its name, or this machine, measured; with another memory size if given."""
    from headway.models.cost import Machine, device_named

    nbytes = None if memory is None else bytes_of(memory, "--memory")
    if device is None:
        note("measuring this machine's memory and matrix product ...")
    machine = Machine.here(dtype) if device is None else device_named(device, dtype)
    return machine if nbytes is None else replace(machine, memory=nbytes)


def held(report: "Report", shares: "Sequence[ProcessShare]", *, checkpointed: bool = False) -> int:
    """Returns the bytes that training takes where memory is limited: in one process, in the largest process if each has
    its own device, or in all that share this machine."""
    if not shares:
        return report.checkpointed if checkpointed else sum(report.training.values())
    sizes = [share.memory for share in shares]
    return sum(sizes) if report.machine.device == "cpu" else max(sizes)


def find_model(model: str) -> "tuple[ModelSpec, Kept | None]":
    """Returns the spec of a catalog name, a GGUF file, or a Hugging Face folder (or its config.json), and how its
    weights are stored when it runs; None for a name of the catalog."""
    import torch

    from headway.checkpoints import load_folder, spec_from_config
    from headway.checkpoints.quantized.scheme import split_config
    from headway.checkpoints.remote import is_address, local_model
    from headway.models import catalog
    from headway.models.cost import Kept
    from headway.models.quantize import WeightKind
    from headway.storage.dtypes import DTYPES, choose_dtype
    from headway.storage.reading import read_json
    from headway.storage.tensors import open_tensors

    path = local_model(model, files=("config.json",)) if is_address(model) else Path(model)
    stored: dict[str, torch.dtype] = {}
    if path.is_file() and path.suffix != ".json":
        folder = load_folder(path)
        dtype, choice = folder.choose_dtype()
        return folder.spec, Kept(dtype, codes_of(folder), choice.why)
    if path.is_dir():
        if any(path.glob("model*.safetensors*")):
            stored = {n: f.dtype for n, f in open_tensors(path).forms.items() if f.dtype.is_floating_point}
        path = path / "config.json"
        if not path.is_file():
            raise ConfigError(f"{model} is a folder without a config.json")
    if path.is_file():
        config, scheme = split_config(read_json(path))
        named = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")))
        dtype, choice = choose_dtype(stored or {"weights": named or torch.bfloat16}, torch.device("cpu"))
        why = choice.why if stored else "config.json names it" if named else "config.json names none"
        coded = scheme is not None and scheme.form != "mxfp4"  # mxfp4 is expanded when it is read
        quantized = WeightKind(scheme.bits, scheme.group) if scheme is not None and coded else None
        return spec_from_config(config), Kept(dtype, quantized, why)
    if "/" in model or model.startswith("."):
        raise ConfigError(f"{model} is not a folder with a config.json, or a name of the catalog")
    return catalog.spec(model), None


def codes_of(file: "Folder") -> "Codes | None":
    """Returns the quantized weights that the model of a GGUF file keeps, or None."""
    from headway.models.cost import Codes
    from headway.nn.weights import code_bytes
    from headway.storage.gguf_blocks import CODED

    sizes = {
        name: (prod(layer.form.shape), code_bytes(CODED[layer.kept], *layer.form.shape))
        for name, layer in file.quantized.items()
    }
    return None if file.kept is None else Codes(file.kept, sizes)
