"""A training step and one-row decoding of a small Qwen3-MoE (32 experts, 4 for each token), beside transformers.

    python bench/experts.py                          # float32, 4 rows of 512 tokens; 64 tokens one by one
    python bench/experts.py --rows 2 --context 256 --tries 9 --dtype bf16

Both have the same weights, and logits are compared first. Times are the median of the tries, which take turns; of
transformers its "eager" experts and what it takes by itself.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = {"vocab": 8192, "width": 512, "layers": 8, "heads": 8, "kv_heads": 4, "hidden": 384, "head_dim": 64}


def main() -> None:
    """Measure, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, usual in (("rows", 4), ("context", 512), ("tokens", 64), ("tries", 5)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM

    from headway.checkpoints.saving import save_folder
    from headway.models import ModelSpec, build, cost
    from headway.nn import Experts

    torch.manual_seed(0)
    spec = ModelSpec.of("qwen3_moe", **SIZES, experts=Experts(count=32, top=4))
    ours = build(spec, seed=0)
    models: dict[str, Any] = {"headway": ours}
    with tempfile.TemporaryDirectory() as place:
        save_folder(Path(place) / "model", ours)
        for kind in ("eager", None):
            name = f"transformers{'' if kind is None else f', {kind} experts'}"
            more = {} if kind is None else {"experts_implementation": kind}
            models[name] = AutoModelForCausalLM.from_pretrained(Path(place) / "model", **more)
    if options.dtype == "bf16":
        models = {name: model.to(torch.bfloat16) for name, model in models.items()}
    print(f"{cost.parameter_count(spec):,} parameters, {cost.active_parameters(spec):,} of one token")
    ids = torch.randint(spec.vocab, (options.rows, options.context + 1))
    with torch.no_grad():
        logits = ours.eval()(ids[:, :64])
        for name, model in models.items():
            if model is not ours:
                off = (model.eval()(ids[:, :64]).logits - logits).abs().max() / logits.abs().max()
                print(f"{name}: logits differ by {float(off):.1e} of the largest")
    work: dict[str, dict[str, Callable[[], None]]] = {
        "training step": {name: _step(model, ids) for name, model in models.items()},
        f"{options.tokens} tokens": {
            name: _decode(model, ids[:1, :8], options.tokens) for name, model in models.items()
        },
    }
    for what, runs in work.items():
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.tries):
            for name, run in runs.items():
                began = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - began)
        for name, runs_of in seconds.items():
            print(f"{what:16} {name:32} {statistics.median(runs_of[1:] or runs_of):8.3f} s", flush=True)


def _step(model: Any, ids: Any) -> Callable[[], None]:
    """Forward and backward of all rows."""

    def run() -> None:
        model.train()
        model.zero_grad()
        if type(model).__module__.startswith("transformers"):
            model(input_ids=ids[:, :-1], labels=ids[:, :-1], use_cache=False).loss.backward()
        else:
            model(ids[:, :-1], targets=ids[:, 1:]).total.backward()

    return run


def _decode(model: Any, prompt: Any, tokens: int) -> Callable[[], None]:
    """The likeliest tokens, one by one."""
    import torch

    from headway.generate import GenerationConfig, generate

    @torch.no_grad()
    def run() -> None:
        model.eval()
        if type(model).__module__.startswith("transformers"):
            model.generate(
                prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
            )
            return
        generate(model, list(prompt), GenerationConfig(max_new_tokens=tokens, eos=()))

    return run


if __name__ == "__main__":
    main()
