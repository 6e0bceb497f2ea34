"""`headway.load(...)`: a model with its tokenizer, ready to generate."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor

from headway.cache import DecoderCache
from headway.checkpoints.dtypes import choose_dtype
from headway.checkpoints.files import current_folder
from headway.checkpoints.folder import load_folder, save_folder
from headway.checkpoints.restore import as_decoder, build_model
from headway.errors import CheckpointError, ConfigError, DataError, did_you_mean
from headway.generate import Delta, Generation, Sampling, Settings
from headway.generate import generate as generate_ids
from headway.generate import stream as stream_ids
from headway.generate.loop import collect
from headway.models import Decoder, ModelSpec
from headway.text import Tokenizer
from headway.text.chat import Message
from headway.tokens import Tokens

TASKS = ("causal-lm",)
DTYPES = {
    **dict.fromkeys(("float32", "fp32"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16"), torch.float16),
    "float64": torch.float64,
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


class Options(TypedDict, total=False):
    """How to generate. Whatever is not given is greedy, seed 0, up to 128 new tokens, until EOS.

    max_new_tokens: at most so many (None: 128, or what the context has room for).
    temperature, top_k, top_p, min_p, repetition_penalty: see `Sampling`; temperature 0 is greedy.
    seed: equal seeds give equal text.   stop: strings that end the text.
    eos: ids that end the text, instead of the model's.   beyond_context: go on past the trained context.
    use_cache, kv_cache_dtype, prefill_chunk: see `Settings`.
    """

    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop: Sequence[str]
    eos: Sequence[int]
    beyond_context: bool
    use_cache: bool
    kv_cache_dtype: str
    prefill_chunk: int | None


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class LanguageModel:
    """A decoder, its tokenizer and how it ends its texts.

    >>> lm = headway.load("runs/demo")
    >>> print(lm.generate("def main(", max_new_tokens=40, temperature=0.8))
    >>> for delta in lm.stream("def main("): print(delta.text, end="", flush=True)

    Attributes:
        model: the `Decoder`.   tokenizer: None when the folder has none; then prompts are ids.
        generation: the content of generation_config.json; of it, only `eos_token_id` decides anything here.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        *,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        if tokenizer is not None:
            tokenizer.require_fits(model.spec.vocab)
        self.model, self.tokenizer, self.generation = model, tokenizer, dict(generation or {})

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def eos(self) -> tuple[int, ...]:
        """Ids that end a text: generation_config.json's, else the tokenizer's."""
        given = self.generation.get("eos_token_id")
        if given is None:
            own = self.tokenizer.eos if self.tokenizer else None
            return () if own is None else (own,)
        return tuple(given) if isinstance(given, (list, tuple)) else (int(given),)

    # -- text ---------------------------------------------------------------------------------------------

    @overload  # a str is a Sequence[str], too
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: str | Tensor,
        *,
        batch_size: int | None = ...,
        special: bool = ...,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Sequence[int],
        *,
        batch_size: int | None = ...,
        special: bool = ...,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]],
        *,
        batch_size: int | None = ...,
        special: bool = ...,
        **options: Unpack[Options],
    ) -> list[Generation]: ...

    def generate(
        self, prompt: Any, *, batch_size: int | None = None, special: bool = False, **options: Unpack[Options]
    ) -> Generation | list[Generation]:
        """Continues one prompt (a text, or ids), or each of a list of prompts.

        A Generation prints as its text; it has `ids`, `finish_reason` ("eos", "stop", "length") and
        `tokens_per_second`. Texts begin with BOS when the tokenizer does so; prompts given as ids are taken as
        they are. `special`: control tokens written in the prompt are control tokens, not text.
        `batch_size`: how many prompts of a list are worked on at once. It changes no text, and neither does
        what else is in the list: prompt i draws from (seed, i).
        """
        prompts, one = self._ids(prompt, special)
        found = generate_ids(
            self.model, prompts, self._settings(options), tokenizer=self.tokenizer, batch_size=batch_size
        )
        return found[0] if one else found

    def stream(
        self, prompt: str | Sequence[int] | Tensor, *, special: bool = False, **options: Unpack[Options]
    ) -> Iterator[Delta]:
        """Continues one prompt token by token: `delta.text` is what became certain. All texts together are the
        text of `generate` with the same arguments."""
        prompts, one = self._ids(prompt, special)
        if not one:
            raise DataError(
                "stream continues one prompt, got a list; use generate, or headway.generate.stream"
            )
        return stream_ids(self.model, prompts, self._settings(options), tokenizer=self.tokenizer)

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Generation:
        """The reply to a conversation, [{"role": "user", "content": "..."}, ...], through the chat template."""
        ids = self._chat_ids(messages)
        return collect(list(self.stream(ids, **options)), len(ids))

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Iterator[Delta]:
        """`chat`, token by token."""
        return self.stream(self._chat_ids(messages), **options)

    # -- numbers ------------------------------------------------------------------------------------------

    def __call__(
        self,
        ids: Tensor,
        *,
        tokens: Tokens | None = None,
        cache: DecoderCache | None = None,
        logits_for: Tensor | slice | None = None,
    ) -> Tensor:
        """Logits [B, T, V] of the token after each slot of `ids` [B, T]: `Decoder.forward`."""
        logits: Tensor = self.model(ids, tokens=tokens, cache=cache, logits_for=logits_for)
        return logits

    def save(self, folder: str | Path) -> None:
        """Writes a Hugging Face folder that `headway.load` and `transformers` read; all of it, or nothing."""
        save_folder(folder, self.model, tokenizer=self.tokenizer, generation=self.generation)

    def __repr__(self) -> str:
        return (
            f"LanguageModel({self.spec.family}, {self.spec.parameter_count:,} parameters, {self.tokenizer!r})"
        )

    # -- inside -------------------------------------------------------------------------------------------

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise DataError("this model has no tokenizer: give token ids, or a folder with tokenizer.json")
        return self.tokenizer

    def _chat_ids(self, messages: Sequence[Message]) -> list[int]:
        return self._need_tokenizer().render_chat(messages)

    def _ids(self, prompt: Any, special: bool) -> tuple[list[list[int]], bool]:
        """The prompts as ids, and whether it was one."""
        if prompt is None:
            raise DataError("the prompt is None; give a text, token ids, or a list of either")
        if isinstance(prompt, Tensor):
            if prompt.dim() not in (1, 2) or prompt.is_floating_point():
                raise DataError(
                    f"ids are an integer tensor [T] or [B, T], got {prompt.dtype} {[*prompt.shape]}"
                )
            prompt, one = prompt.tolist(), prompt.dim() == 1
            return ([prompt] if one else prompt), one
        if isinstance(prompt, str):
            return [self._need_tokenizer().encode(prompt, special=special)], True
        prompts = list(prompt)
        if prompts and isinstance(prompts[0], str):
            return self._need_tokenizer().encode_batch(prompts, special=special), False
        if prompts and isinstance(prompts[0], int):
            return [prompts], True
        if any(isinstance(p, Mapping) for p in prompts):
            raise DataError("these are messages of a conversation, not prompts; use chat(messages)")
        return prompts, False

    def _settings(self, options: Options) -> Settings:
        known = Options.__annotations__
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"generate has no option {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}"
                )
        given: dict[str, Any] = dict(options)
        sampling = Sampling(**{name: given.pop(name) for name in _SAMPLING if name in given})
        unused = self.tokenizer.unused_ids(self.spec.vocab) if self.tokenizer else []
        return Settings(**{"eos": self.eos, **given}, sampling=sampling, forbidden=unused)


