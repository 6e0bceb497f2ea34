"""Who sends requests: API keys with limits of their own, and the record of a request from start to end."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

from headway.errors import ConfigError, as_error
from headway.generate.sequences import SampledText
from headway.serve.errors import Busy

LOG = logging.getLogger(__name__)
MINUTE = 60.0


@dataclass(eq=False)
class Key:
    """An API key and its limits.

    name: its name in logs, which never have the secret.   requests: maximum number at once.
    tokens: maximum number per minute, read and generated.   admin: whether it may change the server's models.
    live: number of its requests that are being answered.
    """

    secret: str
    name: str = ""
    requests: int | None = None
    tokens: int | None = None
    admin: bool = False
    live: int = 0
    _used: float = 0.0  # tokens in the leaky bucket, which drains at `tokens` per minute
    _at: float = field(default_factory=time.monotonic)

    @property
    def salt(self) -> str:
        """The salt that separates its entries of the prefix cache from those of other keys."""
        return blake2b(self.secret.encode(), digest_size=16).hexdigest() if self.secret else ""

    @contextmanager
    def asking(self) -> Iterator[None]:
        """While open, a request with this key is being answered. Raises Busy if a limit is reached."""
        if self.requests is not None and self.live >= self.requests:
            raise Busy(f"this key has {self.live} running requests, its limit; retry later")
        self.spend(0)
        if self.tokens is not None and self._used >= self.tokens:
            wait = int((self._used - self.tokens) * MINUTE / self.tokens) + 1
            raise Busy(
                f"this key has used its {self.tokens} tokens per minute; retry in {wait} s", again=wait
            )
        self.live += 1
        try:
            yield
        finally:
            self.live -= 1

    def spend(self, tokens: int) -> None:
        """Counts tokens that were read and generated for this key."""
        now = time.monotonic()
        drained = (now - self._at) * (self.tokens or 0) / MINUTE
        self._used, self._at = max(0.0, self._used - drained) + tokens, now


def read_keys(path: Path) -> list[Key]:
    """Reads the keys of a file, one per line: SECRET [name=NAME] [requests=N] [tokens=N] [admin]; # begins a comment.
    Raises ConfigError if there is no key, or for an invalid setting."""
    keys: list[Key] = []
    with as_error(ConfigError, f"--keys {path}", UnicodeDecodeError):
        lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        secret, *settings = line.partition("#")[0].split() or [""]
        options = dict(setting.partition("=")[::2] for setting in settings)
        wrong = options.keys() - {"name", "requests", "tokens", "admin"}
        counts = {name: options[name] for name in ("requests", "tokens") if name in options}
        if wrong or not all(value.isdecimal() and int(value) for value in counts.values()):
            raise ConfigError(
                f"{path}:{number}: write SECRET [name=NAME] [requests=N] [tokens=N] [admin], N at least 1"
            )
        if secret:
            numbers = {name: int(value) for name, value in counts.items()}
            keys.append(Key(secret, options.get("name", f"{number}"), admin="admin" in options, **numbers))
    if not keys:
        raise ConfigError(f"--keys {path}: the file has no key; write one per line")
    return keys


ANYBODY = Key("", "anybody")
"""The key of requests to a server that needs none."""


@dataclass(eq=False)
class Visit:
    """A request: its key and its results.

    id: its id in responses and logs.   route: the path pattern.   status: status of the response; 0 before it begins.
    texts: generated sequences, with the name of their model.   read: tokens that encoders and translators read for it.
    after: closed at the end.
    """

    method: str
    id: str = field(default_factory=lambda: uuid4().hex)
    route: str = "unknown"
    key: Key = ANYBODY
    status: int = 0
    begun: float = field(default_factory=time.perf_counter)
    texts: list[tuple[str, Sequence[SampledText]]] = field(default_factory=list)
    read: int = 0
    after: ExitStack = field(default_factory=ExitStack)

    def end(self) -> None:
        """Ends the request: charges its tokens to the key and logs a line, neither of which has any text."""
        self.after.close()
        read = self.read + sum(tokens for _, texts in self.texts for tokens, _ in prompts_of(texts))
        new = sum(text.count for _, texts in self.texts for text in texts)
        self.key.spend(read + new)
        record = {
            "id": self.id,
            "key": self.key.name,
            "route": f"{self.method} {self.route}",
            "status": self.status,
            "seconds": round(time.perf_counter() - self.begun, 6),
            "models": [name for name, _ in self.texts],
            "prompt_tokens": read,
            "new_tokens": new,
        }
        LOG.info("request", extra={"told": record})


def prompts_of(texts: Sequence[SampledText]) -> list[tuple[int, int]]:
    """Returns for each distinct prompt its number of tokens, and how many of them came from the prefix cache."""
    first = {id(text.request.prompt): text for text in reversed(texts)}
    return [(text.request.prompt_tokens, text.stored) for text in first.values()]


VISIT: ContextVar[Visit | None] = ContextVar("visit", default=None)
"""The request that is being answered in this context."""


def own_salt() -> str:
    """Returns the salt of the current request's key, which keeps its prefix cache apart from others."""
    visit = VISIT.get()
    return "" if visit is None else visit.key.salt
