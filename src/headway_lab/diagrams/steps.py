"""The work of decoding steps, without a KV cache and with one: counted in a decoder, drawn and printed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headway.api import LanguageModel
from headway.checkpoints.restore import as_decoder
from headway.errors import ConfigError
from headway.models import Decoder, ModelSpec, build
from headway.patterns import Causal, visible
from headway.report import table
from headway.tokens import Tokens
from headway_lab.diagrams.drawing import Drawing, wide
from headway_lab.diagrams.models import Say
from headway_lab.draw import BLUE, GREEN, GREY, ORANGE, PALE

WORDS = ("[SOS]", "Love", "that", "can")
SIDE = 18
MOST = 16
"""Largest number of tokens in a figure."""
LETTERS = 52  # pixels for a token's text beside its row


class Work(NamedTuple):
    """The work of one layer in one step: number of tokens whose queries are computed, number of tokens whose keys and
    values are computed, and number of keys that the queries are compared with."""

    queries: int
    projected: int
    keys: int


@dataclass(frozen=True)
class Step:
    """One decoding step.

    Attributes:
        reads: the tokens that are new in this step.
        again: its work without a cache, where all tokens are read again.
        kept: its work with a cache.
        writes: the likeliest next token, or None if the step writes none.
        probability: the model's probability of that token, or None.
    """

    reads: tuple[str, ...]
    again: Work
    kept: Work
    writes: str | None = None
    probability: float | None = None


def small_steps() -> tuple[Step, ...]:
    """Returns the steps of a small decoder with random weights that reads `WORDS` one by one."""
    spec = ModelSpec.of("llama", vocab=len(WORDS), width=32, layers=1, heads=4, kv_heads=2, hidden=64)
    model = as_decoder(build(spec, seed=0).eval())
    counts = [1] * len(WORDS)
    without_cache, with_cache = (
        work(model, torch.arange(len(WORDS))[None], counts, cached) for cached in (False, True)
    )
    return tuple(
        Step((word,), work_without, work_with)
        for word, work_without, work_with in zip(WORDS, without_cache, with_cache, strict=True)
    )


def steps_of(lm: LanguageModel, prompt: str, count: int) -> tuple[Step, ...]:
    """Returns the steps in which a model continues `prompt` greedily, `count` of them unless the text ends before: the
    first step reads the prompt, each other one the token that was written before.

    Raises ConfigError for a count below 1, a model without a tokenizer, and whatever `generate` and `work` refuse."""
    if count < 1:
        raise ConfigError(f"explain figures: --steps {count} must be at least 1")
    if lm.tokenizer is None:
        raise ConfigError("explain figures: --prompt needs a tokenizer, and the model has none")
    ids = lm.tokenizer.encode(prompt, eos=False)
    generation = lm.generate(ids, max_new_tokens=count, temperature=0, log_probs=True)
    new = list(generation.ids)
    row = torch.tensor([[*ids, *new[:-1]]], device=next(lm.model.parameters()).device)
    counts = [len(ids)] + [1] * (len(new) - 1)
    without_cache, with_cache = (work(lm.model, row, counts, cached) for cached in (False, True))
    words = [visible_text(lm.tokenizer.decode([token], special=True)) for token in (*ids, *new)]
    reads = [words[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]
    chances = torch.tensor(generation.log_probs).exp().tolist()
    return tuple(
        Step(tuple(tokens), *works_and_output)
        for tokens, *works_and_output in zip(
            reads, without_cache, with_cache, words[len(ids) :], chances, strict=True
        )
    )


def visible_text(text: str) -> str:
    """Returns text with spaces and line ends replaced by visible signs."""
    return text.replace(" ", "\u00b7").replace("\n", "\u23ce")


def work(model: Decoder, ids: Tensor, counts: Sequence[int], cached: bool) -> list[Work]:
    """Returns the work of a decoder's first softmax layer in steps that read `counts` more tokens of `ids` [1, T] each.

    Raises ConfigError for a model without softmax layers, or if the layer's pattern hides some tokens from later ones.
    """
    layer = next(iter(model.spec.softmax_layers), None)
    if layer is None:
        raise ConfigError(f"explain figures: {model.spec.family} has no layer with softmax attention")
    pattern, tokens = model.spec.patterns[layer], Tokens.range(ids.shape[1])
    if not torch.equal(visible(pattern, tokens, tokens), visible(Causal(), tokens, tokens)):
        raise ConfigError(
            f"explain figures: the figure needs a layer that sees all earlier tokens, but layer {layer} with pattern "
            f"{pattern} hides some of {ids.shape[1]} tokens; give fewer tokens, or see `headway show`"
        )
    projected: dict[str, int] = {}

    def count_rows(name: str, module: nn.Module, arguments: tuple[Any, ...], result: Tensor) -> None:
        projected[name] = result.numel() // result.shape[-1]

    handles = [
        module.register_forward_hook(partial(count_rows, path.rpartition(".")[-1]))
        for path, module in model.named_modules()
        if path.endswith((f"layers.{layer}.self_attn.q_proj", f"layers.{layer}.self_attn.k_proj"))
    ]
    works, cache = [], model.make_cache(1)
    try:
        with torch.inference_mode():
            for count, end in zip(counts, accumulate(counts), strict=True):
                if cached:
                    model(ids[:, end - count : end], cache=cache)
                else:
                    model(ids[:, :end])
                keys = cache.lengths[0] if cached else end
                works.append(Work(projected["q_proj"], projected["k_proj"], keys))
    finally:
        for handle in handles:
            handle.remove()
    return works


def growing_cache(say: Say, steps: Sequence[Step] | None = None) -> Drawing:
    """Draws the work of each step, without a cache and with one; by default of a small decoder that reads "[SOS] Love
    that can". Raises ConfigError for more than `MOST` tokens."""
    steps = small_steps() if steps is None else steps
    words = [word for step in steps for word in step.reads]
    count = len(words)
    if count > MOST:
        raise ConfigError(
            f"explain figures: the prompt and the steps have {count} tokens, and a figure has room for {MOST}; give a "
            "shorter --prompt, fewer --steps, or no --out"
        )
    ends = list(accumulate(len(step.reads) for step in steps))
    right = 383 + SIDE * count
    written = 90 if any(step.writes for step in steps) else 0
    drawing = Drawing(345 + right + written, 124 + SIDE * sum(ends) + 24 * len(steps))
    for left, title in ((110, "again"), (right, "kept")):
        drawing.text(left, 20, say(title), anchor="start", size=14, bold=True)
        for at, name in ((left, "q"), (left + 90, "k, v"), (left + 190, "q \u00b7 k")):
            drawing.text(at, 44, name, anchor="start", ink=GREY)
    y = 62.0
    for number, (step, end) in enumerate(zip(steps, ends, strict=True), 1):
        height = end * SIDE
        for j, word in enumerate(words[:end]):
            new = j >= end - len(step.reads)
            drawing.text(100, y + (j + 0.5) * SIDE, shortened(word), anchor="end", bold=new, size=11)
        for left, (queries, new_keys, keys) in ((110, step.again), (right, step.kept)):
            unseen = end - queries
            drawing.cells(left, y + unseen * SIDE, SIDE, [[ORANGE] * 3] * queries)
            colours = [[GREEN if key < keys - new_keys else ORANGE] * 3 for key in range(keys)]
            drawing.cells(left + 90, y, SIDE, colours)
            score_cells = [
                [BLUE if key <= query else PALE for key in range(keys)] for query in range(unseen, end)
            ]
            drawing.cells(left + 190, y + unseen * SIDE, SIDE, score_cells)
        drawing.text(12, y + height / 2, f"t = {number}", anchor="start", ink=GREY)
        if step.writes is not None:
            at = right + 190 + count * SIDE + 8
            drawing.text(
                at, y + height - SIDE / 2, f"\u2192 {shortened(step.writes)}", anchor="start", bold=True
            )
        y += height + 24
    for left, works in ((110, [step.again for step in steps]), (right, [step.kept for step in steps])):
        drawing.text(left, y + 4, sums(say, works), anchor="start", size=11)
    for at, colour, name in (
        (110, ORANGE, "new"),
        (330, GREEN, "from the cache"),
        (500, BLUE, "score"),
        (620, PALE, "hidden"),
    ):
        drawing.cells(at, y + 30, SIDE, [[colour]])
        drawing.text(at + SIDE + 8, y + 30 + SIDE / 2, say(name), anchor="start", size=11)
    return drawing


