"""Answers of blocks: whatever parts a text has, and however they arrive, the events add up to the whole answer."""

import json
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headway.generate import Delta, GenerationConfig
from headway.generate.requests import Request
from headway.generate.sequences import SampledText
from headway.serve.answers import BlockAnswer
from headway.serve.markup import Part
from headway.serve.messages import MessageAnswer
from headway.serve.responses import ResponseAnswer, Responses

words = st.text('ab é{"', max_size=4)
calls = st.builds(
    lambda name, value: [Part("call", name), *(Part("arguments", c) for c in json.dumps({"x": value}))],
    st.sampled_from(["find", "stop"]),
    words,
)
prose = st.builds(lambda kind, text: [Part(kind, text)], st.sampled_from(["text", "reasoning"]), words)
scripts = st.lists(st.one_of(prose, calls), max_size=6).map(
    lambda groups: [p for group in groups for p in group]
)


class Cut:
    """A reader that returns a script, a given number of parts at each push."""

    def __init__(self, parts: list[Part], counts: list[int]) -> None:
        self.parts, self.counts = list(parts), list(counts)

    def push(self, text: str, *, last: bool) -> list[Part]:
        count = len(self.parts) if last or not self.counts else self.counts.pop()
        pushed, self.parts = self.parts[:count], self.parts[count:]
        return pushed


def told(kind: Any, parts: list[Part], counts: list[int], reason: str) -> tuple[BlockAnswer, list[Any]]:
    """Returns an answer to scripted parts, and all its events."""
    text = SampledText(Request(0, [1, 2], GenerationConfig(), 99), None)
    answer = kind(Responses(), SimpleNamespace(name="m"), [text], [], reader=lambda: Cut(parts, counts))
    events = [*answer.begin()]
    for i in range(len(counts) + 1):
        ends = i == len(counts)
        events += answer.add(0, Delta(0, 5, "", reason if ends else None, 0.1))  # type: ignore[arg-type]
    return answer, [data for _, data in [*events, *answer.end()]]


drawn = {
    "parts": scripts,
    "counts": st.lists(st.integers(0, 3), max_size=9),
    "reason": st.sampled_from(["eos", "length"]),
}


@given(**drawn)
def test_messages(parts: list[Part], counts: list[int], reason: str) -> None:
    answer, events = told(MessageAnswer, parts, counts, reason)
    content: list[dict[str, Any]] = []
    partial_json, is_open = "", False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert (event["index"], is_open) == (len(content), False)
                content.append(dict(event["content_block"]))
                partial_json, is_open = "", True
            case "content_block_delta":
                assert (event["index"], is_open) == (len(content) - 1, True)
                delta = event["delta"]
                name = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"])
                if name is None:
                    partial_json += delta["partial_json"]
                else:
                    content[-1][name] += delta[name]
            case "content_block_stop":
                if content[-1]["type"] == "tool_use":
                    content[-1]["input"] = json.loads(partial_json)
                is_open = False
    assert not is_open
    whole = answer.whole()
    assert whole["content"] == content
    assert len(content) >= 1
    last, begun = events[-2], events[0]["message"]
    assert last["delta"]["stop_reason"] == whole["stop_reason"]
    assert whole == {**begun, "content": content, **last["delta"], "usage": last["usage"]}
    assert "".join(block.get("text", "") for block in content) == "".join(
        p.text for p in parts if p.kind == "text"
    )


@given(**drawn)
def test_responses(parts: list[Part], counts: list[int], reason: str) -> None:
    answer, events = told(ResponseAnswer, parts, counts, reason)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    items: list[dict[str, Any]] = []
    text = ""
    for event in events[2:-1]:
        assert event.get("output_index", 0) == len(items) - (event["type"] != "response.output_item.added")
        match event["type"].removeprefix("response."):
            case "output_item.added":
                text = ""
                items.append(event["item"])
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert event["item_id"] == items[-1]["id"]
                text += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == text
            case "function_call_arguments.done":
                assert (event["arguments"], event["name"]) == (text, items[-1]["name"])
            case "content_part.done":
                assert event["part"]["text"] == text
            case "output_item.done":
                assert event["item"]["id"] == items[-1]["id"]
                items[-1] = event["item"]
    final = events[-1]["response"]
    assert final["output"] == items == answer.whole()["output"]
    assert final["status"] == ("incomplete" if reason == "length" else "completed")
    assert [item["status"] for item in items[:-1]] == ["completed"] * (len(items) - 1)
    assert items[-1]["status"] == final["status"]
    assert final["usage"]["output_tokens"] == len(counts) + 1


def test_what_fails_on_the_way_is_an_event() -> None:
    answer, _ = told(MessageAnswer, [], [], "eos")
    error = {"type": "api_error", "message": "no"}
    assert answer.fail(500, "no") == [("error", {"type": "error", "error": error})]
    answer, _ = told(ResponseAnswer, [], [], "eos")
    [(name, data)] = answer.fail(500, "no")
    assert (name, data["response"]["status"]) == ("response.failed", "failed")
    assert data["response"]["error"] == {"code": "server_error", "message": "no"}
