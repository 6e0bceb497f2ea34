"""`headway generate MODEL PROMPT`: continues a text."""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

from headway.cli._options import Count, Whole, says
from headway.cli._shared import ModelRun, attributes, note, print_json, read_prompt
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.api import LanguageModel
    from headway.generate import Generation

STEPS = {"native": "native steps", "modules": "modules"}


@dataclass(frozen=True, kw_only=True)
class SamplingRun(ModelRun):
    """A model that continues a text, and how its tokens are sampled.

    max_new_tokens: maximum number of new tokens [default: 128, or what the context has room for]
    temperature: 0 is greedy
    top_k: 0 is no filter
    top_p: 1 is no filter
    min_p: 0 is no filter
    repetition_penalty: 1 is none
    seed: equal seeds give equal text
    stop: text that ends generation; may be repeated
    exact: logits independent of batching and caching, bit for bit; slower prompts
    draft: speculative decoding, with tokens guessed from the text or by a smaller model: the same text, often faster
    draft_tokens: maximum number of tokens to guess at a time [default: 8; by a model 4]
    """

    max_new_tokens: Annotated[Whole | None, says(short="-n")] = None
    temperature: Annotated[float | None, says(short="-t")] = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: list[str] | None = None
    kv_cache_dtype: str = "auto"
    exact: bool = False
    draft: Annotated[str | None, says(metavar="ngram|MODEL")] = None
    draft_tokens: Count | None = None

    def options(self, **more: Any) -> Any:
        """Returns the options for `LanguageModel.generate` and more; those that are None are left out."""
        sampling = {field.name for field in fields(self)} - {field.name for field in fields(ModelRun)}
        values = {**attributes(self, *sampling), **more}
        kwargs = {name: value for name, value in values.items() if value is not None}
        if self.draft not in (None, "ngram"):
            kwargs["draft"] = replace(self, model=self.draft, adapter=None, any_base=False).load(
                task="causal-lm"
            )
        return kwargs


@dataclass(frozen=True, kw_only=True)
class GenerateRun(SamplingRun):
    """Further options of continuing a text.

    temperature: 0 is greedy [default: 0.8; with --beams 0]
    beams: number of beams of a beam search
    length_penalty: score = log probability / tokens ** this; more favours long texts [default: 1]
    early_stopping: true | false | never: stop once as many texts as beams have ended [default: false]
    n_best: number of texts to print, with their scores [default: 1]
    beyond_context: continue beyond the trained context
    use_cache: use a KV cache; without one, the same text, slowly
    prefill_chunk: read the prompt in chunks of this many tokens
    log_probs: include in --json ln p of each new token, under the model's unmodified distribution
    top_log_probs: also include this many of the likeliest tokens at its position
    """

    temperature: Annotated[float | None, says(short="-t")] = None
    beams: Count | None = None
    length_penalty: float | None = None
    early_stopping: str | None = None
    n_best: Count | None = None
    beyond_context: bool = False
    use_cache: Annotated[bool, says(flag="cache")] = True
    prefill_chunk: Count | None = None
    log_probs: bool = False
    top_log_probs: Whole = 0


def command(
    run: GenerateRun,
    prompt: Annotated[str | None, says(metavar="PROMPT")] = None,
    *,
    special: bool = False,
    json: bool = False,
) -> None:
    """Continue a prompt. The new text goes to stdout, statistics to stderr.

    prompt: the text to continue; read from standard input if missing or -
    special: treat control tokens written in the prompt as control tokens, not text
    """
    if prompt is None or prompt == "-":
        prompt = read_prompt()
    if run.log_probs and not json:
        raise ConfigError("--log-probs are printed in the JSON report only; add --json")
    lm = run.load(task="causal-lm")
    from headway.generate.loop import collect
    from headway.nn.kept import kept_as

    ids = lm.tokenizer.encode(prompt, eos=False, special=special) if lm.tokenizer else None
    early: Any = {"true": True, "false": False}.get(run.early_stopping or "", run.early_stopping)
    usual = 0.8 if run.beams is None and run.temperature is None else run.temperature
    options = run.options(early_stopping=early, temperature=usual)
    source = prompt if ids is None else ids
    live = run.beams is None and not json  # no token of a beam search is final before its end
    if live:
        deltas = []
        for delta in lm.stream(source, **options):
            deltas.append(delta)
            print(delta.text, end="", flush=True)
        result = collect(deltas, len(ids or ()))
    else:
        result = lm.generate(source, **options)
    decoding = lm.decoding(kv_cache_dtype=run.kv_cache_dtype) if run.use_cache else None
    if json:
        measured = ["seconds_to_first_token", "tokens_per_second", "seconds"]
        measured += [] if run.beams is None else ["score", "hypotheses"]
        measured += [] if run.draft is None else ["drafted", "accepted"]
        measured += ["log_probs"] if run.log_probs else []
        report = {
            **attributes(result, "prompt_tokens", "finish_reason", "text", "ids", *measured),
            "new_tokens": len(result.ids),
            "weights": kept_as(lm.model),
            "prompt": prompt,
            "decoding": decoding and {"what": decoding.what, "why": decoding.why},
        }
        if run.top_log_probs:
            report["top_log_probs"] = [[told(lm, *pair) for pair in place] for place in result.top_log_probs]
        print_json(report)
        return
    if len(result.hypotheses) > 1:
        for place, text in enumerate(result.hypotheses, 1):
            print(f"{place}. score {text.score:.4f}, {len(text.ids)} tokens ({text.finish_reason})")
            print(text.text, flush=True)
    else:
        print("" if live else result.text, flush=True)
    steps = "without a cache" if decoding is None else f"by {STEPS[decoding.what]}"
    note(f"{sentence(result)}, in {kept_as(lm.model)}, {steps}")


def told(lm: "LanguageModel", token: int, log_prob: float) -> dict[str, Any]:
    """Returns a token and its log-probability, for a report."""
    text = lm.tokenizer.decode([token], special=True) if lm.tokenizer else None
    return {"id": token, "text": text, "log_prob": log_prob}


def sentence(result: "Generation") -> str:
    """Returns counts and times of a generation, on one line."""
    parts = [f"{result.prompt_tokens} + {len(result.ids)} tokens ({result.finish_reason})"]
    if result.seconds_to_first_token is not None:
        parts.append(f"first after {result.seconds_to_first_token:.3g} s")
    if result.score is not None:
        parts.append(f"score {result.score:.4f}, {result.seconds:.3g} s")
    if result.tokens_per_second is not None:
        parts.append(f"then {result.tokens_per_second:.3g} tokens/s")
    if result.drafted:
        parts.append(f"{result.accepted} of {result.drafted} drafted tokens accepted")
    return ", ".join(parts)
