"""The oracle for encoders: transformers models with random weights, inputs for both sides, and their outputs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from headway.checkpoints import load_folder
from headway.checkpoints.restore import build_model
from headway.models import Encoder
from headway.tokens import Tokens

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 20,
}
LENGTHS = (9, 5)
LABELS = {"id2label": {0: "no", 1: "yes", 2: "perhaps"}, "label2id": {"no": 0, "yes": 1, "perhaps": 2}}
NAMES = {
    "masked-lm": "ForMaskedLM",
    "classify": "ForSequenceClassification",
    "tag": "ForTokenClassification",
    "answer": "ForQuestionAnswering",
    "states": "Model",
}
CLASSES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "roformer": "RoFormer",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "data2vec-text": "Data2VecText",
    "roberta-prelayernorm": "RobertaPreLayerNorm",
    "electra": "Electra",
    "distilbert": "DistilBert",
    "megatron-bert": "MegatronBert",
    "ernie": "Ernie",
    "jina_embeddings_v3": "JinaEmbeddingsV3",
    "nomic_bert": "NomicBert",
    "eurobert": "EuroBert",
    "modernbert": "ModernBert",
}
OWN: dict[str, dict[str, Any]] = {
    "jina_embeddings_v3": {"max_position_embeddings": 22},
    "eurobert": {"num_key_value_heads": 2, "head_dim": 10, "pad_token_id": 1, "classifier_pooling": "mean"},
    "modernbert": {
        "num_hidden_layers": 4,
        "local_attention": 6,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id"), 0),
    },
}
"""Changes of `SHAPE`, by family."""
DISTILBERT = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
}


def shape(family: str) -> dict[str, Any]:
    """Returns the sizes of a family's small model under the family's own keys."""
    names = DISTILBERT if family == "distilbert" else {}
    return {**{names.get(key, key): value for key, value in SHAPE.items()}, **OWN.get(family, {})}


@dataclass(frozen=True)
class Case:
    family: str
    task: str
    changes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.family, self.task, *(f"{k}={v}" for k, v in self.changes.items())])

    @property
    def theirs(self) -> Any:
        return getattr(transformers, CLASSES[self.family] + NAMES[self.task])

    @property
    def config(self) -> Any:
        labels = LABELS if self.task in ("classify", "tag") else {}
        config_class = getattr(transformers, CLASSES[self.family] + "Config")
        settings = {**shape(self.family), **labels, **self.changes}
        return config_class(**settings, attn_implementation="eager")


def peer(case: Case) -> Any:
    """Returns the transformers model: trained parameters are normal with standard deviation 0.3, gains around 1."""
    torch.manual_seed(0)
    model = case.theirs(case.config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                is_gain = p.dim() == 1 and name.endswith("weight")
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + is_gain)
    return model


def inputs(model: Any, side: str = "right") -> tuple[dict[str, Tensor], Tokens]:
    """Returns two rows of unequal length: transformers' keyword arguments, and our tokens."""
    generator = torch.Generator().manual_seed(2)
    shape, pad = (len(LENGTHS), max(LENGTHS)), model.config.pad_token_id or 0
    tokens = Tokens.from_lengths(list(LENGTHS), side=side)
    ids = torch.where(tokens.valid, torch.randint(5, 61, shape, generator=generator), pad)
    batch = {"input_ids": ids, "attention_mask": tokens.valid.long()}
    if hasattr(model.config, "type_vocab_size"):
        batch["token_type_ids"] = torch.randint(0, model.config.type_vocab_size, shape, generator=generator)
    return batch, tokens


def run(model: Encoder, batch: dict[str, Tensor], tokens: Tokens) -> Tensor:
    return model(batch["input_ids"], tokens=tokens, types=batch.get("token_type_ids"))  # type: ignore[no-any-return]


def output(outputs: Any) -> Tensor:
    if "start_logits" in outputs:
        return torch.stack((outputs.start_logits, outputs.end_logits), -1)
    return outputs.logits if "logits" in outputs else outputs.last_hidden_state  # type: ignore[no-any-return]


def seen(values: Tensor, tokens: Tokens) -> Tensor:
    """Returns the values at valid tokens, or all of them if there is one per row."""
    return values[tokens.valid] if values.shape[:2] == tokens.valid.shape else values


def from_them(model: Any, path: Path) -> Encoder:
    model.save_pretrained(path)
    ours = build_model(load_folder(path))
    assert isinstance(ours, Encoder)
    return ours


SMALL: dict[str, Any] = {"vocab": 61, "width": 48, "layers": 2, "heads": 4, "hidden": 80, "init_std": 0.3}
