"""Errors that users can cause. Each message says what was requested, what was given, and what to do."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path


class HeadwayError(ValueError):
    """Base class of all errors that are meant for users."""


class PatternError(HeadwayError):
    """An impossible pattern, token description or score."""


class BackendError(HeadwayError):
    """A request that a kernel cannot fulfil."""


class BuildError(HeadwayError):
    """A failed compilation of the native kernels."""


class CacheError(HeadwayError):
    """A request to store, or to discard, what a cache cannot."""


class ConfigError(HeadwayError):
    """A configuration with an unknown key, or values that contradict each other."""


class CheckpointError(HeadwayError):
    """A checkpoint that is broken, incomplete, unsafe or inconsistent with its config."""


class DataError(HeadwayError):
    """Text or token files that are not in the format they claim."""


class HubError(HeadwayError):
    """A file or model that the Hugging Face Hub does not provide or does not accept."""


class EndpointError(HeadwayError):
    """A server that refuses, does not answer, or returns an unexpected response."""


class RankError(HeadwayError):
    """Another process of a distributed run that died, stopped or hangs."""


@contextmanager
def as_error(error: type[HeadwayError], what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Re-raises exceptions of `kinds` (HeadwayError unless given) from the body as `error`, its message prefixed by
    `what`."""
    caught = kinds or (HeadwayError,)
    try:
        yield
    except caught as inner:
        raise error(f"{what}: {inner}") from inner


def listed(names: Sequence[str]) -> str:
    """Returns "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `' (did you mean "rms_norm_eps"?)'` if a known name is close to `name`, else the empty string."""
    matches = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f' (did you mean "{matches[0]}"?)' if matches else ""


def check_known(
    name: object,
    known: Iterable[str],
    what: str,
    *,
    are: str = "there are",
    error: type[HeadwayError] = ConfigError,
    hint: Callable[[str, Iterable[str]], str] = did_you_mean,
) -> None:
    """Raises `error` if `name` is not in `known`: "`what` 'name' (did you mean ..?); `are` a, b"."""
    names = [*known]
    if name not in names:
        raise error(f"{what} {name!r}{hint(str(name), names)}; {are} {', '.join(names) or 'none'}")


def near_file(path: Path) -> str:
    """Returns `did_you_mean` for the file name of a path, among the files in its directory."""
    return did_you_mean(path.name, [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else [])


def check_whole(what: str, value: object, least: int = 1, error: type[HeadwayError] = ConfigError) -> None:
    """Raises `error` unless `value` is an integer of at least `least`; a bool is not an integer here."""
    if type(value) is not int or value < least:
        raise error(f"{what} must be a whole number of at least {least}, got {value!r}")
