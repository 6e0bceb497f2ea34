"""Comparison with TRL's SFTTrainer: the same chats give the same trained tokens, loss and steps."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.checkpoints.saving import save_folder
from headway.data.chats import ChatRows, Examples, encode_examples
from headway.data.record_kinds import Chat
from headway.data.records import read_records
from headway.models import ModelSpec, build
from headway.nn import IGNORE_INDEX
from headway.text import Tokenizer, train_bpe
from headway.train import train
from headway.train.metrics import read_metrics
from headway.train.tasks.chat import ChatConfig
from tests.data import data_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # TRL's and its dependencies'
]
LENGTH, CHATS = 192, 24
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Writes a small LLaMA with a tokenizer and a template, and chats; returns both paths."""
    folder = tmp_path_factory.mktemp("trl")
    records = list(read_records(data_path("conversations/dummy_conversation.json"), Chat))[:CHATS]
    chats = [
        {"messages": [dict(m) for m in record.messages]} for record in records if isinstance(record, Chat)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    texts = [m["content"] for chat in chats for m in chat["messages"]]
    tokenizer = train_bpe(texts, 400, special_tokens=["<|im_start|>", "<|im_end|>", "[PAD]"])
    end = tokenizer.backend.token_to_id("<|im_end|>")
    tokenizer = Tokenizer(tokenizer.backend, bos=0, eos=end, config=tokenizer.config).with_chat_template(
        TEMPLATE
    )
    spec = ModelSpec.of(
        "llama",
        vocab=tokenizer.vocab_size,
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        hidden=64,
        trained_context=512,
    )
    save_folder(folder / "model", build(spec, dtype=torch.float32, seed=0), tokenizer=tokenizer)
    return folder / "model", folder / "chats.jsonl"


def theirs(model: Path, chats: Path, out: Path, **changes: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    settings: dict[str, Any] = {
        "output_dir": str(out), "assistant_only_loss": True, "max_length": LENGTH, "use_cpu": True, "report_to": "none",
        "per_device_train_batch_size": CHATS, "bf16": False, "gradient_checkpointing": False, "save_strategy": "no",
        "dataset_num_proc": None, "disable_tqdm": True, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "max_steps": 10, "logging_steps": 1, "weight_decay": 0.0, "optim": "adamw_torch",
    }  # fmt: skip
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa"),
        args=SFTConfig(**settings | changes),
        train_dataset=Dataset.from_list([json.loads(line) for line in chats.read_text().splitlines()]),
        processing_class=AutoTokenizer.from_pretrained(model),
    )


def ours(model: Path, chats: Path) -> Examples:
    tokenizer = Tokenizer.load(model)
    records: list[Any] = list(read_records(chats, Chat))
    return encode_examples(records, tokenizer, stop={tokenizer.need("eos")}, length=LENGTH, too_long="error")


@pytest.mark.parametrize("packing", [False, True])
def test_the_same_tokens_are_trained_with_the_same_loss(
    made: tuple[Path, Path], tmp_path: Path, packing: bool
) -> None:
    """The trained ids are the same, and the sum of their losses is equal to 1e-5."""
    from headway import load

    trainer = theirs(*made, tmp_path, packing=packing, packing_strategy="bfd")
    labels: Counter[int] = Counter()
    total = 0.0
    for batch in trainer.get_train_dataloader():
        targets = batch.pop("labels")[:, 1:]
        with torch.no_grad():
            logits = trainer.model(**batch).logits[:, :-1].float()
        labels.update(targets[targets != IGNORE_INDEX].tolist())
        total += float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        )
    rows = ChatRows(ours(*made), LENGTH, pack=packing)
    batch = rows.batch(range(len(rows)))
    assert Counter(batch.targets[batch.targets != IGNORE_INDEX].tolist()) == labels
    model = load(made[0], dtype=torch.float32).model
    with torch.no_grad():
        loss = float(model(**batch.inputs, targets=batch.targets).total)
    assert loss == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_ten_steps_of_adamw_are_the_same(made: tuple[Path, Path], tmp_path: Path, packing: bool) -> None:
    """The losses of steps that each hold all chats are equal to 1e-4."""
    trainer = theirs(*made, tmp_path / "theirs", packing=packing, packing_strategy="bfd")
    trainer.train()
    expected = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    count = len(ChatRows(ours(*made), LENGTH, pack=packing))
    config = ChatConfig(
        data=str(made[1]), model=str(made[0]), out=str(tmp_path / "ours"), context=LENGTH, batch_tokens=LENGTH * count,
        steps=10, lr=1e-3, warmup=0.0, lr_floor=1.0, clip=1e9, pack=packing, dtype="fp32", workers=1,
    )  # fmt: skip
    actual = [line["loss"] for line in read_metrics(train(config, quiet=True).metrics) if "loss" in line]
    assert len(actual) == len(expected) == 10
    assert actual == pytest.approx(expected, abs=1e-4)
    assert actual[-1] < actual[0] - 0.1
