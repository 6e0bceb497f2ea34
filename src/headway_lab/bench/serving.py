"""The rows of `headway bench serve`: `headway serve` compared with llama-server, which serves the same GGUF file, and
with `transformers serve`, which serves the same weights in bfloat16.

Each server is a process; they take turns, and one client program sends all requests, in a process of its own. A row
of clients measures throughput: that many concurrent clients, each sending one request after the other. A row of load
measures latency: requests come at random times at 80 % of the best rate that this server reached, however slow it is
then. A row of sessions measures the prefix cache: each request repeats everything that was said before.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import numpy
import torch

from headway_lab.bench.attention import Say
from headway_lab.bench.client import Ask, Load, loaded
from headway_lab.bench.inputs import OURS, UnsupportedCase
from headway_lab.bench.models import WORDS, Written, written_models
from headway_lab.bench.rows import Row, machine

LLAMA_SERVER = "llama-server"
SHARE = 0.8
"""The request rate of a row of load, as a share of the best rate that the server reached."""
LOADED = 24
"""Number of requests in a turn of a row of load."""
START = 120.0
"""Seconds in which a server must start."""
Command = Callable[[Path, int, int, int], list[str]]
"""(file, port, clients, tokens of context) -> the command line of a server."""
TRANSFORMERS = "transformers serve"


class Side(NamedTuple):
    """A server: its command, its model file for some weights, and the conversion of requests to its form."""

    command: Command
    file: Callable[[Written, str], Path] = Written.served
    ask: Callable[[Ask], Ask] = lambda ask: ask


@dataclass(frozen=True)
class Effort:
    """The turns of a row (`rounds`), requests of `each` client in a turn, largest number of prompt tokens, new tokens;
    goodput counts requests with at most `first` s to the first token and a median of `gap` s between tokens."""

    rounds: int = 5
    each: int = 2
    prompt: int = 128
    new: int = 32
    first: float = 2.0
    gap: float = 0.2


def ours(file: Path, port: int, clients: int, context: int) -> list[str]:
    """Returns the command of `headway serve`."""
    threads = torch.get_num_threads()
    return [
        sys.executable,
        "-m",
        "headway",
        "serve",
        f"{file}",
        "--port",
        f"{port}",
        "--threads",
        f"{threads}",
    ]


def llama_server(binary: str) -> Command:
    """Returns the command of llama.cpp's server: with a slot for each client, otherwise its defaults."""

    def command(file: Path, port: int, clients: int, context: int) -> list[str]:
        shape = ["-np", clients, "-c", clients * context, "-t", torch.get_num_threads()]
        return [binary, "-m", f"{file}", "--port", f"{port}", *map(str, shape)]

    return command


def transformers_serve(file: Path, port: int, clients: int, context: int) -> list[str]:
    """Returns the command of `transformers serve`, with its defaults, from the environment of this interpreter."""
    program = f"{Path(sys.executable).with_name('transformers')}"
    return [program, "serve", f"{file}", "--port", f"{port}", "--device", "cpu", "--dtype", "bfloat16"]


def _in_words(ask: Ask) -> Ask:
    """Returns the request with its prompt as text, the only form that `transformers serve` takes."""
    words = " ".join(f"w{i - WORDS}" for i in ask.body["prompt"])
    return Ask({**ask.body, "prompt": words}, ask.at)


def sides(llama: str) -> dict[str, Side]:
    """Returns the servers by name; `llama` is the path of llama.cpp's server program."""
    return {
        OURS: Side(ours),
        LLAMA_SERVER: Side(llama_server(llama)),
        TRANSFORMERS: Side(transformers_serve, Written.in_words, _in_words),
    }


