"""The inputs of training: tokenizer, spec and first weights, made or loaded, and an adapter beside these."""

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
"""Families of home-made models by task: for encoders one whose rows may be of any length; llama for other tasks."""
MASK, PAD = "[MASK]", "[PAD]"


@dataclass(frozen=True)
class Inputs:
    """The model that the settings of a run name, opened once: its `folder`, None where weights are fresh. Where a model
    is measured it is that model's, with the files of its adapters."""

    config: Any
    folder: Folder | None = None

    @staticmethod
    def of(config: TrainConfig) -> "Inputs":
        """Opens the model that the settings name; one of the Hub is fetched first. Raises as `load_folder` does."""
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
        """See `choose_precision`."""
        return choose_precision(self.config.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of matrix products."""
        return DTYPES[self.precision.what]

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the settings, or of the model's folder; None where one is to be trained."""
        home = None if self.folder is None else self.folder.home or self.folder.path
        place = getattr(self.config, "tokenizer", None) or home
        return None if place is None else Tokenizer.load(place)

    def spec(self, vocab: int | None = None) -> ModelSpec:
        """The spec of the first model of a run; `vocab` is for fresh weights, as the settings say unless given."""
        if self.folder is not None:
            return self.folder.spec
        if vocab is None:  # the catalog has vocabularies of its own
            vocab = self.config.vocab or VOCAB if self.config.model is None else 1
        return make_spec(self.config, vocab)

    def find_tokenizer(
        self, start: Path | None, texts: Callable[[], Iterator[str]], *, masked: bool
    ) -> Tokenizer:
        """`tokenizer`, that of the checkpoint `start`, or one that is trained on `texts()` and kept in the run's
        folder; a BPE has a mask and a pad token, and ends its texts, if `masked`.

        Raises ConfigError where none is given and none can be trained."""
        config = self.config
        if self.tokenizer is not None:
            return self.tokenizer
        if config.model is not None:
            raise ConfigError(
                f"model {config.model!r} comes without a tokenizer; give one (tokenizer=FOLDER), or leave model out"
            )
        home = start or Path(config.out) / "tokenizer"
        if not (home / "tokenizer.json").exists():
            if Path(config.data).suffix == TOKENS:
                raise ConfigError(
                    f"{config.data} holds token ids; give the tokenizer that made them (tokenizer=FOLDER)"
                )
            _trained_tokenizer(config, texts(), masked).save(home)
        return Tokenizer.load(home)  # also where it is new: the one that a resumed run will have

    def first_model(self, vocab: int, head: Head | None = None) -> tuple[Decoder | Encoder, list[str]]:
        """The fp32 model that a run begins with, and remarks on it: a folder's weights, or fresh ones from `seed`. One
        that an adapter is trained beside is in the number format of the products.

        With `head` it has that one, for rows of `context` tokens at least, which its users may then give it. Of a
        folder with another head, the layers below are taken; new weights are drawn from `seed`."""
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
        """Freeze a model in `dtype`, in 4 bits where the settings say so, and put a fresh adapter in float32 on it.
        None, and nothing is done, where the settings have no adapter.

        Raises ConfigError for a model whose head would stay untrained, and for targets that it has not; CheckpointError
        for those that its files have no name for."""
        config, lora = self.config, lora_of(self.config)
        if lora is None:
            return None
        assert self.folder is not None, "the settings ask for one"
        if model.spec.head.outputs:
            raise ConfigError(
                f"adapter={config.adapter}: the head of this model ({model.spec.head.task}) lies outside of the "
                "blocks, and would stay as it is; leave adapter out, and train the model itself"
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
    """The spec of a run with fresh weights: from the catalog, or made by depth."""
    if config.model is not None:
        if config.model.lower() not in catalog.names():
            raise ConfigError(
                f"model {config.model!r} is neither a folder nor a name of the catalog"
                f"{did_you_mean(config.model.lower(), catalog.names())}; the catalog has {', '.join(catalog.names())}"
            )
        spec = catalog.spec(config.model)
        if spec.vocab < vocab:
            raise ConfigError(
                f"the tokenizer has {vocab} tokens, but {config.model} has an embedding of {spec.vocab}"
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
    known = FAMILIES.get(family or "")
    sees_all = known is not None and known.defaults.get("causal") is False
    text = config.patterns or (None if sees_all else "Causal()")
    with as_error(ConfigError, "patterns"):
        patterns = (
            None if text is None else [parse(part) for part in text.split(";")]
        )  # one per layer, repeated
    # transformers says "a window in some layers" in ministral's config only (plain llama has none).
    family = family or ("llama" if set(patterns or ()) == {Causal()} else "ministral")
    kind = FAMILIES.get(family, FAMILIES["llama"])  # an unknown one is refused by `of_depth`
    sizes.setdefault("hidden", kind.hidden(width))
    sizes.setdefault("kv_heads", kind.kv_heads(heads, next(g for g in (4, 2, 1) if heads % g == 0)))
    spec = ModelSpec.of_depth(depth, vocab, context=config.context, patterns=patterns, family=family, **sizes)
    if config.dropout is not None:
        spec = replace(spec, dropout=config.dropout, attention_dropout=config.dropout)
    return spec if config.mixers is None else spec.with_mixer(_layer_mixers(config.mixers, spec))


def _layer_mixers(text: str, spec: ModelSpec) -> list[object]:
    """`delta; delta; delta; attention` as mixers, one per layer, to be repeated."""
    delta = DeltaSpec(heads=spec.heads, key_heads=spec.kv_heads, head_dim=spec.head_dim)
    ssd = SSDSpec(heads=2 * spec.heads, key_heads=1, head_dim=128, value_dim=spec.head_dim)  # as Mamba-2's
    known: dict[str, object] = {"attention": Softmax(), "delta": delta, "ssd": ssd}
    known |= {name: LinearAttentionSpec(name) for name in (*FEATURES, "cosine")}
    names = [name.strip() for name in text.split(";")]
    for name in names:
        check_known(name, known, "mixers: there is no")
    return [known[name] for name in names]


NAME = "default"
RANK, ALPHA = 16, 32.0


def lora_of(config: RowsConfig) -> Lora | None:
    """The settings of the adapter; None where the model itself is trained."""
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
    """Numbers that a run trains."""
    lora = lora_of(config)
    if lora is None:
        return cost.parameter_count(spec)
    return cost.adapter_parameters(spec, lora, config.adapter_targets)


def trained_adapter(model: Model) -> Adapter:
    """The one that `adapt` put on a model; a part of a tensor is a DTensor."""
    return Adapter.of(model, NAME, own_state(model))


def restore_adapter(model: Model, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Fill the adapter of a model. Raises CheckpointError for tensors that are not its own."""
    current = trained_adapter(model).tensors
    ours, stored = (
        {name: form.shape for name, form in lazy(state).forms.items()} for state in (current, tensors)
    )
    if wrong := sorted(n for n in ours.keys() | stored.keys() if ours.get(n) != stored.get(n)):
        raise CheckpointError(
            f"{path} holds another adapter than the settings make: {', '.join(wrong[:5])}; resume with its own settings"
        )
    for name, value in current.items():
        fill(value, tensors, name)
