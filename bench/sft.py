"""Fine-tuning on instructions beside TRL, on this CPU: trained tokens a second, peak memory, and the loss of each step.

    python bench/sft.py alpaca_5000.json.gz                 # a LLaMA of 32 M parameters, rows of 512; needs trl
    python bench/sft.py alpaca_5000.json.gz --dtype bf16

Sides, each in a process of its own, one after the other, in turns: headway (packed), TRL padded (to the longest of each
micro batch of 8), TRL packed (bfd). All read the same examples in every step, with the same weights, AdamW and rate, so
that their losses are comparable. The first step of each is not timed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

SIDES = "headway", "trl-padded", "trl-packed"
MODEL = {"layers": 8, "width": 512, "heads": 8, "kv_heads": 4, "hidden": 1408}
SMALL = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "hidden": 64}
RATE, MICRO_BATCH = 1e-4, 8


def prepare(folder: Path, data: str, args: argparse.Namespace) -> None:
    """The examples, as messages and with Alpaca's prompt in them; a tokenizer; a model with fresh weights."""
    from headway.checkpoints.saving import save_folder
    from headway.data.chats import encode_examples
    from headway.data.record_kinds import Chat
    from headway.data.records import read_records
    from headway.models import ModelSpec, build
    from headway.text import train_bpe

    records: list[Any] = [r for r in read_records(data, Chat) if isinstance(r, Chat)]
    texts = (message["content"] for record in records for message in record.messages)
    tokenizer = train_bpe(texts, 300 if args.small else 8192).with_chat_template("alpaca")
    stop = tokenizer.need("eos")
    fitting = [
        r for r in records[: 4 * args.examples] if fits(encode_examples, r, tokenizer, stop, args.context)
    ]
    lines = [json.dumps({"messages": list(r.messages)}) for r in islice(fitting, args.examples)]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    sizes = SMALL if args.small else MODEL
    spec = ModelSpec.of("llama", vocab=tokenizer.vocab_size, trained_context=args.context, **sizes)
    save_folder(folder / "model", build(spec, seed=0), tokenizer=tokenizer)


def fits(encode: Any, record: Any, tokenizer: Any, stop: int, context: int) -> bool:
    from headway.errors import DataError

    try:
        return len(encode([record], tokenizer, stop={stop}, length=context - 1)) == 1
    except DataError:
        return False


def headway_side(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    from headway.data.chats import best_fit, encode_examples
    from headway.data.record_kinds import Chat
    from headway.data.records import read_records
    from headway.text import Tokenizer
    from headway.train import train
    from headway.train.metrics import read_metrics
    from headway.train.tasks.chat import ChatConfig

    tokenizer = Tokenizer.load(folder / "model")
    records: list[Any] = list(read_records(folder / "chats.jsonl", Chat))
    examples = encode_examples(records, tokenizer, stop={tokenizer.need("eos")}, length=args.context)
    rows = len(best_fit(examples.slots, args.context))
    with tempfile.TemporaryDirectory() as out:
        config = ChatConfig(
            data=str(folder / "chats.jsonl"), model=str(folder / "model"), out=f"{out}/run", context=args.context,
            batch_tokens=rows * args.context, steps=args.steps, lr=RATE, warmup=0.0, lr_floor=1.0, clip=1e9,
            dtype=args.dtype, micro_batch=args.micro_batch,
        )  # fmt: skip
        lines = [line for line in read_metrics(train(config, quiet=True).metrics) if "loss" in line]
    ends = [line["seconds"] for line in lines]
    times = [b - a for a, b in pairwise(ends)]
    slots = sum(examples.slots) / (rows * args.context)
    return {
        "losses": [x["loss"] for x in lines],
        "times": times,
        "trained": lines[0]["tokens"],
        "filled": slots,
    }


def trl_side(folder: Path, args: argparse.Namespace, packing: bool) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    chats = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.append(-time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times[-1] += time.perf_counter()

    def trainer(accumulate: int, size: int) -> Any:
        settings: dict[str, Any] = {
            "output_dir": str(folder / "trl"), "assistant_only_loss": True, "max_length": args.context, "use_cpu": True,
            "report_to": "none", "packing": packing, "packing_strategy": "bfd", "per_device_train_batch_size": size,
            "gradient_accumulation_steps": accumulate, "bf16": args.dtype == "bf16", "gradient_checkpointing": False,
            "save_strategy": "no", "disable_tqdm": True, "learning_rate": RATE, "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0, "max_steps": args.steps, "logging_steps": 1, "weight_decay": 0.0,
            "optim": "adamw_torch_fused",
        }  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.float32, attn_implementation="sdpa"
        )
        return SFTTrainer(
            model=model, args=SFTConfig(**settings), train_dataset=Dataset.from_list(chats),
            processing_class=AutoTokenizer.from_pretrained(folder / "model"), callbacks=[Clock()],
        )  # fmt: skip

    size = 1 if packing else MICRO_BATCH
    rows = len(trainer(1, size).train_dataset)
    made = trainer(math.ceil(rows / size), size)
    made.train()
    trained = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in made.get_train_dataloader())
    losses = [line["loss"] for line in made.state.log_history if "loss" in line]
    return {"losses": losses, "times": times[1:], "trained": trained, "filled": None}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="instructions, in Alpaca's form")
    parser.add_argument("--examples", type=int, default=64, help="of each step")
    parser.add_argument("--steps", type=int, default=4, help="of each side in each turn")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=None, help="rows of a forward pass of headway's")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--small", action="store_true", help="a tiny model: does it run?")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        from headway.hardware import peak_rss

        run = (
            headway_side if args.side == "headway" else lambda f, a: trl_side(f, a, args.side == "trl-packed")
        )
        print(json.dumps(run(args.folder, args) | {"peak_mib": peak_rss() / 2**20}))
        return
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), args.data, args)
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for _ in range(args.turns):
            for side in SIDES:
                command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--folder", name]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
                found[side].append(json.loads(done.stdout.splitlines()[-1]))
    report(found)


def report(found: dict[str, list[dict[str, Any]]]) -> None:
    """A line for each side, and how far the losses of the others are from headway's."""
    ours = found["headway"][0]["losses"]
    columns = (
        "side",
        "trained tokens/s",
        "share of headway's",
        "peak MiB",
        "largest difference of a step's loss",
    )
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    rates = {
        side: statistics.median(run["trained"] / t for run in runs for t in run["times"])
        for side, runs in found.items()
    }
    for side, runs in found.items():
        apart = max(abs(a - b) for a, b in zip(runs[0]["losses"], ours, strict=True))
        peak = max(run["peak_mib"] for run in runs)
        print(
            f"| {side} | {rates[side]:.1f} | {rates[side] / rates['headway']:.2f} | {peak:.0f} | {apart:.1e} |"
        )
    print(
        f"\n{found['headway'][0]['filled']:.1%} of headway's slots are filled; loss {ours[0]:.4f} to {ours[-1]:.4f}"
    )


if __name__ == "__main__":
    main()