@contextmanager
def served(command: Command, file: Path, clients: int, context: int) -> Iterator[int]:
    """Starts a server and yields its port when it answers. Raises UnsupportedCase if it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = command(file, port, clients, context)
    try:
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise UnsupportedCase(f"{arguments[0]} cannot be run: {error}") from error
    try:
        deadline = time.monotonic() + START
        while not _is_there(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise UnsupportedCase(f"{' '.join(arguments)} did not start")
            time.sleep(0.2)
        yield port
    finally:
        process.kill()
        process.wait()


def _is_there(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
    except OSError:
        return False
    return True


def asked(port: int, asks: Sequence[Ask], most: int) -> Load:
    """Returns the load of a plan, run by a client process. Raises UnsupportedCase if a request was not answered."""
    plan = json.dumps({"port": port, "asks": [asdict(ask) for ask in asks], "most": most})
    program = [sys.executable, "-m", "headway_lab.bench.client"]
    process = subprocess.run(program, input=plan, capture_output=True, text=True)
    if process.returncode:
        raise UnsupportedCase(process.stderr.strip().rpartition("\n")[2])
    return loaded(process.stdout)


def body(prompt: Sequence[int], new: int) -> dict[str, Any]:
    """Returns the body of a greedy request for exactly `new` tokens: all special tokens are suppressed."""
    suppressed = {str(token): -100 for token in range(3)}
    return {"prompt": [*prompt], "max_tokens": new, "temperature": 0, "logit_bias": suppressed}


# -- plans --------------------------------------------------------------------------------------------------------


def drawn(vocab: int, count: int, effort: Effort, seed: int) -> list[Ask]:
    """Returns requests of random lengths with independent random prompts."""
    random = Random(seed)
    sizes = [random.randint(effort.prompt // 8, effort.prompt) for _ in range(count)]
    return [Ask(body([random.randrange(WORDS, vocab) for _ in range(size)], effort.new)) for size in sizes]


def arriving(asks: Sequence[Ask], rate: float, seed: int) -> list[Ask]:
    """Returns the same requests at random times, `rate` per second on average."""
    random, time_sent, arrivals = Random(seed), 0.0, []
    for ask in asks:
        time_sent += random.expovariate(rate)
        arrivals.append(Ask(ask.body, time_sent))
    return arrivals


def sessions(vocab: int, count: int, turns: int, effort: Effort, seed: int) -> tuple[list[Ask], int]:
    """Returns the requests of several sessions in turn, each of which repeats its whole text so far and adds more; and
    the number of repeated tokens."""
    random, texts, asks, repeated = Random(seed), [list[int]() for _ in range(count)], [], 0
    for _ in range(turns):
        for words in texts:
            repeated += len(words)
            words += [random.randrange(WORDS, vocab) for _ in range(effort.prompt)]
            asks.append(Ask(body(words, 4)))
    return asks, repeated


# -- rows ---------------------------------------------------------------------------------------------------------


def serve(
    models: Sequence[str],
    weights: Sequence[str],
    clients: Sequence[int],
    binary: str,
    peers: Sequence[str] = (LLAMA_SERVER,),
    *,
    effort: Effort,
    say: Say,
) -> Iterator[Row]:
    """Yields rows: each of these models with each of these weights, by number of clients; then load, and sessions."""
    for written, kind in written_models(models, weights):
        servers = {name: sides(binary)[name] for name in (OURS, *peers)}
        common, best = (written, kind, servers, effort), dict.fromkeys(servers, 0.0)
        for count in clients:
            say(f"serve {written.name} {kind} clients={count}")
            plans = [
                (drawn(written.spec.vocab, count * effort.each, effort, seed), count)
                for seed in range(effort.rounds)
            ]
            row = _row(*common, f"clients={count}", dict.fromkeys(servers, plans), count)
            for name, figures in row.extra.get("figures", {}).items():
                best[name] = max(best[name], figures["tokens_per_second"])
            yield row
        if not best[OURS]:  # headway's server did not answer: the rows say why
            continue
        say(f"serve {written.name} {kind} load")
        loads = [drawn(written.spec.vocab, LOADED, effort, 100 + seed) for seed in range(effort.rounds)]
        arrivals = {
            name: [
                (arriving(asks, SHARE * rate / effort.new, seed), LOADED) for seed, asks in enumerate(loads)
            ]
            for name, rate in ((name, rate or best[OURS]) for name, rate in best.items())
        }
        yield _row(*common, f"load={SHARE:.0%}", arrivals, max(clients))
        asks, again = sessions(written.spec.vocab, 4, 4, effort, 7)
        yield _row(*common, "sessions=4", {name: [(asks, 1)] for name in servers}, 4, again)


def _row(
    written: Written,
    kind: str,
    sides: Mapping[str, Side],
    effort: Effort,
    what: str,
    plans: Mapping[str, Sequence[tuple[Sequence[Ask], int]]],
    slots: int,
    again: int = 0,
) -> Row:
    """Measures a row: every side answers each of its plans, in turns, each of which begins with the next side."""
    case, notes = f"{written.name} {kind} {what}", list[str]()
    context = 1024
    loads: dict[str, list[Load]] = {}
    with ExitStack() as open_until:
        ports = {}
        for name in plans:
            side = sides[name]
            try:
                file = side.file(written, kind)
                ports[name] = open_until.enter_context(served(side.command, file, slots, context))
                asked(ports[name], [*map(side.ask, drawn(written.spec.vocab, 2, effort, 999))], 2)
            except UnsupportedCase as error:
                notes.append(f"{name}: {error}")
                ports.pop(name, None)
        order = [*ports]
        for turn in range(min((len(plans[name]) for name in order), default=0)):
            for name in (*order[turn % len(order) :], *order[: turn % len(order)]):
                plan, most = plans[name][turn]
                load = asked(ports[name], [*map(sides[name].ask, plan)], most)
                loads.setdefault(name, []).append(load)
    if OURS not in loads:
        return Row("serve", case, "bfloat16", machine=machine("serve", notes))
    seconds = {name: median(load.seconds for load in side_loads) for name, side_loads in loads.items()}
    figures = {name: _figures(side_loads, effort, again) for name, side_loads in loads.items()}
    ratios = {
        name: median(our.rate / peer.rate for our, peer in zip(loads[OURS], side_loads, strict=True))
        for name, side_loads in loads.items()
        if name != OURS
    }
    tokens = sum(record.new for record in loads[OURS][0].told)
    return Row(
        "serve",
        case,
        "bfloat16",
        ours_ms=1e3 * seconds[OURS] / tokens,
        peers={name: 1e3 * side_seconds / tokens for name, side_seconds in seconds.items() if name != OURS},
        ratios=ratios,
        machine=machine("serve", notes),
        extra={"tokens_per_second": figures[OURS]["tokens_per_second"], "figures": figures},
    )


def _figures(loads: Sequence[Load], effort: Effort, again: int) -> dict[str, float]:
    """Returns the figures of a side. Gaps between tokens are pooled over all turns."""
    records = [r for load in loads for r in load.told]
    gaps = [gap for r in records for gap in r.gaps] or [0.0]
    good = sum(r.first <= effort.first and median(r.gaps or [0.0]) <= effort.gap for r in records)
    figures = {
        "tokens_per_second": median(load.rate for load in loads),
        "first_ms": 1e3 * median(r.first for r in records),
        "first_p99_ms": 1e3 * float(numpy.quantile([r.first for r in records], 0.99)),
        "gap_ms": 1e3 * median(gaps),
        "gap_p99_ms": 1e3 * float(numpy.quantile(gaps, 0.99)),
        "goodput": good / sum(load.seconds for load in loads),
        "client_cpu": sum(load.cpu for load in loads) / sum(load.seconds for load in loads),
    }
    return {**figures, "prefix_hits": sum(r.cached for r in records) / again} if again else figures
