"""An endpoint of a server with OpenAI's chat completions protocol, over the standard library's HTTP client."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from headway.endpoints.transcript import Endpoint, Reply
from headway.errors import EndpointError
from headway.text.chat import Message

KEY, OPENAI_KEY = "HEADWAY_API_KEY", "OPENAI_API_KEY"
LONGEST_WAIT = 60.0  # maximum seconds between two tries
USUAL_TIMEOUT = 600.0  # seconds: a long reply arrives in one piece
FOR_NOW = {408, 425, 429, 500, 502, 503, 504, 529}  # temporary errors; 501, for example, is not one


class ServerEndpoint(Endpoint):
    """A model of a server, asked by POST url/chat/completions as OpenAI, vLLM, llama.cpp and others accept it.

    Args:
        url: base URL with the version, as in "https://api.openai.com/v1".
        model: one of the server's models; None takes the only one that it lists.
        timeout: seconds of silence from the server after which a try ends.
        tries: number of tries of a request that fails temporarily (`FOR_NOW`, no connection, timeout), with waits of
            1, 2, 4, ... seconds in between, or as long as the server says (Retry-After), up to `LONGEST_WAIT`.
        say: is called with a message for each failed try, and for replies without text.
        sleep: waits the given number of seconds.

    The API key is read from the environment: HEADWAY_API_KEY, or, for api.openai.com only, OPENAI_API_KEY.
    Raises EndpointError if the server refuses a request, for malformed replies, and after the last try.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        timeout: float = USUAL_TIMEOUT,
        tries: int = 6,
        say: Callable[[str], None] = lambda text: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url, self.timeout, self.tries = url.rstrip("/"), timeout, tries
        self.say, self.sleep = say, sleep
        self.model = model or self._only_model()
        self.name = f"{self.url}#{self.model}"

    def chat(self, messages: Sequence[Message], *, seed: int, temperature: float, max_tokens: int) -> Reply:
        """Returns the reply. A refusal takes the place of a missing text; without either, the text is empty."""
        body = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "seed": seed,
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        answer = self._ask("/chat/completions", body)
        try:
            choice = answer["choices"][0]
            message, reason = choice["message"], str(choice["finish_reason"])
            text = message["content"] or message.get("refusal") or ""
            if not text:
                others = [name for name, value in message.items() if value and name != "role"]
                has = f", and it has {', '.join(others)}" if others else ""
                self.say(f"{self.name}: a reply without text: its finish_reason is {reason}{has}")
            return Reply(text, reason)
        except (KeyError, IndexError, TypeError, AttributeError):
            raise EndpointError(
                f"{self.name}: the answer is not a chat completion: {json.dumps(answer)[:200]}; is the URL that of an "
                "OpenAI-compatible server, with its version (/v1)?"
            ) from None

    def stream(self, messages: Sequence[Message], **settings: Any) -> Iterator[str]:
        """Yields a reply piece by piece while it is generated; the request is not retried. `settings`: fields of the
        request. Raises EndpointError if the server refuses, and for a stream that breaks off."""
        body = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
            **settings,
            "stream": True,
        }
        try:
            with urlopen(self._request("/chat/completions", body), timeout=self.timeout) as lines:
                for line in lines:
                    field, _, data = line.partition(b":")
                    if field == b"data" and data.strip() == b"[DONE]":
                        return
                    yield self._piece(data) if field == b"data" else ""
        except HTTPError as error:
            raise EndpointError(self._refused(error.code, _message(error))) from None
        except (URLError, OSError, HTTPException) as error:
            raise EndpointError(f"{self.url}: {getattr(error, 'reason', error)}") from None
        raise EndpointError(f"{self.url}: the stream ended before [DONE]")

    def _piece(self, data: bytes) -> str:
        """Returns the text of one event of a stream. Raises EndpointError for an error or a malformed event."""
        try:
            chunk = json.loads(data)
            if "error" not in chunk:
                return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            error = chunk["error"]
            message = error["message"] if isinstance(error, dict) else error
        except (ValueError, KeyError, TypeError, AttributeError):
            message = f"not a chunk of a chat completion: {data[:200].decode(errors='replace')!r}"
        raise EndpointError(f"{self.url}: {message}")

    def _only_model(self) -> str:
        answer = self._ask("/models", None)
        try:
            names = [str(model["id"]) for model in answer["data"]]
        except (KeyError, TypeError):
            raise EndpointError(
                f"{self.url}: the server does not list its models; name one: {self.url}#MODEL "
                "(in headway chat: MODEL --url)"
            ) from None
        if len(names) != 1:
            raise EndpointError(
                f"{self.url} has {len(names)} models ({', '.join(sorted(names)[:8])}); name one: {self.url}#MODEL "
                "(in headway chat: MODEL --url)"
            )
        return names[0]

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        for attempt in range(self.tries):
            wait = min(2.0**attempt, LONGEST_WAIT)
            try:
                with urlopen(self._request(path, body), timeout=self.timeout) as response:
                    return json.load(response)
            except HTTPError as error:
                text = _message(error)
                if error.code not in FOR_NOW:
                    raise EndpointError(self._refused(error.code, text)) from None
                problem, retry_after = f"{error.code} {text}", error.headers.get("Retry-After", "")
                wait = min(float(retry_after), LONGEST_WAIT) if retry_after.isdigit() else wait
            except ValueError as error:
                raise EndpointError(f"{self.url}{path}: the answer is not JSON ({error})") from None
            except (URLError, OSError, HTTPException) as error:
                reason = getattr(error, "reason", error)
                problem = str(reason) or type(error).__name__
                if isinstance(reason, TimeoutError):
                    problem = f"no answer within {self.timeout:g} s"
            if attempt + 1 < self.tries:
                self.say(f"{self.url}: {problem}; try {attempt + 2} of {self.tries} in {wait:g} s")
                self.sleep(wait)
        raise EndpointError(
            f"{self.url}: no reply after {self.tries} tries; the last failed with: {problem}. Replies in a transcript "
            "are kept: the same command goes on from there"
        )

    def _request(self, path: str, body: dict[str, Any] | None) -> Request:
        openai_key = os.environ.get(OPENAI_KEY) if urlsplit(self.url).hostname == "api.openai.com" else None
        key = os.environ.get(KEY) or openai_key
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        return Request(self.url + path, None if body is None else json.dumps(body).encode(), headers)

    def _refused(self, code: int, text: str) -> str:
        hint = {
            401: f"; the key is read from {KEY}, and for api.openai.com from {OPENAI_KEY}",
            403: "; the API key has no permission for this",
            404: "; check the URL (it ends in /v1 for most servers) and the model",
        }
        return f"{self.url}: {code} {text}{hint.get(code, '')}"


def _message(error: HTTPError) -> str:
    """Returns the message of an error response: OpenAI's {"error": {"message": ...}}, or the body's text."""
    text = error.read().decode("utf-8", "replace").strip()
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200] or str(error.reason)