def load(
    source: str | Path,
    *,
    task: str = "causal-lm",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    backend: str = "auto",
    revision: str | None = None,
    allow_pickle: bool = False,
) -> LanguageModel:
    """A model from a Hugging Face folder, or by its id on the Hugging Face Hub (downloaded once).

    Args:
        source: a folder (config.json, model.safetensors, tokenizer.json), or an id such as "owner/name".
        task: what it is for; there is "causal-lm".
        dtype: "float32", "bfloat16", ... or a torch dtype; None or "auto" keeps the file's (float16 becomes
            float32 on a CPU, where float16 is hundreds of times slower).
        backend: of attention; a named one fails rather than falls back.
        revision: of a Hub id: branch, tag or commit.
        allow_pickle: read old `.bin` weights, too (with torch's restricted unpickler).
    Raises CheckpointError or ConfigError, saying which file and what is wrong with it.
    """
    if task not in TASKS:
        raise ConfigError(
            f"load: there is no task {task!r}{did_you_mean(task, TASKS)}; there is {', '.join(TASKS)}"
        )
    here = current_folder(source).exists()
    path = Path(source) if here else _fetch(str(source), revision, allow_pickle)
    if revision is not None and here:
        raise ConfigError(f"load: revision {revision!r} is for ids of the Hub, but {source} is a folder here")
    wanted = _dtype(dtype)
    where = torch.device("cpu" if device is None else device)
    folder = load_folder(path, allow_pickle=allow_pickle)
    _, choice = choose_dtype({n: e.dtype for n, e in folder.tensors.forms.items()}, where, wanted)
    if wanted == torch.float16 and where.type == "cpu":
        warnings.warn(f"{choice.what} on a CPU: {choice.why}", stacklevel=2)
    tokenizer = _tokenizer(current_folder(path))
    if tokenizer is not None:
        tokenizer.require_fits(folder.spec.vocab)
    model = as_decoder(build_model(folder, dtype=wanted, device=where, backend=backend))
    return LanguageModel(model, tokenizer, generation=folder.generation)


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto":
        return None
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype.removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(
            f"load: there is no dtype {dtype!r}{did_you_mean(name, DTYPES)}; there are {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def _tokenizer(folder: Path) -> Tokenizer | None:
    names = ("tokenizer.json", "tokenizer.model", "tokenizer.bin")
    return Tokenizer.load(folder) if any((folder / name).is_file() for name in names) else None


def _fetch(source: str, revision: str | None, allow_pickle: bool) -> Path:
    if not _HUB_ID.fullmatch(source):
        parent = Path(source).parent
        near = [p.name for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
        raise CheckpointError(f"{source}: no such folder{did_you_mean(Path(source).name, near)}")
    from huggingface_hub import snapshot_download

    files = [*_HUB_FILES, *(["*.bin", "*.pth"] if allow_pickle else [])]
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=files))
    except Exception as error:  # its many kinds all mean that there is nothing to load
        raise CheckpointError(
            f"{source}: no such folder here, and as an id of the Hugging Face Hub it could not be fetched "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else 'no more is said'}). "
            "Check the name and the network; HF_HUB_OFFLINE=1 forbids fetching, HF_TOKEN opens gated models"
        ) from error