def shortened(word: str) -> str:
    """Returns a token's text, cut to `LETTERS` pixels."""
    if wide(word, 11) <= LETTERS:
        return word
    return next(cut for n in range(len(word), -1, -1) if wide(cut := word[:n] + "\u2026", 11) <= LETTERS)


def sums(say: Say, works: Sequence[Work]) -> str:
    """Returns a sentence with the number of projected tokens and of computed scores in all steps."""
    scores = sum(queries * keys for queries, _, keys in works)
    return say("sums", rows=sum(queries for queries, _, _ in works), scores=scores)


def text_of(say: Say, steps: Sequence[Step]) -> str:
    """Returns the steps as a table, and below it the sums without and with a cache."""
    head = [
        say(name) for name in ("step", "reads", "writes", "q, k, v again", "keys again", "q, k, v", "keys")
    ]
    lines = [table(head, list(cells(steps)))]
    for title, works in (("again", [step.again for step in steps]), ("kept", [step.kept for step in steps])):
        lines.append(f"{say(title)} ({sums(say, works)})")
    return "\n".join(lines)


def cells(steps: Sequence[Step]) -> Iterator[list[str]]:
    """Yields the table's rows."""
    for number, step in enumerate(steps, 1):
        writes = "-" if step.writes is None else f"{step.writes} ({step.probability:.3f})"
        (again, _, before), (kept, _, keys) = step.again, step.kept
        yield [str(number), " ".join(step.reads), writes, *map(str, (again, before, kept, keys))]
