"""The inputs of a training run: tokenizer, model spec and initial weights, new or loaded, and a LoRA adapter."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.attention.delta import DeltaSpec, SSDSpec
from headway.attention.linear_attention import FEATURES, LinearAttentionSpec
from headway.checkpoints import Base
from headway.checkpoints.adapters import check_named
from headway.checkpoints.bases import fingerprint
from headway.checkpoints.folder import Folder, load_folder
from headway.checkpoints.remote import is_address, local_model
from headway.checkpoints.restore import build_model
from headway.choice import Choice
from headway.errors import CheckpointError, ConfigError, as_error, check_known, did_you_mean
from headway.models import FAMILIES, Decoder, Encoder, Head, Model, ModelSpec, Softmax, build, catalog, cost
from headway.nn import Adapter, Lora, attach, block_linears
from headway.nn.weights import WEIGHTS
from headway.parallel.sharded import fill, own_state
from headway.patterns import Causal, parse
from headway.storage.lazy import lazy
from headway.text import Tokenizer, train_bpe, train_characters, train_words
from headway.train.config import TrainConfig
from headway.train.microbatch_pool import DTYPES, choose_precision
from headway.train.rows_config import RowsConfig

TOKENS = ".tokens"
VOCAB, DEPTH = 4096, 6
FAMILY = dict.fromkeys(("masked-lm", "classify", "tag", "answer", "embed"), "roformer")
"""Default families of models made from settings, by task: for encoders one without a limit on the length of rows. The
default of other tasks is chosen in `make_spec`."""
MASK, PAD = "[MASK]", "[PAD]"


@dataclass(frozen=True)
class Inputs:
    """The settings of a run, and the model that they name, which is opened once.

    Attributes:
        config: the settings.
        folder: the folder of that model; None if the run begins with fresh weights. If a trained model is measured, its
            folder, with the files of its adapters.
    """

    config: Any
    folder: Folder | None = None

    @staticmethod
    def of(config: TrainConfig) -> "Inputs":
        """Opens the model that the settings name; one of the Hub is downloaded first. Raises as `load_folder` does."""
        model = getattr(config, "model", None)
        if model is None:
            return Inputs(config)
        if is_address(model):
            model = str(local_model(model))
            config = config.model_copy(update={"model": model})
        place = Path(str(model))
        return Inputs(config, load_folder(place) if place.is_dir() else None)

    @cached_property
    def precision(self) -> Choice:
        """The number format of matrix products, with the reason: see `choose_precision`."""
        return choose_precision(self.config.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of matrix products."""
        return DTYPES[self.precision.what]

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that the settings name, or that of the model's folder; None if one must be trained."""
        home = None if self.folder is None else self.folder.home or self.folder.path
        place = getattr(self.config, "tokenizer", None) or home
        return None if place is None else Tokenizer.load(place)

    def spec(self, vocab: int | None = None) -> ModelSpec:
        """Returns the spec of the run's initial model. `vocab` is the vocabulary size of a model with fresh weights; by
        default that of the settings."""
        if self.folder is not None:
            return self.folder.spec
        if vocab is None:  # a model of the catalog has its own vocabulary, which 1 never exceeds
            vocab = self.config.vocab or VOCAB if self.config.model is None else 1
        return make_spec(self.config, vocab)

    def find_tokenizer(
        self, start: Path | None, texts: Callable[[], Iterator[str]], *, masked: bool
    ) -> Tokenizer:
        """Returns `tokenizer`, or that of the checkpoint `start`, or one that is trained on `texts()` and saved in the
        run's folder. If `masked`, a trained BPE has a mask and a pad token, and ends texts with EOS.

        Raises ConfigError if none is given and none can be trained."""
        config = self.config
        if self.tokenizer is not None:
            return self.tokenizer
        if config.model is not None:
            raise ConfigError(
                f"model {config.model!r} has no tokenizer; give one (tokenizer=FOLDER), or leave model out"
            )
        home = start or Path(config.out) / "tokenizer"
        if not (home / "tokenizer.json").exists():
            if Path(config.data).suffix == TOKENS:
                raise ConfigError(
                    f"{config.data} holds token ids; give the tokenizer that made them (tokenizer=FOLDER)"
                )
            _trained_tokenizer(config, texts(), masked).save(home)
        return Tokenizer.load(home)  # also if it is new: it is then the very one that a resumed run loads

    def first_model(self, vocab: int, head: Head | None = None) -> tuple[Decoder | Encoder, list[str]]:
        """Returns the fp32 model that a run begins with, and remarks on it: its weights are those of a folder, or drawn
        by `seed`. A folder's model that gets an adapter is in the dtype of matrix products instead.

        With `head`, the model has this head, and its trained context is at least `context`. If the folder has another
        head, only the layers below it are loaded, and the new head's weights are drawn by `seed`."""
        config, folder, remarks = self.config, self.folder, list[str]()

        def headed(spec: ModelSpec) -> ModelSpec:
            longer = replace(spec, trained_context=max(config.context, spec.trained_context))
            return spec if head is None else longer.with_head(head)

        if folder is not None and (head is None or folder.spec.head == head):
            dtype = torch.float32 if config.adapter is None else self.dtype
            folder = replace(folder, spec=headed(folder.spec))
            model = build_model(folder, dtype=dtype, backend=config.backend).train()
        else:
            spec = headed(self.spec(vocab))
            model = build(spec, dtype=torch.float32, seed=config.seed, backend=config.backend)
            if folder is not None and head is not None:
                below = build_model(load_folder(folder.path, head=Head("states")), dtype=torch.float32)
                model.load_state_dict(below.state_dict(), strict=False)  # all but the head's
                remarks = [
                    f"{config.model} has the head {folder.spec.head.task!r}; {head.task!r} is a new one, with fresh "
                    "weights"
                ]
        assert isinstance(model, (Decoder, Encoder)), "the task has checked the spec"
        return model, remarks

    def adapt(self, model: Model) -> Base | None:
        """Freezes a model in `dtype` (in 4 bits if the settings say so), attaches a fresh float32 adapter, and returns
        the description of the base model. Does nothing and returns None if the settings have no adapter.

        Raises ConfigError for a model with a head of its own, which would not be trained, and for adapter targets that
        the model lacks; CheckpointError for targets that have no name in PEFT's files."""
        config, lora = self.config, lora_of(self.config)
        if lora is None:
            return None
        assert self.folder is not None, "the settings ask for one"
        if model.spec.head.outputs:
            raise ConfigError(
                f"adapter={config.adapter} trains the blocks only, so the {model.spec.head.task} head of this model "
                "would stay untrained; leave adapter out to train the whole model"
            )
        model.to(self.dtype)
        if config.base is not None:
            for layer in block_linears(model).values():
                layer.keep(WEIGHTS[config.base].pack(layer.matrix))
        adapter = Adapter.fresh(model, lora, config.adapter_targets, config.seed)
        check_named(adapter, model.spec)
        attach(model, adapter, NAME, dtype=torch.float32)
        return Base(self.folder.path.resolve(), fingerprint(self.folder))


