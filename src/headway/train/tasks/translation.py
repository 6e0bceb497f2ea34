"""Training of translators: the Transformer of 2017 on pairs of sentences (Vaswani et al. 2017, section 5)."""

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from headway.checkpoints.folder import Folder
from headway.checkpoints.restore import build_model
from headway.choice import Choice
from headway.data.pairs import (
    END,
    START,
    Pairs,
    batches,
    encode_pairs,
    joint_tokenizer,
    read_pairs,
)
from headway.errors import ConfigError
from headway.models import EncoderDecoder, Head, ModelSpec, build
from headway.nn import IGNORE_INDEX
from headway.patterns import Full
from headway.positions import Sinusoidal
from headway.text import Tokenizer
from headway.train.config import TrainConfig, setting
from headway.train.evaluation import Evaluation, measured
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.optimizer import Optimizer
from headway.train.rows_config import AdamSettings
from headway.train.tasks.base import BYTES_PER_TOKEN, Foreseen, MicroBatches, Plan, Task, cut
from headway.train.tasks.records import sample

SIZES = ("layers", "width", "heads", "kv_heads", "hidden", "order", "dropout", "vocab")
"""Settings that only a model with fresh weights has."""


class TranslationConfig(AdamSettings, TrainConfig):
    """Settings of training a translator.

    source: sentences to translate, one a line (.gz may be read)
    target: their translations, line by line
    validation_source: held-out sentences
    validation_target: their translations
    vocab: size of the byte-level BPE that both languages share
    model: folder of a translator, trained here, that this run continues from: its sizes, weights and tokenizer
    layers: layers of the encoder, and of the decoder
    width: width of the model
    heads: attention heads
    kv_heads: heads of keys and values in the decoder; a decoding step does not read those of the encoder's
        self-attention (Ainslie et al. 2023, section 2.2) [default: heads]
    hidden: width of the feed-forward, 0 for none
    order: where the norms are, before (pre) or after (post, as in 2017) each sublayer
    dropout: dropout of every sublayer and of embeddings
    context: longest sentence, in tokens
    batch_tokens: slots of a step on either side, padding included
    micro_batch: pairs of one forward pass; the step's gradient is the same for any value [default: the step's
        pairs, shared among the processes]
    steps: length of the run
    warmup: steps of linear warm-up
    lr_scale: factor on the rate of the schedule
    label_smoothing: share of the target distribution that is spread evenly over all tokens
    """

    usual: ClassVar = {
        "task": "translation", "out": "runs/translation", "log_every": 50, "beta2": 0.98, "eps": 1e-9,
    }  # fmt: skip

    source: str = setting(..., group="Data", is_path=True)
    target: str = setting(..., group="Data", is_path=True)
    validation_source: str | None = setting(None, group="Data", is_path=True)
    validation_target: str | None = setting(None, group="Data", is_path=True)
    vocab: int = setting(4096, group="Data", unit="tokens", ge=258)

    model: str | None = setting(None, group="Model")
    layers: int = setting(3, group="Model", ge=1)
    width: int = setting(256, group="Model", unit="features", ge=8)
    heads: int = setting(4, group="Model", ge=1)
    kv_heads: int | None = setting(None, group="Model", ge=1)
    hidden: int = setting(1024, group="Model", unit="features", ge=0)
    order: Literal["post", "pre"] = setting("post", group="Model")
    dropout: float = setting(0.1, group="Model", ge=0.0, lt=1.0)
    context: int = setting(256, group="Model", unit="tokens", ge=2)

    batch_tokens: int = setting(2048, group="Batch", unit="tokens", ge=2)
    micro_batch: int | None = setting(None, group="Batch", unit="pairs", ge=1, on_resume="other bits")
    steps: int = setting(2000, group="Length", unit="optimizer steps", ge=1, on_resume="same bits")

    warmup: int = setting(800, group="Optimizer", unit="steps", ge=1)
    lr_scale: float = setting(1.0, group="Optimizer", gt=0)
    label_smoothing: float = setting(0.1, group="Optimizer", ge=0.0, lt=1.0)

    def contradictions(self) -> Iterable[str]:
        if (self.validation_source is None) != (self.validation_target is None):
            yield "validation_source and validation_target belong together; give both, or none"
        if self.eval_every is not None and self.validation_source is None:
            yield "eval_every needs validation_source and validation_target"
        if self.width % self.heads:
            yield f"width {self.width} is not a multiple of {self.heads} heads"
        if self.heads % (self.kv_heads or 1):
            yield f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}"
        shaped = [name for name in SIZES if name in self.model_fields_set]
        if self.model is not None and shaped:
            yield f"model {self.model!r} already fixes {', '.join(shaped)}; leave those out, or leave out model"
        if self.batch_tokens < self.context:
            yield (
                f"batch_tokens {self.batch_tokens} holds no sentence of context {self.context}; raise it or lower "
                "context"
            )


