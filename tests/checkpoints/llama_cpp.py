"""llama.cpp as an oracle: its converter on our folders, and the log-probabilities of its server."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import NormalDist
from typing import IO, Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.decoder import Decoder
from headway.nn import feedforward
from tests.data import llama_cpp_path
from tests.serve.others import HOME

SERVER = HOME / "llama-server" / "llama-server"
CONVERTER = "convert_hf_to_gguf.py"
DRIVER = """
import json, logging, sys, traceback
sys.path.insert(0, sys.argv[1])
import convert_hf_to_gguf as converter
said, told = {}, []
handler = logging.Handler(logging.ERROR)
handler.emit = lambda record: told.append(record.getMessage())
logging.getLogger().addHandler(handler)
for folder, file in json.loads(sys.argv[2]):
    told.clear()
    more = ["--no-mtp"] * any(name in folder for name in ("qwen3_next", "qwen3.5"))
    sys.argv[1:] = [folder, "--outtype", "f32", "--outfile", file, *more]
    try:
        converter.main()
        said[folder] = None
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        said[folder] = f"{type(error).__name__}: {error} ({last.name}: {last.line}) {told[-1:]}"
print("SAID" + json.dumps(said))
"""


def converted(folders: Mapping[Path, Path]) -> dict[Path, str | None]:
    """Writes a float32 file for each folder with llama.cpp's own converter; returns the error of each folder, None if
    its file was written."""
    home = llama_cpp_path(CONVERTER).parent
    pairs = json.dumps([[str(folder), str(file)] for folder, file in folders.items()])
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER, home, pairs],
        capture_output=True,
        text=True,
        check=False,
    )
    report = process.stdout.rpartition("SAID")[2]
    assert report, process.stderr[-2000:]
    return {Path(folder): error for folder, error in json.loads(report).items()}


def as_gemma(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a Gemma 3n or 4 compute as llama.cpp does where transformers differs: the standard deviation of F gates
    divides by F - 1 instead of F, and GELU is looked up in a table of half precision."""

    def tabled(x: Tensor) -> Tensor:
        y = F.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x <= -10, torch.zeros_like(x), torch.where(x >= 10, x, y))

    def cut(gates: Tensor, share: float) -> Tensor:
        std, mean = torch.std_mean(gates, -1, keepdim=True)
        return (gates - mean - std * NormalDist().inv_cdf(share)).relu() if share else gates

    monkeypatch.setattr(feedforward, "_largest", cut)
    monkeypatch.setattr(feedforward, "gated", lambda gate, up, act: tabled(gate) * up)
    for block in model.model.layers:
        if block.per_layer is not None:
            block.per_layer.act = tabled


def server() -> Path:
    """Returns the path of llama.cpp's server, or skips the test with the reason if there is none."""
    path = SERVER if SERVER.exists() else shutil.which("llama-server")
    if path is None:
        pytest.skip(f"needs llama.cpp's server: {SERVER}, or llama-server in PATH")
    return Path(path)


@contextmanager
def served(
    model: Path, context: int = 256, most: int | None = None
) -> Iterator[Callable[[list[int], int], Tensor]]:
    """Serves a model and yields a function of ids and vocabulary size that returns the float32 log-probabilities of the
    next token; if `most` is given, those of the `most` likeliest tokens, and NaN for all others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [server(), "-m", model, "--port", port, "-c", context, "-np", 1, "-t", 1, "--no-warmup"]
    command += ["-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-webui", "-b", context, "-ub", context]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, env=os.environ)
        try:
            _wait(process, port, log)
            yield lambda ids, vocab: _log_probs(port, ids, vocab, most or vocab)
        finally:
            process.terminate()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None, os.pread(log.fileno(), 1 << 20, 0)[-2000:].decode(errors="replace")
        assert time.monotonic() < deadline
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(0.1)


def ask(port: int, path: str, body: Mapping[str, Any]) -> Any:
    """Posts a request and returns the server's answer."""
    request = Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(request, timeout=600) as answer:
        return json.load(answer)


def _log_probs(port: int, ids: list[int], vocab: int, most: int) -> Tensor:
    # the next token must be a whole character: the server gives no answer for a part of one
    body = {"prompt": ids, "n_predict": 1, "n_probs": most, "temperature": -1, "cache_prompt": False}
    body["logit_bias"] = [["a", 1e4]]
    (first,) = ask(port, "/completion", body)["completion_probabilities"]
    log_probs = torch.full((vocab,), torch.nan)
    for candidate in first["top_logprobs"]:
        log_probs[candidate["id"]] = candidate["logprob"]
    return log_probs
