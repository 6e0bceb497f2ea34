"""`headway generate`: text on stdout, remarks on stderr, errors that say what to do."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import headway
from headway.cli import run
from headway.generate import Beams


def test_text_on_stdout_and_the_rest_on_stderr(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = headway.load(folder).generate("the cat", max_new_tokens=9, temperature=0.8, seed=3)
    assert run(["generate", folder, "the cat", "-n", "9", "--seed", "3"]) == 0
    out, err = capsys.readouterr()
    assert out == expected.text + "\n"
    assert f"{expected.prompt_tokens} + 9 tokens (length), first after" in err
    assert "tokens/s" in err


START = """
import json, sys
from headway.cli import run
code = run(["generate", sys.argv[1], "the cat", "-n", "1"])
used = sorted(sys.modules)
from headway.models import FAMILIES, ModelSpec, build
for family in FAMILIES:
    build(ModelSpec.of(family, vocab=32, width=16, layers=4, heads=2, hidden=16))
print(json.dumps([code, used, sorted(set(sys.modules) - set(used))]))
"""
UNUSED = (
    "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor", "sympy",
    "triton", "matplotlib", "transformers", "headway.train", "headway.recipes",
)  # fmt: skip


def test_a_first_token_waits_for_no_compiler(folder: str) -> None:
    """torch imports one, which takes 0.8 s, if numbers are drawn or counted on the device "meta"; models of other
    families import no more."""
    result = subprocess.run([sys.executable, "-c", START, folder], capture_output=True, text=True, check=True)
    code, used, later_imports = json.loads(result.stdout.splitlines()[-1])
    assert code == 0
    assert "headway.generate.loop" in used
    assert not {*UNUSED} & {*used}
    assert not {*UNUSED} & {*later_imports}


def test_options_reach_the_model(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    lm = headway.load(folder)
    options = {
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "temperature": 1.5,
        "seed": 1,
    }
    flags = [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", str(value))]
    generation = lm.generate("the cat", max_new_tokens=20, **options)
    stop = generation.text[5]
    assert run(["generate", folder, "the cat", "-n", "20", *flags, "--stop", stop, "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    assert report["text"] == generation.text[: generation.text.index(stop)]
    assert report["finish_reason"] == "stop"
    assert report["ids"] == generation.ids[: report["new_tokens"]]
    for extra_flags in (["--no-cache"], ["--prefill-chunk", "2"], ["--threads", "1"], ["--backend", "dense"]):
        assert run(["generate", folder, "the cat", "-n", "20", *flags, "--json", *extra_flags]) == 0
        assert json.loads(capsys.readouterr().out)["ids"] == generation.ids


def test_prompts_by_every_road(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []
    for arguments, stdin in (
        (["the cat"], ""),
        ([], "the cat\n"),
        (["-"], "the cat"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        assert run(["generate", folder, *arguments, "-n", "5"]) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["MODEL", "a", "--top-p", "2"], 1, "top_p must be more than 0 and at most 1"),
        (["MODEL", "a", "-n", "600"], 1, "was trained on 512; ask for at most 510 new tokens"),
        (["MODEL", "a", "--stop", ""], 1, "stop strings must be non-empty strings"),
        (["MODEL", "a", "--max-new-tokens", "-1"], 2, "Invalid value for '--max-new-tokens'"),
        (["MODEL", "a", "--top-q", "2"], 2, "No such option: --top-q"),
        (["/nowhere/at/all", "a"], 1, "/nowhere/at/all: no such file or folder"),
        ([], 2, "Missing argument 'MODEL'"),
    ],
)
def test_errors(
    folder: str, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    assert run(["generate", *[folder if a == "MODEL" else a for a in arguments]]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert said in " ".join(err.replace("│", " ").split())


def test_one_text_of_beams_is_printed_as_any_other(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    beams = Beams(3, length_penalty=0.5, early_stopping="never")
    expected = headway.load(folder).generate("the cat", max_new_tokens=9, beams=beams)
    flags = ["--beams", "3", "--length-penalty", "0.5", "--early-stopping", "never"]
    assert run(["generate", folder, "the cat", "-n", "9", *flags]) == 0
    out, err = capsys.readouterr()
    assert out == expected.text + "\n"
    assert f"{expected.prompt_tokens} + 9 tokens (length), score {expected.score:.4f}, " in err
    assert "tokens/s" not in err


def test_n_best_are_listed_with_their_scores(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    lm = headway.load(folder)
    beams = Beams(4, n_best=3, early_stopping=True)
    expected = lm.generate("the cat", max_new_tokens=9, beams=beams).hypotheses
    command = [
        "generate",
        folder,
        "the cat",
        *["-n", "9", "--beams", "4", "--n-best", "3", "--early-stopping", "true"],
    ]
    assert run(command) == 0
    assert capsys.readouterr().out == "".join(
        f"{i}. score {h.score:.4f}, {len(h.ids)} tokens ({h.finish_reason})\n{h.text}\n"
        for i, h in enumerate(expected, 1)
    )
    assert run([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    assert (report["text"], report["ids"]) == (expected[0].text, list(expected[0].ids))
    assert report["score"] == pytest.approx(expected[0].score)
    assert [h["text"] for h in report["hypotheses"]] == [h.text for h in expected]
    assert [len(h["log_probs"]) for h in report["hypotheses"]] == [len(h.ids) for h in expected]
    assert report["score"] == pytest.approx(sum(report["hypotheses"][0]["log_probs"]) / len(report["ids"]))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--beams", "4", "-t", "0.8"], "a beam search does not sample, but Sampling(temperature=0.8"),
        (["--beams", "4", "--top-k", "3"], "a beam search does not sample"),
        (["--beams", "4", "--seed", "3"], "seed=3 were given"),
        (["--beams", "4", "--stop", "a"], "a beam search ends texts only at eos"),
        (["--beams", "4", "--n-best", "5"], "n_best is 5, but 4 beams keep 4 texts"),
        (
            ["--beams", "4", "--early-stopping", "always"],
            "early_stopping is True, False or \"never\", got 'always'",
        ),
        (
            ["--n-best", "2"],
            "n_best needs a beam search, with beams as a number; add beams=4 (--beams 4)",
        ),
        (["--length-penalty", "0"], "length_penalty needs a beam search"),
        (["--early-stopping", "false"], "early_stopping needs a beam search"),
    ],
)
def test_beams_refuse_what_is_not_theirs(
    folder: str, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert run(["generate", folder, "a", "-n", "5", *flags]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert said in " ".join(err.replace("│", " ").split())


def test_drafts_are_counted_and_change_no_text(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", folder, "the cat", "-n", "12", "--draft"]
    expected = headway.load(folder).generate("the cat", max_new_tokens=12, temperature=0.8)
    assert run([*command, folder, "--draft-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert out == expected.text + "\n"
    assert "8 of 8 drafted tokens accepted" in err
    assert run([*command, "ngram", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ids"] == expected.ids
    assert report["accepted"] <= report["drafted"]
    for flags, message in (
        (["--draft-tokens", "3"], "draft_tokens=3 needs a draft"),
        (["--draft", "ngram", "--beams", "2"], "draft: drafts are not supported in a beam search"),
        (["--draft", "/nowhere/at/all"], "/nowhere/at/all: no such file or folder"),
    ):
        assert run(["generate", folder, "a", "-n", "3", *flags]) == 1
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.slow
def test_ctrl_c_exits_130(folder: str) -> None:
    """Interrupted while text is printed: what is printed stays, and the process says that it was interrupted."""
    command = [sys.executable, "-m", "headway", "generate", folder, "a", "-n", "500", "-t", "5", "--no-cache"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # Processes that tests start in the background ignore SIGINT unless it is reset.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            process.stdout.read(1)
        assert process.returncode == 130
        assert b"headway: interrupted" in process.stderr.read()
