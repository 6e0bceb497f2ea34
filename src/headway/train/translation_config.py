"""Settings of a translator's training: the keys of its YAML file. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from headway.train.settings import Settings, setting


class TranslationConfig(Settings):
    """Settings of a run of `headway train-translation`."""

    command = "train-translation"
    keeps_bits = Settings.keeps_bits | {"steps", "max_seconds"}  # the schedule knows of no end

    source: str = setting(..., "sentences to translate, one a line (.gz may be read)", group="Data")
    target: str = setting(..., "their translations, line by line", group="Data")
    validation_source: str | None = setting(None, "held-out sentences", group="Data")
    validation_target: str | None = setting(None, "their translations", group="Data")
    vocab: int = setting(
        4096, "size of the byte-level BPE that both languages share", group="Data", unit="tokens", ge=258
    )

    layers: int = setting(3, "layers of the encoder, and of the decoder", group="Model", ge=1)
    width: int = setting(256, "width of the model", group="Model", unit="features", ge=8)
    heads: int = setting(4, "attention heads", group="Model", ge=1)
    hidden: int = setting(1024, "width of the feed-forward", group="Model", unit="features", ge=8)
    order: Literal["post", "pre"] = setting("post", "where the norms stand (2017: post)", group="Model")
    dropout: float = setting(
        0.1, "dropout of every sublayer and of embeddings", group="Model", ge=0.0, lt=1.0
    )
    context: int = setting(256, "longest sentence, in tokens", group="Model", unit="tokens", ge=2)

    batch_tokens: int = setting(
        2048, "slots of a step on either side, padding included", group="Batch", unit="tokens", ge=2
    )
    steps: int = setting(2000, "length of the run", group="Length", unit="optimizer steps", ge=1)
    max_seconds: float | None = setting(None, "end sooner, after so long", group="Length", unit="s", gt=0)

    warmup: int = setting(800, "steps of linear warm-up", group="Optimizer", unit="steps", ge=1)
    lr_scale: float = setting(1.0, "factor on the rate of the schedule", group="Optimizer", gt=0)
    beta1: float = setting(0.9, "Adam's decay of the mean of gradients", group="Optimizer", ge=0.0, lt=1.0)
    beta2: float = setting(0.98, "Adam's decay of the mean of squares", group="Optimizer", ge=0.0, lt=1.0)
    eps: float = setting(1e-9, "Adam's epsilon", group="Optimizer", gt=0)
    clip: float = setting(1.0, "largest norm of a step's gradient", group="Optimizer", gt=0)
    label_smoothing: float = setting(
        0.1, "share of the target that all tokens share evenly", group="Optimizer", ge=0.0, lt=1.0
    )

    dtype: Literal["auto", "bf16", "fp32", "fp16"] = setting(
        "auto", "number format of the matrix products; weights and optimizer stay fp32", group="Machine"
    )
    threads: int | None = setting(None, "CPU threads [default: torch's]", group="Machine", ge=1)
    seed: int = setting(0, "seed of weights, order and dropout", group="Machine", ge=0, lt=2**63)
    out: str = setting("runs/translation", "folder of the run", group="Output")
    log_every: int = setting(50, "a progress line every N steps", group="Output", unit="steps", ge=1)
    eval_every: int | None = setting(
        None, "held-out loss every N steps [default: only at the end]", group="Output", unit="steps", ge=1
    )

    save_every: int | None = setting(
        None,
        "write a checkpoint every N steps [default: only at the end]",
        group="Output",
        unit="steps",
        ge=1,
    )
    keep_last: int = setting(2, "checkpoints to keep", group="Output", unit="checkpoints", ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> TranslationConfig:
        if (self.validation_source is None) != (self.validation_target is None):
            raise ValueError("validation_source and validation_target belong together; give both, or none")
        if self.eval_every is not None and self.validation_source is None:
            raise ValueError("eval_every needs validation_source and validation_target")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")
        if self.batch_tokens < self.context:
            raise ValueError(
                f"batch_tokens {self.batch_tokens} holds no sentence of context {self.context}; raise the one "
                "or lower the other"
            )
        return self
