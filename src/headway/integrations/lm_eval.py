"""lm-evaluation-harness with headway's models: a `LanguageModel` as a model of the harness.

    headway eval runs/mine --harness hellaswag,arc_easy
    python -m headway.integrations.lm_eval run --model headway --model_args pretrained=runs/mine --tasks hellaswag

The second is the harness's own command line, in a process that has registered the model "headway" (the harness has no
entry points). Log-likelihoods equal those of its `hf` model on the same folder up to rounding, for every batch size.
Two differences: a rolling log-likelihood begins with one BOS (with a tokenizer that adds BOS, `hf` adds it again after
the prefix and scores it; `add_bos_token=False` avoids that), and unknown arguments are errors."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headway.api import LanguageModel, load
from headway.api.pretrained import BATCH
from headway.errors import ConfigError
from headway.generate import score
from headway.text.chat import Message

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(
        "headway.integrations.lm_eval needs lm-evaluation-harness (lm_eval 0.4.13 or newer), which cannot be imported "
        f'({error}); pip install "headway[harness]"'
    ) from error

NEW_TOKENS = 256  # default maximum of new tokens, as in all models of the harness
SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")


@register_model("headway")
class HeadwayLM(TemplateLM):  # type: ignore[misc]
    """A model of the harness.

    Args:
        pretrained: a folder or an id of the Hub, for `headway.load`, or a `LanguageModel`.
        batch_size: rows read at once, or "auto"; changes no result.
        max_length: slots of a row [the trained context]; longer contexts are truncated on the left, as in the harness.
        dtype, device, backend, revision: see `headway.load`.
    """

    def __init__(
        self,
        pretrained: str | LanguageModel,
        *,
        batch_size: int | str = BATCH,
        max_length: int | None = None,
        dtype: str | None = None,
        device: str | None = None,
        backend: str = "auto",
        revision: str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(pretrained, LanguageModel):
            self.lm = pretrained
        else:
            if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
                # the default of the harness is cuda
                logging.getLogger(__name__).warning("%s is not available; using the CPU", device)
                device = "cpu"
            how: dict[str, Any] = {"dtype": dtype, "device": device, "backend": backend, "revision": revision}
            self.lm = load(str(pretrained), task="causal-lm", **how)
        self.text = self.lm.need_tokenizer()
        self.batch_size = BATCH if batch_size == "auto" else int(batch_size)
        self.max_length = max_length or self.lm.spec.usual_context
        self._device = self.lm.model.model.like.device

    @property
    def eot_token_id(self) -> int:
        """EOS, or the token that stands for an empty context."""
        return self.lm.eos[0] if self.lm.eos else self.lm.prefix

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context."""
        return self.lm.prefix

    @property
    def tokenizer_name(self) -> str:
        """The key under which the harness caches tokenized requests."""
        return f"headway-{self.text.fingerprint.hex()}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Returns the ids of a text; control tokens in it are control tokens, and BOS is not repeated if the text
        begins with it."""
        return self.text.encode(string, bos=add_special_tokens is not False, eos=False, special=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        results: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        with tqdm(total=len(order), disable=disable_tqdm, desc="log-likelihoods") as bar:
            for at in range(0, len(order), self.batch_size):
                batch = order[at : at + self.batch_size]
                pairs = [self._fitted(*requests[i][1:]) for i in batch]
                scores = score(self.lm.model, pairs, batch_size=self.batch_size, beyond_context=True)
                for i, result in zip(batch, scores, strict=True):
                    results[i] = (result.log_prob, result.is_greedy)
                    if requests[i][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], results[i])
                bar.update(len(batch))
        return [results[i] for i in range(len(requests))]

    def _fitted(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Returns a pair with its context truncated on the left to fit in a row."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise ConfigError(
                f"a continuation of {len(continuation)} tokens exceeds max_length={self.max_length}; "
                "this model cannot score this task"
            )
        return context[-room:], continuation

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each whole text (`LanguageModel.score_text`)."""
        log_probs = []
        for request in tqdm(requests, disable=disable_tqdm, desc="rolling log-likelihoods"):
            (text,) = request.args
            result = self.lm.score_text(
                text, window=self.max_length, batch_size=self.batch_size, special=True, beyond_context=True
            )
            log_probs.append(result.log_prob)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), result.log_prob)
        return log_probs

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the generated continuation of each context, up to the stop strings in `until`."""
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        results: dict[int, str] = {}
        for group in groups.values():
            options = self._options(requests[group[0]].args[1])
            room = self.max_length - options["max_new_tokens"]
            if room < 1:
                raise ConfigError(
                    f"max_gen_toks={options['max_new_tokens']} leaves no room for the context in "
                    f"max_length={self.max_length}; lower it (--gen_kwargs max_gen_toks=N)"
                )
            prompts = [self.tok_encode(requests[i].args[0])[-room:] for i in group]
            texts = self.lm.generate(prompts, batch_size=self.batch_size, beyond_context=True, **options)
            for i, result in zip(tqdm(group, disable=disable_tqdm, desc="texts"), texts, strict=True):
                results[i] = result.text
                self.cache_hook.add_partial("generate_until", requests[i].args, result.text)
        return [results[i] for i in range(len(requests))]

    def _options(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Converts the generation arguments of a task to options of `LanguageModel.generate`."""
        args = dict(normalize_gen_kwargs(dict(kwargs), NEW_TOKENS))
        until, do_sample = args.pop("until", None) or [], args.pop("do_sample", False)
        options = {
            "max_new_tokens": args.pop("max_gen_toks"),
            "temperature": float(args.pop("temperature", 1.0 if do_sample else 0.0)),
            "stop": [text for text in ([until] if isinstance(until, str) else until) if text],
            **{name: args.pop(name) for name in SAMPLING if name in args},
        }
        if args:
            raise ConfigError(
                f"the task's generation_kwargs {', '.join(sorted(args))} are not supported; supported are "
                f"until, do_sample, temperature, max_gen_toks, {', '.join(SAMPLING)}"
            )
        return options

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the source of the tokenizer's chat template, or None if `chat_template` is False or None. Raises
        ConfigError if there is none, or for a template by name."""
        if chat_template is False or chat_template is None:
            return None
        if self.text.chat_template is None:
            raise ConfigError("a chat template was asked for, but this tokenizer has none")
        if isinstance(chat_template, str):
            raise ConfigError(f"chat template {chat_template!r}: this tokenizer has only one, without a name")
        return self.text.chat_template.source

    def apply_chat_template(self, chat_history: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Returns a conversation as text up to the beginning of the reply; without a generation prompt, up to the end
        of the last message's content."""
        self.chat_template(True)
        assert self.text.chat_template is not None
        names = {"bos_token": self.text.bos, "eos_token": self.text.eos}
        text = self.text.chat_template.render(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            **{name: "" if token is None else self.text.token(token) for name, token in names.items()},
        )
        if add_generation_prompt:
            return text
        last = str(chat_history[-1]["content"]).strip()
        return text[: text.rindex(last) + len(last)]


def evaluate(
    model: LanguageModel,
    tasks: Sequence[str],
    *,
    folder: str | None = None,
    limit: int | None = None,
    shots: int | None = None,
    context: int | None = None,
    batch_size: int = BATCH,
    chat: bool = False,
) -> dict[str, Any]:
    """Returns the harness's results for these tasks: the value of its `simple_evaluate`, without samples.

    `folder`: YAML files with tasks of one's own; `limit`: number of documents per task; `shots`: number of solved
    examples before each; `context`: slots of a row (`max_length`); `chat`: whether to apply the chat template. Raises
    ConfigError for an unknown task."""
    manager = TaskManager(include_path=folder)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise ConfigError(
            f"the harness has no task {', '.join(unknown)}; `python -m headway.integrations.lm_eval ls tasks` lists "
            "its tasks, and a folder of YAML files adds your own (--tasks)"
        )
    lm = HeadwayLM(model, batch_size=batch_size, max_length=context)
    results = simple_evaluate(
        lm, tasks=list(tasks), task_manager=manager, limit=limit, num_fewshot=shots, apply_chat_template=chat,
        log_samples=False,
    )  # fmt: skip
    return dict(results)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
