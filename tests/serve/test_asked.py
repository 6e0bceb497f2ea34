"""What requests may ask beyond a text: to continue a message, how far a prompt is read, probabilities of tokens;
and what a server is configured with: names, bounds, paths that are switched off."""

import threading
import urllib.request
from math import exp
from typing import Any

import pytest

from headway.cli.serve import names
from headway.errors import ConfigError, DataError
from headway.serve.models import Models, Place
from headway.serve.served import Decoding
from headway.serve.worker import Worker
from headway.text.chat import BUILT_IN
from tests.serve.conftest import House, model_of, placed, running, serving, talker
from tests.serve.test_guard import ask
from tests.serve.test_llama import lines

USER, BEGUN = {"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"}


def test_an_answer_without_a_limit_ends_where_the_model_ends_it() -> None:
    """Otherwise it ends with the context, or with what memory has room for."""
    with serving() as house:
        lm, engine = model_of(house), house.models.places["small"].model.engine  # type: ignore[union-attr]
        never = {f"{token}": -100 for token in lm.eos}
        body = {"messages": [USER], "logit_bias": never, "seed": 1}
        answer = ask(house, "/v1/chat/completions", body)[1]
        assert answer["usage"]["total_tokens"] == 512 == lm.spec.trained_context
        pool = engine.reader.cache.pool
        pool.budget = pool.most(130, engine.step_tokens)
        answer = ask(house, "/v1/chat/completions", body)[1]
        total = answer["usage"]["total_tokens"]
        assert pool.most(total, engine.step_tokens) <= pool.budget < pool.most(total + 1, engine.step_tokens)
        status, response = ask(
            house, "/v1/chat/completions", {**body, "messages": [{**USER, "content": "x" * 300}]}
        )
        assert (status, "has up to" in response["error"]["message"]) == (400, True), "and none is refused"


@pytest.mark.parametrize("template", BUILT_IN)
def test_a_message_that_goes_on_ends_with_its_text(template: str) -> None:
    tokenizer = talker().need_tokenizer().with_chat_template(template)
    messages = [USER, BEGUN]
    open_ids = tokenizer.render_chat(messages, continue_final_message=True)
    ended_ids = tokenizer.render_chat(messages, add_generation_prompt=False)
    text = tokenizer.decode(open_ids, special=True)
    assert text.endswith("sat on")
    assert tokenizer.decode(ended_ids, special=True).startswith(text)
    assert len(open_ids) < len(ended_ids)
    with pytest.raises(DataError, match="leave one out"):
        tokenizer.render_chat(messages, continue_final_message=True, add_generation_prompt=True)


