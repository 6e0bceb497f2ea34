"""The pieces of requests that a step of the engine reads, and the choice of the next tokens.

Legend: N rows of logits, V vocab.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from headway.cache import PAGE
from headway.errors import ConfigError
from headway.generate.beams import BeamSearch, expand_beams
from headway.generate.constraints import Text, constrain
from headway.generate.requests import by_config
from headway.generate.sampling import broken_rows, no_numbers
from headway.generate.sequences import Job, SampledText, choose_tokens, log_probs_of


class Piece(NamedTuple):
    """The tokens of one sequence that a step reads, and the range of them whose logits are wanted.

    The first `told` of the wanted logits give log probabilities of the prompt."""

    job: Job
    text: Text
    ids: list[int]
    wanted: range
    told: int = 0


def piece_of(job: Job, text: Text, most: int, told: int, has_states: bool) -> Piece:
    """Returns the next chunk of a sequence's prompt: at most `most` tokens, of which `told` may give log probabilities.

    States of recurrent layers can be kept for the prefix cache at multiples of 64 only, so that chunks end there if the
    model has such layers."""
    unread = text.rest
    # the last tokens of several sequences of a request are read together
    ids = unread[: min(most, told if job.untold else most, len(unread) - (len(job.texts) > 1))]
    if has_states and text.table is not None:
        begin, end = len(text.table), len(text.table) + len(ids)
        at = (end - (end == len(text.tokens))) // PAGE * PAGE  # begin 0, end 100 of 200: the chunk ends at 64
        ids = ids[: at - begin] if at > begin else ids
    later = max(0, len(unread) - len(ids) - 1)  # tokens left to later pieces
    count = max(0, job.untold - later)
    is_last = len(ids) == len(unread)
    return Piece(job, text, ids, range(len(ids) - is_last - count, len(ids)), count)


def advance(logits: Tensor, live: Sequence[tuple[Job, range]]) -> None:
    """Chooses a token for each request, from its rows of the logits [N, V]; searches with the same config advance
    together.

    A request whose logits are not finite, or whose constraints exclude every token, ends with an error."""
    if broken := broken_rows(_rows(logits, live)):
        jobs = [text for text, rows in live for _ in rows]
        for text in {jobs[row] for row in broken}:
            text.fail(no_numbers(text.request.number, text.count))
        live = [(text, rows) for text, rows in live if text.error is None]
    searches = [(text, rows) for text, rows in live if isinstance(text, BeamSearch)]
    for group in by_config([text.request for text, _ in searches]):
        members = [searches[i] for i in group]
        expand_beams(_rows(logits, members), [text for text, _ in members])
    sampled = [(text, rows) for text, rows in live if isinstance(text, SampledText)]
    chosen = choose_tokens(_rows(logits, sampled), [text for text, _ in sampled])
    for (text, rows), token in zip(sampled, chosen, strict=True):
        if token is None:
            text.fail(ConfigError("no token is left to choose: loosen forbidden, bias or the grammar"))
            continue
        config = text.request.config
        values = logits[rows[0]][None]
        if config.drawn_log_probs:
            values = config.sampling.filter(constrain(values.float(), [text], config))
        probs = log_probs_of(values, [token], config)[0][1:] if config.log_probs else ()
        text.advance(token, time.perf_counter() - text.begun, *probs)


def _rows(logits: Tensor, live: Sequence[tuple[Job, range]]) -> Tensor:
    """Returns the rows of these requests from the logits [N, V]."""
    rows = [row for _, rows in live for row in rows]
    return logits if rows == [*range(len(logits))] else logits[rows]