class Translation(Task[EncoderDecoder]):
    """The task of training a translator on sentences and their translations, in batches of similar length.

    The schedule does not depend on the length of the run, so that a run that `steps` or `max_seconds` ended can be
    resumed as if it had been longer from the start. Losses are in nats per target token, end of sentence included, and
    reported without label smoothing."""

    settings = TranslationConfig
    config: TranslationConfig
    measured_by = ("source", "target", "context")
    trains = "encoder-decoder"
    next_command = "headway translate {model} 'A man rides a horse.'"

    def prepare(self, start: Path | None) -> None:
        config = self.config
        texts = read_pairs(config.source, config.target)
        folder = self._folder()
        home = start if folder is None else folder.home or folder.path
        tokenizer = joint_tokenizer(chain(*texts), config.vocab) if home is None else Tokenizer.load(home)
        self.tokenizer, self.train = tokenizer, encode_pairs(tokenizer, *texts, config.context)
        self.held: Pairs | None = None
        if config.validation_source is not None and config.validation_target is not None:
            lines = read_pairs(config.validation_source, config.validation_target)
            self.held = encode_pairs(tokenizer, *lines, config.context)
        if folder is None:
            spec = translation_spec(config, tokenizer.vocab_size)
            model = build(spec, dtype=torch.float32, seed=config.seed, backend=config.backend)
        else:
            model = build_model(folder, dtype=torch.float32, backend=config.backend).train()
        assert isinstance(model, EncoderDecoder)
        model.gradient_checkpointing = config.gradient_checkpointing
        self.model, self.steps, self.data = model, config.steps, self.train.described()
        self.generation = {"decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": START}
        self.rows_of_epoch = lru_cache(1)(partial(batches, self.train, config.batch_tokens, config.seed))
        self.steps_per_epoch = len(self.rows_of_epoch(0))
        self.micro_batch, self.ranks = config.micro_batch, 1

    def check_settings(self) -> None:
        self._spec()

    def _spec(self) -> ModelSpec:
        """Returns the spec, as far as it is known without a tokenizer: with the vocabulary size of the settings."""
        folder = self._folder()
        return translation_spec(self.config, self.config.vocab) if folder is None else folder.spec

    def _folder(self) -> Folder | None:
        """Returns the folder of the translator that the run continues from; None for fresh weights. Raises ConfigError
        if it is not a translator as this task trains them."""
        folder = self.inputs.folder
        if folder is None and self.config.model is not None:
            raise ConfigError(f"model {self.config.model}: no such folder; give the folder of a translator")
        if folder is not None and (folder.spec.encoder is None or _ends(folder) != (START, END)):
            raise ConfigError(
                f"task {self.config.task} continues translators whose targets begin with token {START} and end with "
                f"{END}, as it trains them; {self.config.model} is not one"
            )
        return folder

    def foresee(self) -> Foreseen:
        """See `Task`: an estimate, as if all pairs had the mean length."""
        config = self.config
        sources, targets = read_pairs(config.source, config.target)
        size = sum(len(line.encode()) for line in chain(sources, targets))
        tokens = max(1, int(size / BYTES_PER_TOKEN))
        mean_length = max(1, tokens // (2 * len(sources)) + 1)  # and END
        per_step = max(1, config.batch_tokens // mean_length)
        plan = Plan(
            config.seed, len(sources), per_step, config.steps * per_step, config.micro_batch or per_step
        )
        one_worker = Choice("1", "one forward pass after the other")
        data = {"training pairs": len(sources), "training tokens": tokens}
        return Foreseen(self._spec(), data, False, plan, mean_length, one_worker)

    @property
    def held_steps(self) -> float:
        return 0.0 if self.held is None else len(batches(self.held, self.config.batch_tokens, 0, 0))

    def optimizer(self, pool: MicrobatchPool) -> Optimizer:
        """See `Task`: Adam, without weight decay."""
        config = self.config
        betas = config.beta1, config.beta2
        adam = torch.optim.Adam(
            self.model.parameters(), config.lr_scale, betas=betas, eps=config.eps, fused=True
        )
        return Optimizer.single(self.model, adam)

    def schedule(self, step: int, seconds: float) -> float:
        return inverse_sqrt(step + 1, self.config.width, self.config.warmup)

    def spread(self, ranks: int) -> None:
        self.ranks = ranks

    def batches(self, step: int) -> Sequence[Any]:
        """See `Objective`: the step's pairs, with smoothed labels."""
        rows, make = self._rows(step), partial(self.train.batch, label_smoothing=self.config.label_smoothing)
        size = self.micro_batch or -(-len(rows) // self.ranks)
        return MicroBatches(make, cut(rows, size))

    def epoch(self, steps: int) -> float:
        return steps / self.steps_per_epoch

    def where(self, step: int) -> str:
        pairs = ", ".join(str(row + 1) for row in self._rows(step))
        return f"the pairs in lines {pairs} of {self.config.source} and {self.config.target}"

    def evaluate(self, model: EncoderDecoder, pool: MicrobatchPool, *, whole: bool) -> Evaluation | None:
        """See `Objective`: without dropout and label smoothing."""
        return None if self.held is None else evaluate_pairs(model, self.held, self.config.batch_tokens, pool)

    def measure(
        self, model: EncoderDecoder, pool: MicrobatchPool, limit: int | None = None
    ) -> tuple[Evaluation, Sequence[str]]:
        config, folder, tokenizer = self.config, self.inputs.folder, self.inputs.tokenizer
        assert folder is not None, "it is measured"
        assert tokenizer is not None
        ends = _ends(folder)
        if ends != (START, END):
            raise ConfigError(
                f"task {config.task} measures translators whose targets begin with token {START} and end with {END}, "
                f"as it trains them; generation_config.json of this one has {ends[0]} and {ends[1]}: use `headway "
                "translate --reference FILE`"
            )
        lines = read_pairs(config.source, config.target)
        sources, targets = ([side[i] for i in sample(len(side), limit)] for side in lines)
        pairs = encode_pairs(tokenizer, sources, targets, config.context)
        return evaluate_pairs(model, pairs, config.batch_tokens, pool), []

    def _rows(self, step: int) -> list[int]:
        """Returns the pairs that step `step` reads."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return self.rows_of_epoch(epoch)[index]


def _ends(folder: Folder) -> tuple[object, object]:
    """Returns the ids with which targets begin and end, from generation_config.json."""
    return folder.generation.get("decoder_start_token_id"), folder.generation.get("eos_token_id")


def evaluate_pairs(
    model: EncoderDecoder, pairs: Pairs, batch_tokens: int, pool: MicrobatchPool
) -> Evaluation:
    """Computes the loss of a model on pairs, in evaluation mode; `pool` computes batches in parallel."""

    def run(rows: list[int]) -> tuple[float, int]:
        batch = pairs.batch(rows)
        output = model(**batch.inputs, targets=batch.targets)
        return float(output.nats), int((batch.targets != IGNORE_INDEX).sum())

    parts, seconds = measured(model, run, batches(pairs, batch_tokens, 0, 0), pool)
    loss, tokens = (sum(part) for part in zip(*parts, strict=True))
    return Evaluation(loss, int(tokens), seconds=seconds)


def inverse_sqrt(step: int, width: int, warmup: int) -> float:
    """Returns the learning rate of Vaswani et al. 2017, section 5.3, at `step` = 1, 2, ...:

    width^-0.5 min(step^-0.5, step warmup^-1.5)
    """
    return float(width**-0.5 * min(step**-0.5, step * warmup**-1.5))


def translation_spec(config: TranslationConfig, vocab: int) -> ModelSpec:
    """Returns the spec of the Transformer of 2017 with the sizes of `config`. One matrix is used for both embeddings
    and the output layer (section 3.4). Position embeddings have all sines before all cosines, and the norms' epsilon is
    torch's default, so that Marian of transformers computes the same."""
    names = ("width", "layers", "heads", "hidden", "dropout", "order")
    size = {name: getattr(config, name) for name in names} | {
        "vocab": vocab,
        "trained_context": config.context,
        "final_norm": config.order == "pre",
        "embedding_scale": config.width**0.5,
        "init_std": config.width**-0.5,
        "positions": Sinusoidal(pairing="halves"),
        "norm_eps": 1e-5,
    }
    encoder = ModelSpec.of("transformer", **size, causal=False, patterns=Full(), head=Head("states"))
    size["kv_heads"] = config.kv_heads or config.heads
    return ModelSpec.of("transformer", **size, encoder=encoder, tied=True, shared_embedding=True)
