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
    """The state of a sequence in a grammar, a function of its new tokens; before the first, the grammar itself.

    V is the vocabulary."""

    @property
    def ended(self) -> bool:
        """Whether nothing but an EOS can follow."""

    def allowed(self) -> Tensor:
        """Returns which tokens may come next: bool [V], on the CPU.

        EOS is allowed where the text may end. No token is allowed if the grammar has become too large to compute
        them."""

    def advance(self, token: int) -> None:
        """Advances by one token, which must be allowed."""

    def copy(self) -> "Grammar":
        """Returns an independent copy of this state, for another sequence."""


@dataclass(frozen=True)
class Beams:
    """Settings of a beam search.

    width: unfinished hypotheses of a prompt that continue after each step, and finished ones that are kept. 1 is
        greedy.
    length_penalty: the exponent a in score = log p / length^a. 0 ranks by probability; larger values favour long texts.
    early_stopping: once `width` hypotheses have finished, stop at once (True), or when the best unfinished hypothesis
        could not improve on the worst of them: if it ended now (False: a heuristic for length_penalty > 0, where longer
        texts may still score higher), or at the length that favours it most ("never": exact).
    n_best: number of hypotheses to return, at most `width`.
    with_greedy: also follow the greedy hypothesis after it leaves the beams, so that the result never scores below
        greedy decoding. False is the plain algorithm, which may miss it.

    Raises ConfigError, naming the setting, for values outside their range.
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
        """Returns the score of `length` tokens whose log probabilities sum to `log_prob`; 0 for no tokens."""
        return log_prob / length**self.length_penalty if length else 0.0


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """All settings of a generation except the model and the prompts. Each request may have its own, except for
    `session_options`, which all requests of a call share.

    max_new_tokens: maximum number of new tokens; None is 128, or what remains of the context if that is less.
    sampling, seed: how tokens are chosen; equal configs, seed and request number give equal text.
    beams: search for the hypotheses of the highest score instead of sampling; see `Beams`.
    eos: ids that end a text (they are not part of the text).
    stop: strings, or one, that end a text (they are not part of it), also if they are split across tokens.
    bias: values added to the logits of ids.   forbidden: ids that are never chosen.
    min_new_tokens: number of first tokens that cannot be EOS.
    no_repeat_ngram: no sequence of n tokens occurs twice in prompt and text (0: no limit).
    forced_first, forced_last: this id is the first new token, or the last one if `max_new_tokens` is reached; its log
        probability under these settings is 0, since it is certain.
    prefix: these ids are the first new tokens, after `forced_first`; certain, too.
    grammar: the grammar that new tokens follow; the text ends where nothing can follow. Texts with the same grammar
        object share the cost of computing its states.
    shown: ids of control tokens that appear in the text; others are omitted.
    log_probs: return ln p(token | all before it) of each new token under the model's own distribution, before all
        settings above;  top_log_probs: also of this many most likely tokens at its place;  prompt_log_probs: also for
        the prompt, which is then read in full, ignoring the prefix cache.
    drawn_log_probs: return instead the log probabilities of the distribution that tokens are drawn from, after all of
        these settings; -inf for a token that is never drawn.
    adapters: names of the active adapters to add; None is all of them. Requests of one batch may have different
        adapters, or none ([]).
    beyond_context: allow more tokens than the model was trained on.
    prefix_cache: reuse the keys and values of prefixes that earlier texts of the same engine have stored
        (`LanguageModel`, a batch). Sums are then computed in another order, so that the text may differ from that of a
        first call where two tokens are about equally likely.
    cache_salt: prefixes are shared only between requests with the same salt, so that nobody else can tell from timing
        what was requested.
    use_cache: False recomputes every step from the whole sequence: slow, the same text. For checking.
    kv_cache_dtype: what the KV cache stores: "auto" (keys and values as the model computes them) or "int8" (rounded: a
        quarter of float32, half of bfloat16, and nearly the same text).
    prefill_chunk: prompts are read in chunks of this many tokens (less memory); None reads them at once.
    exact: the logits of a text are bitwise equal however and with whatever else it is read: alone, in any batch, in
        chunks, from the prefix cache, after preemption, with drafts. Prompts are then read by the decoding kernels,
        more slowly, and models that these do not support are refused.
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
        """Whether tokens may be forced or banned at some steps, besides those that are always forbidden."""
        return self.is_forced or bool(self.no_repeat_ngram or self.min_new_tokens)

    @property
    def is_forced(self) -> bool:
        """Whether some tokens are forced."""
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
        for token, bias in self.bias.items():
            if not bias <= LARGEST_BIAS:
                raise ConfigError(f"bias: at most {LARGEST_BIAS} may be added, got {bias} for id {token}")
        beams, penalties_alone = self.beams, self.sampling.penalties
        dtype, whole_text = self.kv_cache_dtype, "without a cache every step reads the whole text"
        is_rounded, is_search = kv_dtype(dtype) is not None, beams is None or isinstance(beams, Beams)
        eos_are_ids = isinstance(self.eos, Collection) and all(type(i) is int for i in self.eos)
        names: object = () if self.adapters is None else self.adapters
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        are_names = is_list and all(isinstance(name, str) for name in names)
        faults: dict[str, object] = {}  # error messages, and whether they apply
        if not self.use_cache:
            faults |= {
                f"prefill_chunk needs use_cache=True: {whole_text} at once": self.prefill_chunk,
                f"kv_cache_dtype={dtype!r} needs use_cache=True, got False": is_rounded,
                f"prefix_cache needs use_cache=True: {whole_text}": self.prefix_cache,
                "exact needs use_cache=True: its kernels read only the new tokens of a text": self.exact,
            }
        faults |= {
            f"adapters is a list of names, got {self.adapters!r}; write a single name as [name]": not are_names,
            f"eos is a list of token ids, got {self.eos!r}; write a single id as [id]": not eos_are_ids,
            f"min_new_tokens is {self.min_new_tokens}, but max_new_tokens {self.max_new_tokens}": (
                self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens
            ),
            f"beams must be a Beams, got {beams!r}; write Beams({beams!r})": not is_search,
            "grammar cannot be combined with beams, forced_first, forced_last or prefix; leave out one": (
                self.grammar is not None and (beams is not None or self.is_forced)
            ),
        }
        for name in ("top_log_probs", "prompt_log_probs", "drawn_log_probs"):
            key = f"{name}={getattr(self, name)} needs log_probs=True"
            faults[key] = getattr(self, name) and not self.log_probs
        if beams is not None:
            draws = self.sampling != penalties_alone or self.seed != 0
            faults |= {
                f"beams: a beam search does not sample, but {self.sampling} and seed={self.seed} were given; leave "
                "out temperature, top_k, top_p, min_p and seed, or the beams": draws,
                "beams: log_probs is not supported; the hypotheses of a beam search have the log-probabilities that "
                "they are ranked by; leave out log_probs": self.log_probs,
                f"beams: a beam search ends texts only at eos, but stop strings {[*self.stop]} were given; "
                "leave out either": self.stop,
            }
        for message, is_wrong in faults.items():
            if is_wrong:
                raise ConfigError(message)
        StopScanner(self.stop)

    @property
    def session_options(self) -> dict[str, Any]:
        """The options that all requests of a call share."""
        names = "use_cache", "kv_cache_dtype", "prefill_chunk", "exact"
        return {name: getattr(self, name) for name in names}