def _trained_tokenizer(config: RowsConfig, texts: Iterator[str], masked: bool) -> Tokenizer:
    vocab = config.vocab or VOCAB
    if config.units in ("characters", "words"):
        return {"characters": train_characters, "words": train_words}[config.units](texts, vocab)
    if not masked:
        return train_bpe(texts, vocab)
    trained = train_bpe(texts, vocab, special_tokens=[MASK, PAD])
    return Tokenizer(
        trained.backend, bos=trained.bos, eos=trained.eos, ends_with_eos=True, config=trained.config
    )


def make_spec(config: RowsConfig, vocab: int) -> ModelSpec:
    """Returns the spec of a model with fresh weights: one of the catalog, or one made from depth and other settings.

    Raises ConfigError for an unknown name, for a tokenizer larger than the catalog model's embedding, and for sizes or
    patterns that are not valid."""
    if config.model is not None:
        if config.model.lower() not in catalog.names():
            raise ConfigError(
                f"model {config.model!r} is neither a folder nor a name of the catalog"
                f"{did_you_mean(config.model.lower(), catalog.names())}; the catalog has {', '.join(catalog.names())}"
            )
        spec = catalog.spec(config.model)
        if spec.vocab < vocab:
            raise ConfigError(
                f"the tokenizer has {vocab} tokens, but {config.model} has {spec.vocab} embeddings; give a smaller one"
            )
        return spec
    names = ("width", "heads", "kv_heads", "hidden", "tied")
    sizes: dict[str, Any] = {name: v for name in names if (v := getattr(config, name)) is not None}
    depth = config.depth or DEPTH
    width = sizes.setdefault("width", 64 * depth)
    heads = sizes.setdefault("heads", max(1, width // 64))
    if width % heads:
        raise ConfigError(f"width {width} cannot be split into {heads} heads; give heads that divide it")
    sizes["head_dim"] = width // heads
    family = config.family or FAMILY.get(str(config.task))
    named_family = FAMILIES.get(family or "")
    sees_all = named_family is not None and named_family.defaults.get("causal") is False
    text = config.patterns or (None if sees_all else "Causal()")
    with as_error(ConfigError, "patterns"):
        patterns = (
            None if text is None else [parse(part) for part in text.split(";")]
        )  # one per layer, repeated
    # Of the configs of transformers, only ministral's can have windows in some layers; llama's cannot.
    family = family or ("llama" if set(patterns or ()) == {Causal()} else "ministral")
    family_defaults = FAMILIES.get(family, FAMILIES["llama"])  # `of_depth` raises for an unknown one
    sizes.setdefault("hidden", family_defaults.hidden(width))
    sizes.setdefault(
        "kv_heads", family_defaults.kv_heads(heads, next(g for g in (4, 2, 1) if heads % g == 0))
    )
    spec = ModelSpec.of_depth(depth, vocab, context=config.context, patterns=patterns, family=family, **sizes)
    if config.dropout is not None:
        spec = replace(spec, dropout=config.dropout, attention_dropout=config.dropout)
    return spec if config.mixers is None else spec.with_mixer(_layer_mixers(config.mixers, spec))


def _layer_mixers(text: str, spec: ModelSpec) -> list[object]:
    """Parses mixers such as `delta; delta; delta; attention`, one per layer, to be repeated."""
    delta = DeltaSpec(heads=spec.heads, key_heads=spec.kv_heads, head_dim=spec.head_dim)
    ssd = SSDSpec(heads=2 * spec.heads, key_heads=1, head_dim=128, value_dim=spec.head_dim)  # as Mamba-2's
    mixers: dict[str, object] = {"attention": Softmax(), "delta": delta, "ssd": ssd}
    mixers |= {name: LinearAttentionSpec(name) for name in (*FEATURES, "cosine")}
    names = [name.strip() for name in text.split(";")]
    for name in names:
        check_known(name, mixers, "mixers: there is no mixer")
    return [mixers[name] for name in names]


NAME = "default"
RANK, ALPHA = 16, 32.0


def lora_of(config: RowsConfig) -> Lora | None:
    """Returns the adapter that the settings describe; None if the model itself is trained."""
    if config.adapter is None:
        return None
    return Lora(
        rank=config.rank or RANK,
        alpha=config.alpha or ALPHA,
        stabilized=config.adapter == "rslora",
        magnitude=config.adapter == "dora",
        dropout=config.adapter_dropout or 0.0,
    )


def trained_parameters(config: RowsConfig, spec: ModelSpec) -> int:
    """Returns the number of trained parameters of a run."""
    lora = lora_of(config)
    if lora is None:
        return cost.parameter_count(spec)
    return cost.adapter_parameters(spec, lora, config.adapter_targets)


def trained_adapter(model: Model) -> Adapter:
    """Returns the adapter that `adapt` attached to a model; its sharded tensors are DTensors."""
    return Adapter.of(model, NAME, own_state(model))


def restore_adapter(model: Model, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Loads tensors into the adapter of a model. Raises CheckpointError if names or shapes differ from its own."""
    current = trained_adapter(model).tensors
    expected, stored = (
        {name: form.shape for name, form in lazy(state).forms.items()} for state in (current, tensors)
    )
    if wrong := sorted(n for n in expected.keys() | stored.keys() if expected.get(n) != stored.get(n)):
        raise CheckpointError(
            f"{path}: its adapter differs from that of the settings ({', '.join(wrong[:5])}); resume with the run's "
            "own config.yaml"
        )
    for name, value in current.items():
        fill(value, tensors, name)