def test_the_last_message_of_an_assistant_goes_on(house: House) -> None:
    lm = model_of(house)
    ids = lm.need_tokenizer().render_chat([USER, BEGUN], continue_final_message=True)
    body = {"max_tokens": 7, "temperature": 0, "messages": [USER, BEGUN], "verbose": True}
    for extra in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        answer = ask(house, "/v1/chat/completions", {**body, **extra})[1]
        assert answer["choices"][0]["message"]["content"] == lm.generate(ids, max_new_tokens=7).text
        assert answer["__verbose"] == {"prompt": lm.need_tokenizer().decode(ids, special=True)}
    with_new_turn = lm.need_tokenizer().render_chat([USER, BEGUN])
    answer = ask(house, "/v1/chat/completions", {**body, "continue_final_message": False})[1]
    assert answer["__verbose"] == {"prompt": lm.need_tokenizer().decode(with_new_turn, special=True)}
    message = ask(
        house, "/v1/messages", {key: body[key] for key in ("max_tokens", "temperature", "messages")}
    )[1]
    assert message["content"][0]["text"] == lm.generate(ids, max_new_tokens=7).text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "leave one out"),
        ({"messages": [USER, BEGUN, BEGUN]}, "the last two are the assistant's"),
        ({"return_progress": True}, "return_progress: allowed only if stream is true"),
        ({"timings_per_token": True}, "timings_per_token: allowed only if stream is true"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "only parts of type text are supported, got {'type': 'image_url'}",
        ),
    ],
)
def test_what_does_not_go_together_is_said(house: House, more: dict[str, Any], words: str) -> None:
    status, response = ask(
        house, "/v1/chat/completions", {"messages": [USER, BEGUN], "max_tokens": 1, **more}
    )
    assert (status, words in response["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/completion", {"prompt": "x" * 150, "n_predict": 3}),
        ("/v1/completions", {"prompt": "x" * 150, "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": [{**USER, "content": "x" * 150}], "max_tokens": 3}),
        ("/v1/responses", {"input": "x" * 150, "max_output_tokens": 3}),
        ("/v1/messages", {"messages": [{**USER, "content": "x" * 150}], "max_tokens": 3}),
    ],
)
def test_how_far_a_prompt_is_read_is_told(path: str, asked: dict[str, Any]) -> None:
    with serving() as house:
        model = house.models.places["small"].model
        assert isinstance(model, Decoding)
        model.engine.step_tokens = 50
        asked |= {"return_progress": True, "timings_per_token": True}
        for repeated in (False, True):
            events = lines(house, path, asked)
            progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
            total = progress[0]["total"]
            stored = total // 64 * 64 if repeated else 0
            assert [event["processed"] for event in progress] == [
                stored,
                *range(stored + 50, total, 50),
                total,
            ]
            assert {event["cache"] for event in progress} == {stored}
            times = [event["timings"] for event in events if "timings" in event]
            assert (times[0]["prompt_n"], times[0]["prompt_ms"], times[0]["predicted_n"]) == (0, 0.0, 0)
            assert [time["prompt_n"] for time in times[: len(progress)]] == [
                event["processed"] - stored for event in progress
            ]
            assert times[-1]["predicted_n"] == 3


def test_probabilities_that_tokens_are_drawn_with(house: House) -> None:
    body = {"prompt": "the", "n_predict": 5, "seed": 3, "n_probs": 4, "top_k": 3, "temperature": 0.5}
    plain = ask(house, "/completion", body)[1]
    drawn = ask(house, "/completion", {**body, "post_sampling_probs": True})[1]
    assert drawn["content"] == plain["content"]
    pairs = zip(drawn["completion_probabilities"], plain["completion_probabilities"], strict=True)
    for row, plain_row in pairs:
        ids = [candidate["id"] for candidate in row["top_probs"]]
        assert ids == [candidate["id"] for candidate in plain_row["top_logprobs"]][: len(ids)]
        assert 0 < len(ids) <= 3
        assert sum(candidate["prob"] for candidate in row["top_probs"]) == pytest.approx(1)
        first_log_prob, *log_probs = [candidate["logprob"] for candidate in plain_row["top_logprobs"]][
            : len(ids)
        ]
        for candidate, log_prob in zip(row["top_probs"][1:], log_probs, strict=True):
            ratio = row["top_probs"][0]["prob"] / candidate["prob"]
            assert ratio == pytest.approx(exp((first_log_prob - log_prob) / 0.5), rel=1e-3)
        assert row["prob"] in [candidate["prob"] for candidate in row["top_probs"]]


def test_instances_are_answered_as_elsewhere(house: House) -> None:
    chat = {"messages": [USER], "max_tokens": 4, "temperature": 0}
    answers = ask(house, "/v1/predict", {"instances": [
        {"@requestFormat": "chatCompletions", **chat},
        {"@requestFormat": "completions", "prompt": "the", "max_tokens": 4, "temperature": 0, "stream": True},
    ]})[1]["predictions"]  # fmt: skip
    assert answers[0]["choices"] == ask(house, "/v1/chat/completions", chat)[1]["choices"]  # type: ignore[index]
    assert answers[1]["choices"][0]["text"] == model_of(house).generate("the", max_new_tokens=4).text  # type: ignore[index]
    status, response = ask(house, "/v1/predict", {"instances": [{"@requestFormat": "slots"}]})
    assert (status, "requestFormat" in response["error"]["message"]) == (400, True)


