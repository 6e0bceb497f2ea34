"""Settings of training the head of an encoder, whichever it is. Imports no torch."""

from __future__ import annotations

from typing import Literal

from headway.train.config import setting
from headway.train.rows_config import RowsConfig


class HeadConfig(RowsConfig):
    """Settings of a run that trains the head of an encoder, and the encoder with it. The optimizer's are those of
    Devlin et al. 2019, appendix A.3; a model from scratch needs a larger `lr`."""

    data: str = setting(..., "records: .jsonl, .json, .csv, .tsv, or .gz of them", group="Data", is_path=True)
    validation: str | None = setting(None, "held-out records, of the same kinds", group="Data", is_path=True)
    model: str | None = setting(
        None,
        "a Hugging Face folder to start from: what stands below its head is kept, and the head too where it is of this "
        "task and these labels; or a name of the catalog (fresh weights) [default: a model made by `family` and "
        "`depth`]",
        group="Model",
    )
    batch: int = setting(32, "records of one optimizer step", group="Batch", unit="records", ge=1)
    context: int = setting(512, "most tokens of a row", group="Batch", unit="tokens", ge=2)
    too_long: Literal["windows", "cut", "error"] = setting(
        "windows",
        "what becomes of a text of more than `context` tokens: windows reads it in parts, cut reads its beginning; how "
        "many there are is said",
        group="Batch",
    )
    lr: float = setting(5e-5, "peak learning rate of AdamW", group="Optimizer", gt=0)
    warmup: float = setting(0.1, "linear warm-up, as a share of the run", group="Optimizer", ge=0.0, le=1.0)
    lr_floor: float = setting(
        0.0, "the cosine ends at this share of the peak learning rate", group="Optimizer", ge=0.0, le=1.0
    )
    weight_decay: float = setting(
        0.01, "decoupled decay of matrices; vectors and embeddings have none", group="Optimizer", ge=0.0
    )
    beta2: float = setting(0.999, "AdamW's decay of the mean of squares", group="Optimizer", ge=0.0, lt=1.0)

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
