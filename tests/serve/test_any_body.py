"""Every request body is answered or refused: none makes the server fail."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.conftest import House
from tests.serve.test_guard import ask

TURN = {"role": "user", "content": "x"}
USED = {"type": "tool_use", "id": "t", "name": "find", "input": {}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {
        "input": [TURN, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}],
        "max_output_tokens": 1,
        "tools": [{"type": "web_search"}],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "instructions": "i",
        "include": [],
        "previous_response_id": None,
    },
    "/v1/messages": {
        "messages": [TURN, {"role": "assistant", "content": [USED]}, TURN],
        "max_tokens": 1,
        "system": "s",
        "stop_sequences": ["x"],
        "tools": [],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
        "output_config": {},
    },
    "/completion": {
        "prompt": "x",
        "n_predict": 1,
        "logit_bias": [[5, 1.0]],
        "stop": ["x"],
        "n_probs": 1,
        "response_fields": [],
        "seed": 1,
        "temperature": 1,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
    },
    "/infill": {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "x"}], "n_predict": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1, "echo": True, "logprobs": 1, "suffix": ""},
    "/tokenize": {"prompt": "x", "content": None, "messages": None, "with_pieces": True},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": [TURN], "chat_template_kwargs": {}},
}
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=3),
        st.sampled_from(["text", "type", "function", "x", "<|end|>", "auto", "user"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "name", "format"]), inner, max_size=3
        ),
    ),
    max_leaves=5,
)


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """Draws a value that differs from the given one at a single place, which may be deep inside."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(value)))
        return {**value, name: draw(changed(value[name]))}
    if isinstance(value, list) and value and draw(st.booleans()):
        return [draw(changed(value[0])), *value[1:]]
    return draw(values)


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_it_is_answered_or_refused(house: House, path: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(BODIES[path])))
    body = {**BODIES[path], name: data.draw(changed(BODIES[path][name]))}
    status, response = ask(house, path, body)
    assert status in (200, 400, 404), response
    assert bool(isinstance(response, dict) and response.get("error")) == (status != 200)
    assert house.used() == 0
