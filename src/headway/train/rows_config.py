"""Settings of training on rows of tokens, for all tasks (model, batch, length, optimizer), and of training on text, by
next tokens or masked ones. Does not import torch."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Literal

from headway.train.config import Settings, TrainConfig, setting


class DataSettings(Settings):
    """Settings of the training data, and of how text is tokenized.

    data: training data: a file or a folder
    validation: held-out data, of the same kinds
    validation_share: share of `data` that is held out if no `validation` is given: whole documents or
        records, or the end of a single document
    tokenizer: tokenizer.json or its folder [default: the model folder's own, or one trained on `data`]
    units: tokens of the tokenizer that is trained on `data` if there is none: a byte-level BPE, characters,
        or words (also of Chinese) and characters [default: bpe]
    vocab: size of the tokenizer that is trained [default: 4096]
    """

    group = "Data"

    data: str = setting(..., is_path=True)
    validation: str | None = setting(None, is_path=True)
    validation_share: float = setting(0.0, ge=0.0, lt=1.0)
    tokenizer: str | None = setting(None, is_path=True)
    units: Literal["bpe", "characters", "words"] | None = setting(None)
    vocab: int | None = setting(None, unit="tokens", ge=257)

    def contradictions(self) -> Iterable[str]:
        if self.tokenizer is not None and self.vocab is not None:
            yield "vocab is the size of a tokenizer to be trained, but tokenizer is given too; give one of them"
        if self.tokenizer is not None and self.units is not None:
            yield "units says which tokenizer is to be trained, but tokenizer is given too; give one of them"
        if self.validation is not None and self.validation_share > 0:
            yield "validation and validation_share both say what is held out; give one of them"


class ModelSettings(Settings):
    """Settings of the model that a run begins with.

    model: a name of the catalog (fresh weights), or a Hugging Face folder or id to continue from [default: a
        model made by `depth`]
    family: family of the home-made model, one of those that `headway models` lists [default: llama, or
        ministral if patterns differ from Causal(); roformer for tasks of encoders]
    depth: layers of the home-made model, from which width and heads follow [default: 6]
    width: width of the home-made model [default: from depth]
    heads: query heads [default: from width]
    kv_heads: heads of keys and values; heads/kv_heads query heads share one [default: heads / 4; heads in
        gpt2 and encoders; 1 in gpt_bigcode and falcon]
    hidden: width of the feed-forward, 0 for none [default: from width]
    patterns: attention pattern of each layer, alternating, separated by ';' [default: Causal(), or the
        encoder's own]; for example 'Window.last(128); Causal()'
    mixers: what each layer mixes tokens with, alternating, separated by ';' (docs/linear.md): attention, delta (the
        gated delta rule with the model's heads), ssd (Mamba-2's layer with twice as many, a state of 128), or
        linear attention by its feature map: elu+1, cosine, ... [default: attention]
    dropout: share of states and attention weights that is dropped in training [default: the family's]
    tied: one matrix for embedding and output [default: yes for a home-made model]
    """

    group = "Model"

    model: str | None = setting(None)
    family: str | None = setting(None)
    depth: int | None = setting(None, unit="layers", ge=1, le=1024)
    width: int | None = setting(None, unit="features", ge=8)
    heads: int | None = setting(None, ge=1)
    kv_heads: int | None = setting(None, ge=1)
    hidden: int | None = setting(None, unit="features", ge=0)
    patterns: str | None = setting(None)
    mixers: str | None = setting(None)
    dropout: float | None = setting(None, ge=0.0, lt=1.0)
    tied: bool | None = setting(None)

    def contradictions(self) -> Iterable[str]:
        if self.model is not None and (shaped := ", ".join(self.present(FROM_SCRATCH))):
            yield f"model {self.model!r} already fixes {shaped}; leave those out, or leave out model"
        if self.mixers is not None and self.patterns is not None:
            yield "patterns cannot be combined with mixers; leave out one of them"


class AdapterSettings(Settings):
    """Settings of an adapter that is trained beside a frozen model.

    adapter: train an adapter beside the model's weights, which are frozen: lora, rslora (scale alpha /
        sqrt(rank)), dora (with a magnitude for each row) [default: train the model itself]
    rank: rank of the adapter [default: 16]
    alpha: the adapter's scale is alpha / rank [default: 32]
    adapter_targets: linear layers that are adapted, by the last part of their names: q_proj, v_proj, ...
        [default: all of the blocks]
    adapter_dropout: share of the adapter's inputs that is dropped in training [default: 0]
    base: nf4: the linear layers of the blocks are kept in 4 bits (QLoRA) [default: in the number format of
        the products]
    """

    group = "Adapter"

    adapter: Literal["lora", "rslora", "dora"] | None = setting(None)
    rank: int | None = setting(None, ge=1)
    alpha: float | None = setting(None, gt=0)
    adapter_targets: tuple[str, ...] = setting(())
    adapter_dropout: float | None = setting(None, ge=0.0, lt=1.0)
    base: Literal["nf4"] | None = setting(None)

    def contradictions(self) -> Iterable[str]:
        details = self.present(name for name in AdapterSettings.model_fields if name != "adapter")
        if self.adapter is None and details:
            names = " and ".join(details)
            yield f"{names}: only for an adapter; add adapter=lora, or leave out"


class OptimizerSettings(Settings):
    """Settings of the optimizer: its learning rates and decay.

    optimizer: adamw, or muon: Muon for the matrices of the blocks and AdamW for the rest
    lr: peak learning rate of AdamW
    matrix_lr: peak learning rate of Muon [default: 0.02]; only with optimizer=muon
    warmup: linear warm-up, as a share of the run
    lr_floor: the cosine ends at this share of the peak learning rate
    weight_decay: decoupled decay of matrices; vectors and embeddings have none
    """

    group = "Optimizer"

    optimizer: Literal["adamw", "muon"] = setting("adamw")
    lr: float = setting(3e-3, gt=0)
    matrix_lr: float | None = setting(None, gt=0)
    warmup: float = setting(0.02, ge=0.0, le=1.0)
    lr_floor: float = setting(0.1, ge=0.0, le=1.0)
    weight_decay: float = setting(0.1, ge=0.0)

    def contradictions(self) -> Iterable[str]:
        if self.matrix_lr is not None and self.optimizer != "muon":
            yield f"matrix_lr is Muon's learning rate, but optimizer is {self.optimizer}; use lr"


class AdamSettings(Settings):
    """Settings of Adam and AdamW.

    beta1: Adam's decay of the mean of gradients
    beta2: Adam's decay of the mean of squares
    eps: Adam's epsilon
    """

    group = "Optimizer"

    beta1: float = setting(0.9, ge=0.0, lt=1.0)
    beta2: float = setting(0.95, ge=0.0, lt=1.0)
    eps: float = setting(1e-8, gt=0)


FROM_SCRATCH = tuple(name for name in ModelSettings.model_fields if name != "model")


class RowsConfig(DataSettings, ModelSettings, AdapterSettings, AdamSettings, OptimizerSettings, TrainConfig):
    """Settings of a run that trains a model on rows of up to `context` tokens.

    context: length of a training row
    micro_batch: rows of one forward pass; the step's gradient is the same for any value [default: the step's
        rows, shared among the workers]
    steps: length of the run; one of steps, epochs, max_seconds
    epochs: length of the run, as passes over the data [default: 1]
    max_seconds: length of the run by the clock; the schedule follows the elapsed share, so such a run
        resumes, but not bit for bit
    workers: forward passes of a step that run in parallel, with one CPU thread each; 1: one after the other,
        with all threads [default: as many as threads, for models of up to some 100 M parameters]
    """

    context: int = setting(512, group="Batch", unit="tokens", ge=2)
    micro_batch: int | None = setting(None, group="Batch", unit="rows", ge=1, on_resume="other bits")
    steps: int | None = setting(None, group="Length", unit="optimizer steps", ge=1, on_resume="other bits")
    epochs: int | None = setting(None, group="Length", unit="passes", ge=1, on_resume="other bits")
    max_seconds: float | None = setting(None, group="Length", unit="s", gt=0, on_resume="other bits")
    workers: int | None = setting(None, group="Machine", ge=1, on_resume="other bits")

    @property
    @abstractmethod
    def rows_per_step(self) -> int:
        """Number of rows of up to `context` tokens in one optimizer step."""

    @property
    def in_one_pass(self) -> bool:
        """Whether the loss compares all rows of a step, so that they cannot be split into micro-batches."""
        return False

    def contradictions(self) -> Iterable[str]:
        lengths = self.present(("steps", "epochs", "max_seconds"))
        untrained = " and ".join(self.present(("vocab", "units")))
        if len(lengths) > 1:
            yield f"{' and '.join(lengths)} each set the length of the run; give one of them"
        if (self.micro_batch or 0) > self.rows_per_step:
            yield f"micro_batch {self.micro_batch} is more than the {self.rows_per_step} rows of a step"
        if self.model is not None and untrained:
            yield (
                f"{untrained}: only for training a tokenizer, but model {self.model!r} is used with its own, or with "
                "the one that tokenizer names; leave out"
            )
        if self.adapter is not None and self.model is None:
            yield "adapter needs the model that it adapts; give its folder (model=FOLDER)"
        if self.watches and self.validation is None and not self.validation_share:
            yield "keep_best and early_stopping_patience need held-out data; give validation or validation_share"
        if self.average > 1 and self.adapter is not None:
            yield f"average {self.average} cannot be combined with adapter; leave one of them out"


class PackedConfig(RowsConfig):
    """Settings of a run whose rows are filled: with several texts side by side.

    batch_tokens: tokens of one optimizer step; whole rows, so it is rounded down to a multiple of `context`
    """

    batch_tokens: int = setting(8192, group="Batch", unit="tokens", ge=2)

    @property
    def rows_per_step(self) -> int:
        return self.batch_tokens // self.context

    def contradictions(self) -> Iterable[str]:
        if self.rows_per_step < 1:
            yield (
                f"batch_tokens {self.batch_tokens} holds no row of context {self.context}; raise it to at least "
                f"{self.context} or lower context"
            )


class ExamplesConfig(RowsConfig):
    """Settings of a run whose rows have one whole example each.

    batch: examples of one optimizer step
    """

    batch: int = setting(32, group="Batch", unit="examples", ge=1)

    @property
    def rows_per_step(self) -> int:
        return self.batch


class TextConfig(PackedConfig):
    """Settings of a run on text. The default task is the one that trains the model: causal-lm or masked-lm.

    data: training text: a text file, records with a "text" each (.jsonl, .json, .csv, .tsv), a folder of .txt
        and .jsonl files, a token file (.tokens) made by headway.data, or hf://OWNER/NAME/PATH or
        hf://OWNER/NAME:SPLIT#COLUMN of the Hub
    cached_tokens: resume with the tokens that the run has encoded even if its `data` or `validation` has
        changed since, or is gone; else that is refused
    mask_share: share of the tokens that masked-lm hides [default: 0.15]
    whole_words: masked-lm hides whole words, if the tokenizer has them [default: no]
    pack: masked-lm puts several short texts in a row, which do not see each other; no: one text per row
        [default: yes]
    eval_tokens: evaluations between steps use the first N held-out tokens [default: all]; the first and the
        last use all
    eval_contexts: further row lengths in which held-out text is measured, after the last step (and by
        eval_at_start)
    sample_prompts: texts that are continued, or whose mask tokens are filled in, every `sample_every` steps
        and at the end
    sample_every: continue or fill in the prompts every N steps [default: only at the end]
    sample_tokens: length of a continuation
    """

    cached_tokens: bool = setting(False, group="Data", on_resume="same bits")
    mask_share: float | None = setting(None, group="Task", gt=0.0, lt=1.0)
    whole_words: bool | None = setting(None, group="Task")
    pack: bool | None = setting(None, group="Task")
    eval_tokens: int | None = setting(None, group="Output", unit="tokens", ge=1)
    eval_contexts: tuple[int, ...] = setting((), group="Output", unit="tokens")
    sample_prompts: tuple[str, ...] = setting((), group="Output")
    sample_every: int | None = setting(None, group="Output", unit="steps", ge=1)
    sample_tokens: int = setting(64, group="Output", unit="tokens", ge=1)

    @property
    def paths(self) -> dict[str, str]:
        cached = ("data", "validation") if self.cached_tokens else ()
        return {name: value for name, value in super().paths.items() if name not in cached}

    def contradictions(self) -> Iterable[str]:
        if self.sample_every is not None and not self.sample_prompts:
            yield "sample_every is given without sample_prompts; give prompts, or leave it out"
