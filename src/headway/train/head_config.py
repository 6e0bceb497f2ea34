"""Settings of training the head of an encoder, whichever it is. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from headway.train.config import setting
from headway.train.rows_config import RowsConfig


class HeadConfig(RowsConfig):
    """Settings of a run that trains the head of an encoder, and the encoder with it. The optimizer's are those of
    Devlin et al. 2019, appendix A.3; a model from scratch needs a larger `lr`."""

    usual: ClassVar = {"lr": 5e-5, "warmup": 0.1, "lr_floor": 0.0, "weight_decay": 0.01, "beta2": 0.999}
    about: ClassVar = {
        "data": "records: .jsonl, .json, .csv, .tsv, or .gz of them",
        "validation": "held-out records, of the same kinds",
        "model": "a Hugging Face folder to start from: what stands below its head is kept, and the head too where it "
        "is of this task and these labels; or a name of the catalog (fresh weights) [default: a model made by `family` "
        "and `depth`]",
        "context": "most tokens of a row",
    }

    batch: int = setting(32, "records of one optimizer step", group="Batch", unit="records", ge=1)
    too_long: Literal["windows", "cut", "error"] = setting(
        "windows",
        "what becomes of a text of more than `context` tokens: windows reads it in parts, cut reads its beginning; how "
        "many there are is said",
        group="Batch",
    )

    @property
    def rows_per_step(self) -> int:
        """See `RowsConfig`."""
        return self.batch


class WholeConfig(HeadConfig):
    """Where a text is one row."""

    too_long: Literal["cut", "error"] = setting(
        "error",
        "what becomes of a text of more than `context` tokens: cut reads its beginning (of a pair, the longer one is "
        "cut first), and how many there are is said",
        group="Batch",
    )
