"""Keys and their limits: who may send requests, how many, and what only an admin may do."""

import json
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.serve import visits
from headway.serve.visits import Key, read_keys
from tests.serve.conftest import House, serving, settles
from tests.serve.encoders import encoder, serving_encoders, words
from tests.serve.operation import answer, asking, held, house_gate


def test_a_key_has_so_many_requests_at_once() -> None:
    keys = [Key("few", requests=1), Key("many")]
    with serving(keys=keys) as house:
        with held(house), asking(house, X_Api_Key="few") as first:
            status, headers, body = answer(house, X_Api_Key="few")
            assert (status, headers["Retry-After"]) == (429, "1")
            assert json.loads(body)["error"]["type"] == "rate_limit_error"
            with asking(house, X_Api_Key="many") as other:
                house_gate(house)
        assert first[0][0] == other[0][0] == 200
        assert answer(house, X_Api_Key="few")[0] == 200
        assert keys[0].live == keys[1].live == 0


def test_a_key_has_so_many_tokens_in_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(visits.time, "monotonic", lambda: clock[0])
    key = Key("k", tokens=60, _at=1000.0)
    with key.asking():
        pass
    key.spend(90)
    with pytest.raises(visits.Busy) as caught, key.asking():
        pass
    assert caught.value.again == 31
    clock[0] += 31
    with key.asking():
        pass
    key.spend(30)
    clock[0] += 3600
    key.spend(0)
    assert key._used == 0  # unused tokens are not saved up


def test_tokens_that_were_read_and_written_are_paid_for() -> None:
    key = Key("k", tokens=20)
    with serving(keys=[key]) as house:
        assert answer(house, body={"prompt": [5] * 15, "max_tokens": 9, "n": 2}, X_Api_Key="k")[0] == 200
        settles(lambda: key._used > 30)
        status, headers, _ = answer(house, X_Api_Key="k")
        assert status == 429
        assert int(headers["Retry-After"]) > 20


def test_what_encoders_read_is_paid_for(tmp_path: Path) -> None:
    key, model = Key("k"), encoder("embedder", words(tmp_path))
    with serving_encoders({"embedder": model}, keys=[key]) as house:
        status, _, body = answer(house, "/v1/embeddings", body={"input": "the cat sat"}, X_Api_Key="k")
        assert status == 200
        settles(lambda: key._used == json.loads(body)["usage"]["prompt_tokens"] > 0)
        place = house.models.places["embedder"]
        assert place.size == sum(p.nbytes for p in model.model.parameters())


def test_no_key_can_tell_what_another_asked() -> None:
    body = {"prompt": [9] * 200, "max_tokens": 1}
    with serving(keys=[Key("a"), Key("b")]) as house:
        cached = []
        for key in ("a", "a", "b", "b"):
            response = json.loads(answer(house, body=body, X_Api_Key=key)[2])
            cached.append(response["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 192, 0, 192]


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\none name=me requests=2 tokens=100  # a remark\ntwo admin\n")
    one, two = read_keys(path)
    assert (one.secret, one.name, one.requests, one.tokens, one.admin) == ("one", "me", 2, 100, False)
    assert (two.secret, two.requests, two.tokens, two.admin) == ("two", None, None, True)
    for text in ("", "# none\n", "one reqests=2", "one requests=many", "one tokens=0", "one two", "\xff"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match="keys"):
            read_keys(path)


def test_admin_verbs_need_an_admin(house: House) -> None:
    adapter = {"lora_name": "x", "lora_path": "/nowhere"}
    verbs = "load_lora_adapter", "unload_lora_adapter"
    for path in (f"/v1/{verb}" for verb in verbs):
        assert answer(house, path.removeprefix("/v1"), body=adapter)[0] in (403, 404)
        body = adapter if path.endswith("/load_lora_adapter") else {"lora_name": "x"}
        assert answer(house, path, body=body)[0] == 403
        with serving(keys=[Key("user"), Key("boss", admin=True)]) as keyed:
            assert answer(keyed, path, body=body)[0] == 401
            assert answer(keyed, path, body=body, X_Api_Key="user")[0] == 403
            assert answer(keyed, path, body=body, X_Api_Key="boss")[0] in (404, 503)