def test_paths_are_switched_off() -> None:
    with serving(off=["/metrics", "/slots", "/"]) as house:
        assert [ask(house, path, method="GET")[0] for path in ("/metrics", "/slots", "/health")] == [
            501,
            501,
            200,
        ]
        assert ask(house, "/", method="GET")[0] == 404


def test_a_model_has_several_names_and_sleeps() -> None:
    worker = Worker(slots=2)

    def made() -> Decoding:
        return Decoding("one", talker(), worker, keep=1 << 24)

    models = Models([Place("one", made, aliases=["one", "two"], tags=["chat"], source="one.gguf")], ttl=600)
    with running(models, worker) as house:
        asleep = ask(house, "/props", method="GET")[1]
        assert (asleep["is_sleeping"], asleep["model_path"], asleep["total_slots"]) == (True, "one.gguf", 2)
        body = {"prompt": "a", "max_tokens": 1}
        assert {ask(house, "/v1/completions", {**body, "model": name})[0] for name in ("one", "two")} == {200}
        awake = ask(house, "/props?model=two", method="GET")[1]
        assert (awake["is_sleeping"], awake["model_alias"]) == (False, "one")
        [entry] = ask(house, "/v1/models", method="GET")[1]["data"]
        assert (entry["id"], entry["aliases"], entry["tags"]) == ("one", ["one", "two"], ["chat"])
        assert [slot["is_processing"] for slot in ask(house, "/slots", method="GET")[1]] == [False, False]
    with pytest.raises(ConfigError, match="the model name 'two' is taken"):
        models.add_adapter("two", models.place("one"), "adapter")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("runs/llama-3.1/", "llama-3.1"),
        ("files/llama-3.1-q4.gguf", "llama-3.1-q4"),
        ("stories260K.bin", "stories260K"),
        (".", "."),
    ],
)
def test_a_model_without_an_alias_is_named_by_the_last_part_of_its_path(model: str, name: str) -> None:
    assert names([model], []) == [([name], model)]


def test_so_many_are_written_at_once_and_the_others_wait() -> None:
    worker = Worker(slots=2)
    model = Decoding("small", talker(), worker, keep=1 << 24)
    counts: list[int] = []
    with running(Models(placed(model)), worker) as house:
        engine, step = model.engine, model.engine.step

        def counted() -> None:
            counts.append(len(engine.running) + len(engine.waiting))
            step()

        engine.step = counted  # type: ignore[method-assign]
        body = {"prompt": "the cat", "max_tokens": 20, "temperature": 0}
        texts: list[str] = []

        def ask_one() -> None:
            texts.append(ask(house, "/v1/completions", body)[1]["choices"][0]["text"])

        threads = [threading.Thread(target=ask_one) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(texts) == 6
        assert len({*texts}) == 1
        assert max(counts) == 2
        assert not worker.waiting


def test_llamas_metrics_are_sums_of_all_models() -> None:
    def numbers(house: House) -> dict[str, float]:
        with urllib.request.urlopen(f"{house.url}/metrics") as response:
            assert float(response.headers["process-start-time-unix"]) > 1e9
            rows = [row for row in response.read().decode().splitlines() if row.startswith("llamacpp:")]
        return {name.removeprefix("llamacpp:"): float(value) for name, value in map(str.split, rows)}

    with serving("a", "b") as house:
        used = {"prompt_tokens": 0, "completion_tokens": 0}
        for name in "aab":
            body = {"model": name, "prompt": "x" * 100, "max_tokens": 5}
            usage = ask(house, "/v1/completions", body)[1]["usage"]
            used = {key: used[key] + usage[key] for key in used}
        totals = numbers(house)
        assert totals["prompt_tokens_total"] + totals["prompt_tokens_cached_total"] == used["prompt_tokens"]
        assert totals["prompt_tokens_cached_total"] == 64
        assert totals["tokens_predicted_total"] == used["completion_tokens"]
        assert totals["n_tokens_max"] == used["prompt_tokens"] / 3 + 5
        assert totals["predicted_tokens_seconds"] > 0
        assert numbers(house)["predicted_tokens_seconds"] == 0
