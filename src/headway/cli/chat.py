"""`headway chat MODEL`: a conversation in the terminal, or line by line through a pipe."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from headway.cli._shared import note, read_stdin
from headway.cli.generate import SamplingRun, sentence
from headway.errors import ConfigError, DataError, HeadwayError

if TYPE_CHECKING:
    from headway.api import LanguageModel
    from headway.endpoints import ServerEndpoint
    from headway.models import ModelSpec

PLAIN = "{{ bos_token or '' }}{% for message in messages %}{{ message.content ~ '\n' }}{% endfor %}"
HELP = "/reset forgets the conversation, /quit (or Ctrl-D) ends it, Ctrl-C cuts a reply short"
FIELDS = {name: name for name in ("top_k", "top_p", "min_p", "repetition_penalty", "stop")}
FIELDS["max_new_tokens"] = "max_tokens"
"""Name of an option -> its name in requests to a server."""
Talk = list[dict[str, str]]


@dataclass(frozen=True)
class ChatRun(SamplingRun):
    """The model to chat with, and how its tokens are drawn.

    model: a model folder, a GGUF file, or an id of the Hugging Face Hub; with --url, one of the server's models
    """

    model: str = ""


def command(
    run: ChatRun,
    *,
    url: str | None = None,
    system: str | None = None,
    template: str | None = None,
    plain: bool = False,
) -> None:
    """Chat with a model. Replies go to stdout, one per input line; notes go to stderr. When the context is full, the
    oldest turns are forgotten, with a note; a model whose layers all have windows has no limit.

    url: chat with a model of this server, such as http://127.0.0.1:8080/v1; without --max-new-tokens the server
        limits the reply
    system: system message
    template: alpaca | chatml | llama2 | vicuna, or a Jinja file [default: the model's own]
    plain: use no template, for a model that was not trained to chat: the lines are one text
    """
    if url is not None:
        if plain or template is not None:
            raise ConfigError(
                "--url: the server applies its own chat template; leave out --plain and --template"
            )
        from headway.endpoints import ServerEndpoint

        talk_with(ServerEndpoint(url, run.model or None, say=note), system, asked(run))
        return
    if not run.model:
        raise ConfigError("chat: name a model, or a server by --url")
    if plain and template is not None:
        raise ConfigError("--plain uses no template; leave out one of --plain and --template")
    lm = run.load(task="causal-lm")
    if template is not None or plain:
        lm.tokenizer = lm.need_tokenizer().with_chat_template(PLAIN if plain else template)
    if lm.tokenizer is None or lm.tokenizer.chat_template is None:
        raise DataError(
            f"{run.model}: no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): this "
            "model was not trained to chat; chat all the same with --plain or --template NAME, or continue a text "
            f"with: headway generate {run.model}"
        )
    options = run.options()
    if plain:
        options["stop"] = [*options.get("stop", ()), "\n"]
    talk(lm, system, options)


def talk(lm: "LanguageModel", system: str | None, options: dict[str, Any]) -> None:
    """Chats with a local model. A turn that fails is forgotten, and the conversation continues.

    Raises ConfigError if the requested number of new tokens leaves no room for a question."""
    room = room_for_messages(lm.spec, options.get("max_new_tokens"))
    if room is None:
        options = {**options, "beyond_context": True}

    def answer(messages: Talk, seed: int) -> tuple[Talk, str | None]:
        recent = messages if room is None else latest_turns(lm, messages, room)
        return recent, _reply(lm, recent, {**options, "seed": seed}) if recent else None

    converse(answer, system, options.get("seed", 0))


def converse(answer: Callable[[Talk, int], tuple[Talk, str | None]], system: str | None, seed: int) -> None:
    """Reads lines until the end of the input or /quit. `answer` takes messages and a seed, and returns the messages
    that it kept and the reply; a reply of None forgets the turn."""
    first = [] if system is None else [{"role": "system", "content": system}]
    messages = list(first)
    tty = sys.stdin.isatty()
    if tty:
        note(HELP)
    while True:
        try:
            line = _read(tty)
        except DataError as error:
            note(f"headway: error: {error} (this line is skipped)")
            continue
        if line is None or line == "/quit":
            return
        if line == "/reset":
            messages = list(first)
            note("forgotten")
        elif line.startswith("/"):
            note(f"unknown command {line.split()[0]}: {HELP}")
        elif line.strip():
            messages.append({"role": "user", "content": line})
            seed += 2
            recent, reply = answer(messages, seed)
            if reply is None:
                messages.pop()
            else:
                messages = [*recent, {"role": "assistant", "content": reply}]


def talk_with(endpoint: "ServerEndpoint", system: str | None, settings: dict[str, Any]) -> None:
    """Chats with a model of a server, like `talk`. `settings`: fields of its requests."""
    note(f"{endpoint.name}")

    def answer(messages: Talk, seed: int) -> tuple[Talk, str | None]:
        return messages, _say(endpoint.stream(messages, **{**settings, "seed": seed}))[0]

    converse(answer, system, settings["seed"])


def asked(run: SamplingRun) -> dict[str, Any]:
    """Returns the request fields for a server. Raises ConfigError for options that only apply to local models."""
    body: dict[str, Any] = {"temperature": run.temperature, "seed": run.seed}
    for field in fields(run):
        if field.name in ("model", "threads", "backend", *body) or getattr(run, field.name) == field.default:
            continue
        if field.name not in FIELDS:
            option = f"--{field.name.replace('_', '-')}"
            raise ConfigError(f"--url: {option} is only for models that headway loads itself; leave it out")
        body[FIELDS[field.name]] = getattr(run, field.name)
    return body


def room_for_messages(spec: "ModelSpec", new_tokens: int | None) -> int | None:
    """Returns how many tokens of the context messages may take, so that `new_tokens` of a reply still fit (default: the
    usual number, at most a quarter of the context). Returns None if there is no limit: every layer has a window shorter
    than the trained context, and positions are relative.

    Raises ConfigError if no room is left."""
    from headway.generate.requests import USUAL_NEW_TOKENS

    reaches = [pattern.reach[0] for pattern in spec.patterns]
    windows = all(reach is not None and reach < spec.trained_context for reach in reaches)
    if windows and spec.positions.marks != "embeddings" and spec.context_limit is None:
        return None
    limit = spec.usual_context
    reply = min(USUAL_NEW_TOKENS, limit // 4) if new_tokens is None else new_tokens
    if reply >= limit:
        raise ConfigError(
            f"--max-new-tokens {reply} leaves no room for a question in the {limit} tokens of this model's context; "
            "lower it"
        )
    return limit - reply


def latest_turns(lm: "LanguageModel", messages: Talk, room: int) -> Talk:
    """Returns the messages without the oldest turns, such that they have at most `room` tokens; a system message is
    kept. Empty if the last message alone is too long. A note says what is left out."""
    first = [message for message in messages[:1] if message["role"] == "system"]
    turns = messages[len(first) :]
    tokenizer, forgotten = lm.need_tokenizer(), 0
    while (length := len(tokenizer.render_chat([*first, *turns]))) > room and len(turns) > 1:
        turns, forgotten = turns[2:], forgotten + 1
    if length > room:
        also = " with the system message" if first else ""
        note(
            f"headway: error: this message has {length} tokens{also}, but beside a reply only {room} fit in the "
            f"context of {lm.spec.trained_context}; shorten it (it is discarded)"
        )
        return []
    if forgotten:
        many = f"{forgotten} oldest turns are" if forgotten > 1 else "oldest turn is"
        note(f"the context of {lm.spec.trained_context} tokens is full: the {many} forgotten")
    return [*first, *turns]


def _read(tty: bool) -> str | None:
    if tty:
        print("> ", end="", file=sys.stderr, flush=True)
    line = read_stdin(sys.stdin.readline)
    return line.rstrip("\r\n") if line else None


def _reply(lm: "LanguageModel", messages: Talk, options: dict[str, Any]) -> str | None:
    from headway.generate.loop import collect

    deltas: list[Any] = []

    def pieces() -> Iterator[str]:
        for delta in lm.stream_chat(messages, **options):
            deltas.append(delta)
            yield delta.text

    text, ended = _say(pieces())
    if ended:
        note(f"[{sentence(collect(deltas, 0)).partition(' + ')[2]}]")
    return text


def _say(pieces: Iterator[str]) -> tuple[str | None, bool]:
    """Prints a reply while it arrives. Returns its text, or None if it failed, and whether it is complete."""
    text = ""
    try:
        for piece in pieces:
            text += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(flush=True)
        note("cut short")
        return text, False
    except HeadwayError as error:
        print(flush=True)
        note(f"headway: error: {error}\n(this turn is forgotten; /reset forgets all)")
        return None, False
    print(flush=True)
    return text, True
