"""Conversations as ids, with labels for the tokens that are trained.

Labels are made while the conversation is rendered, never searched in its text. Each piece of the rendering, an answer
or the text between two, is encoded on its own, as in generation: the ids before an answer are those that
`Tokenizer.render_chat` gives for the messages before it, and the last trained id is one at which generation stops.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headway.errors import DataError
from headway.text.chat import Message
from headway.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Segments:
    """A conversation.

    ids          token ids
    turns        the number (1, 2, ..) of the answer that each token is trained for; 0 if it is not trained
    answers      number of answers that the template wrote
    unmarked     number of the assistant's messages that the template did not mark as an answer
    otherwise    number of answers that begin differently from the template's generation prompt, so that generation
                 reads other ids before them (Qwen 3 writes an empty <think> block there)
    """

    ids: Sequence[int]
    turns: Sequence[int]
    answers: int = 1
    unmarked: int = 0
    otherwise: int = 0


def chat_segments(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    stop: Collection[int],
    train_on: Literal["all", "last"] = "all",
    **variables: Any,
) -> Segments:
    """Returns the segments of a conversation rendered by the tokenizer's chat template.

    Args:
        stop: ids at which generation stops. An answer is trained up to the last of them; what the template writes
            behind it (a line end) is not.
        train_on: all answers, or the last; never those of a message with `"weight": 0`.
        variables: what the template may use (tools).
    Raises DataError if the template does not identify answers (`ChatTemplate.pieces`), and for an answer that does not
    end with a stop token.
    """
    pieces = tokenizer.chat_pieces(messages, **variables)
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    answers = len(pieces) // 2
    trained = [True] * answers
    if any(messages[i].get("weight") == 0 for i in replies):
        if answers != len(replies):
            raise DataError(
                f"a message has weight 0, but the chat template marks {answers} answers for {len(replies)} assistant "
                "messages, so that they cannot be matched; use a template that marks each message"
            )
        trained = [messages[i].get("weight") != 0 for i in replies]
    if train_on == "last":
        trained = [is_trained and k == answers - 1 for k, is_trained in enumerate(trained)]
    ids: list[int] = []
    turns: list[int] = []
    number = 0
    for k, row in enumerate(tokenizer.encode_pieces(pieces)):
        end = _end(tokenizer, row, stop) if k % 2 and trained[k // 2] else 0
        number += end > 0
        turns += [number] * end + [0] * (len(row) - end)
        ids += row
    otherwise = 0
    if answers == len(replies):
        otherwise = sum(
            _prompt(tokenizer, messages[:i], variables) != pieces[: 2 * k + 1] for k, i in enumerate(replies)
        )
    return Segments(ids, turns, answers, max(0, len(replies) - answers), otherwise)


def completion_segments(
    tokenizer: Tokenizer, prompt: str, completion: str, stop: Collection[int]
) -> Segments:
    """Returns the segments of a prompt and its completion, without a template: BOS if the tokenizer begins texts with
    it, EOS at the end.

    Raises DataError for a tokenizer without EOS, or if EOS is not in `stop`."""
    answer = tokenizer.encode_pieces([tokenizer.escape(prompt), tokenizer.escape(completion)])[1]
    before, ids = tokenizer.encode(prompt, eos=False), [*answer, tokenizer.need("eos")]
    _end(tokenizer, ids, stop)
    return Segments([*before, *ids], [0] * len(before) + [1] * len(ids))


def _end(tokenizer: Tokenizer, ids: Sequence[int], stop: Collection[int]) -> int:
    """Returns the index behind the last stop token of an answer, which only white space may follow. Raises DataError
    otherwise."""
    end = max((i + 1 for i, token in enumerate(ids) if token in stop), default=0)
    remaining = ids[end:]
    if end and not tokenizer.decode(remaining, special=True).strip():
        return end
    names = ", ".join(sorted(repr(tokenizer.token(i)) for i in stop)) or "none"
    last = f"ends with {tokenizer.token(ids[-1])!r}" if ids else "is empty"
    raise DataError(
        f"an answer {last}, at which generation would not stop (stop tokens: {names}); use a template that ends "
        "answers with one of them, or set stop to the token that it writes"
    )


def _prompt(tokenizer: Tokenizer, messages: Sequence[Message], variables: dict[str, Any]) -> list[str] | None:
    """Returns the pieces that generation reads before an answer; None if there are no messages or the template refuses
    them."""
    if not messages:
        return None
    try:
        return tokenizer.chat_pieces(messages, add_generation_prompt=True, **variables)
    except DataError:
        return None
