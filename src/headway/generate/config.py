"""Settings of a generation, validated before anything runs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from numbers import Integral
from typing import Any, Literal, Protocol

from torch import Tensor

from headway.cache import kv_dtype
from headway.errors import ConfigError, check_whole
from headway.generate.sampling import Sampling
from headway.generate.stop import StopScanner

LARGEST_BIAS = 1e6
LARGEST_LENGTH_PENALTY = 10  # lengths to this power are still finite


class Grammar(Protocol):
    """The place of a text in a grammar, a function of its new tokens; before the first, the grammar itself. V is the
    vocabulary."""

    @property
    def ended(self) -> bool:
        """Whether nothing more can follow, an EOS apart."""

    def allowed(self) -> Tensor:
        """The tokens that may come next: bool [V], on the CPU. An EOS is one of them where the text may end; none
        are where the grammar has become too large to tell."""

    def advance(self, token: int) -> None:
        """Moves on by one token, which was allowed."""

    def copy(self) -> "Grammar":
        """The same place, for another text."""


@dataclass(frozen=True)
class Beams:
    """A beam search.

    width: unfinished texts of a prompt that continue after each step, and finished ones that are kept. 1 is greedy.
    length_penalty: the exponent a in score = log p / length^a. 0 ranks by probability; more favours long texts.
    early_stopping: when `width` texts have finished, stop at once (True), or when the best unfinished text could
        not improve on the worst of them: if it ended now (False: a heuristic for length_penalty > 0, where longer
        texts may still score higher), or at whichever length serves it best ("never": certain).
    n_best: hypotheses that are returned, at most `width`.
    with_greedy: follow the greedy text as well when it leaves the beams, so that no score is below greedy's. False
        is the plain algorithm, which may miss it.
    Raises ConfigError for values outside their range, naming them.
    """

    width: int = 4
    _: KW_ONLY
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    n_best: int = 1
    with_greedy: bool = True

    def __post_init__(self) -> None:
        for name in ("width", "n_best"):
            check_whole(f"beams: {name}", getattr(self, name))
        if self.n_best > self.width:
            raise ConfigError(
                f"beams: n_best is {self.n_best}, but {self.width} beams keep {self.width} texts; "
                f"ask for {self.n_best} beams or more"
            )
        if not abs(self.length_penalty) <= LARGEST_LENGTH_PENALTY:
            raise ConfigError(
                f"beams: length_penalty must lie between -{LARGEST_LENGTH_PENALTY} and {LARGEST_LENGTH_PENALTY} "
                f"(0 ranks by probability), got {self.length_penalty}"
            )
        if self.early_stopping not in (True, False, "never"):
            raise ConfigError(f'beams: early_stopping is True, False or "never", got {self.early_stopping!r}')

    def score(self, log_prob: float, length: int) -> float:
        """The score of `length` tokens whose log probabilities sum to `log_prob`; 0 for no tokens."""
        return log_prob / length**self.length_penalty if length else 0.0


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Everything about a generation but model and prompts. Every request may have its own, but for the last line of
    fields, which all requests of a call share.

    max_new_tokens: at most so many; None is 128, or what remains of the context if that is less.
    sampling, seed: how tokens are chosen; equal configs, seed and request number give equal text.
    beams: search for the texts of the highest score instead of sampling; see `Beams`.
    eos: ids that end a text (and are not part of it).
    stop: strings that end a text, or one (and are not part of it), also when they are split across tokens.
    bias: what is added to the logits of ids.   forbidden: ids that are never taken.
    min_new_tokens: no EOS among so many first tokens.
    no_repeat_ngram: no n tokens in a row occur twice in prompt and text (0: they may).
    forced_first, forced_last: this id is the first new token, or the last one when `max_new_tokens` is reached; it
        is certain then, so that its log probability is 0.
    prefix: these ids are the first new tokens, behind `forced_first`; certain, too.
    grammar: what new text follows; where nothing can follow, the text ends. Texts of one grammar share what it costs.
    shown: ids of control tokens that are part of the text; others give none.
    log_probs: tell of each new token ln p(token | all before it) under the model's own distribution, whatever the
        settings above make of it;  top_log_probs: and of so many of the likeliest tokens in its place;
        prompt_log_probs: and the same of the prompt, which is read whole then, whatever is stored of it.
        drawn_log_probs: instead, those that new tokens are drawn with, behind all of these settings; -inf is never.
    adapters: names of those that are added, of all that are active; None is all of them. Texts of one batch may have
        adapters of their own, or none ([]).
    beyond_context: allow more tokens than the model was trained on.
    prefix_cache: read only what no earlier text of the same engine has stored (`LanguageModel`, a batch). Sums are made
        in another order then, so that a text may be another than that of a first call where two tokens are as likely.
    cache_salt: texts of another salt share nothing that is stored, so that none can tell by its time what others asked.
    use_cache: False computes every step from the whole text: slow, the same text. For checking.
    kv_cache_dtype: what the cache stores: "auto" (keys and values as the model makes them) or "int8" (rounded: a
        quarter of float32, half of bfloat16, and nearly the same text).
    prefill_chunk: prompts are read in chunks of so many tokens (less memory); None reads them at once.
    exact: the logits of a text are the same bits whatever is read beside it and however it is read: alone, in any
        batch, in pieces, from what is stored, sent back to wait, drafted. Prompts are read by the kernels of decoding
        then, more slowly, and models that these do not compute are refused.
    """

    max_new_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    beams: Beams | None = None
    eos: Sequence[int] = ()
    stop: Sequence[str] | str = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    forbidden: Sequence[int] = ()
    min_new_tokens: int = 0
    no_repeat_ngram: int = 0
    forced_first: int | None = None
    forced_last: int | None = None
    prefix: Sequence[int] = ()
    grammar: Grammar | None = None
    shown: Collection[int] = ()
    log_probs: bool = False
    top_log_probs: int = 0
    prompt_log_probs: bool = False
    drawn_log_probs: bool = False
    adapters: Sequence[str] | None = None
    beyond_context: bool = False
    prefix_cache: bool = False
    cache_salt: str = ""
    use_cache: bool = True
    kv_cache_dtype: str = "auto"
    prefill_chunk: int | None = None
    exact: bool = False

    @cached_property
    def constrains(self) -> bool:
        """Whether some texts have tokens that must or may not come next, beside those that are always forbidden."""
        return self.is_forced or bool(self.no_repeat_ngram or self.min_new_tokens)

    @property
    def is_forced(self) -> bool:
        """Whether some tokens are certain."""
        return self.forced_first is not None or self.forced_last is not None or bool(self.prefix)

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens", "no_repeat_ngram", "top_log_probs", "prefill_chunk"):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, least=int(name == "prefill_chunk"))
        if not isinstance(self.seed, Integral):
            raise ConfigError(f"seed must be a whole number, got {self.seed!r}")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not isinstance(self.stop, Collection):
            raise ConfigError(f"stop is a string or a list of strings, got {self.stop!r}")
        for token, more in self.bias.items():
            if not more <= LARGEST_BIAS:
                raise ConfigError(f"bias: at most {LARGEST_BIAS} may be added, got {more} for id {token}")
        beams, plain = self.beams, self.sampling.penalties
        dtype, whole_text = self.kv_cache_dtype, "without it every step reads the whole text"
        is_rounded, is_search = kv_dtype(dtype) is not None, beams is None or isinstance(beams, Beams)
        eos_are_ids = isinstance(self.eos, Collection) and all(type(i) is int for i in self.eos)
        names: object = () if self.adapters is None else self.adapters
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        are_names = is_list and all(isinstance(name, str) for name in names)
        wrong: dict[str, object] = {}  # the error's text, and whether it applies
        if not self.use_cache:
            wrong |= {
                f"prefill_chunk needs the cache: {whole_text} at once": self.prefill_chunk,
                f"kv_cache_dtype={dtype!r} says what the cache stores, but use_cache is False": is_rounded,
                f"prefix_cache needs the cache: {whole_text}": self.prefix_cache,
                "exact needs the cache: its kernels read what is new of a text, never all of it": self.exact,
            }
        wrong |= {
            f"adapters is a list of names, got {self.adapters!r}; write a single name as [name]": not are_names,
            f"eos is a list of token ids, got {self.eos!r}; write a single id as [id]": not eos_are_ids,
            f"min_new_tokens is {self.min_new_tokens}, but max_new_tokens {self.max_new_tokens}": (
                self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens
            ),
            f"beams must be a Beams, got {beams!r}; write Beams({beams!r})": not is_search,
            "grammar: it allows tokens one by one, of one text, and those of beams, forced_first, forced_last and "
            "prefix are chosen otherwise; leave out either": (
                self.grammar is not None and (beams is not None or self.is_forced)
            ),
        }
        for name in ("top_log_probs", "prompt_log_probs", "drawn_log_probs"):
            key = f"{name}={getattr(self, name)} is about log_probs, which were not asked for; ask for both"
            wrong[key] = getattr(self, name) and not self.log_probs
        if beams is not None:
            draws = self.sampling != plain or self.seed != 0
            wrong |= {
                f"beams: a beam search draws nothing, but {self.sampling} and seed={self.seed} were given; leave "
                "out temperature, top_k, top_p, min_p and seed, or the beams": draws,
                "beams: the hypotheses of a beam search have the log_probs that they are ranked by; leave out "
                "log_probs": self.log_probs,
                f"beams: a beam search ends texts by eos alone, but stop strings {[*self.stop]} were given; "
                "leave out either": self.stop,
            }
        for message, is_wrong in wrong.items():
            if is_wrong:
                raise ConfigError(message)
        StopScanner(self.stop)

    @property
    def session_options(self) -> dict[str, Any]:
        """The options that all requests of a call share."""
        names = "use_cache", "kv_cache_dtype", "prefill_chunk", "exact"
        return {name: getattr(self, name) for name in names}
