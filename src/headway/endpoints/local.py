"""An endpoint of a folder or an id of the Hub."""

from collections.abc import Sequence

from headway.api import LanguageModel, load
from headway.endpoints.transcript import Endpoint, Reply
from headway.errors import DataError
from headway.text.chat import Message


class LocalEndpoint(Endpoint):
    """Answers with the model of a folder, through its chat template. Equal requests have equal replies.

    Raises what `headway.load` raises, and DataError for a model without a chat template."""

    def __init__(self, source: str | LanguageModel, name: str | None = None) -> None:
        self.lm = load(source, task="causal-lm") if isinstance(source, str) else source
        self.name = name or str(source)
        if self.lm.need_tokenizer().chat_template is None:
            raise DataError(f"{self.name}: its tokenizer has no chat template, so it cannot answer messages")

    def chat(self, messages: Sequence[Message], *, seed: int, temperature: float, max_tokens: int) -> Reply:
        """Returns the reply, of at most `max_tokens` tokens and at most as many as the context has room for."""
        ids = self.lm.need_tokenizer().render_chat(messages)
        room = self.lm.spec.usual_context - len(ids)
        if room < 1:
            raise DataError(
                f"{self.name}: the messages have {len(ids)} tokens, and the model's context of "
                f"{self.lm.spec.usual_context} has no room for a reply"
            )
        result = self.lm.generate(
            ids, max_new_tokens=min(max_tokens, room), temperature=temperature, seed=seed
        )
        return Reply(result.text, "length" if result.finish_reason == "length" else "stop")
