"""Errors that users can cause: each says what was asked, what was given, and what to do."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path


class HeadwayError(ValueError):
    """Base of all errors that are meant for users."""


class PatternError(HeadwayError):
    """A pattern, token description or score that cannot be."""


class BackendError(HeadwayError):
    """A kernel was asked for something that it cannot do."""


class BuildError(HeadwayError):
    """The native kernels could not be compiled."""


class CacheError(HeadwayError):
    """A cache was asked to hold or to forget what it cannot."""


class ConfigError(HeadwayError):
    """A configuration with an unknown key, or values that contradict each other."""


class CheckpointError(HeadwayError):
    """A checkpoint that is broken, incomplete, unsafe or not what its config says."""


class DataError(HeadwayError):
    """Text or token files that cannot be read as what they claim to be."""


class HubError(HeadwayError):
    """A file or model that the Hugging Face Hub does not give, or does not take."""


class EndpointError(HeadwayError):
    """A server that refuses, does not answer, or answers with something else."""


class RankError(HeadwayError):
    """Another process of a run died, stopped or hangs."""


@contextmanager
def as_error(error: type[HeadwayError], what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds that are raised inside (ours, unless one is named) as `error`, with `what` before their
    words."""
    caught = kinds or (HeadwayError,)
    try:
        yield
    except caught as inner:
        raise error(f"{what}: {inner}") from inner


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`' (did you mean "rms_norm_eps"?)'` when a known name is close to `name`, else the empty string."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f' (did you mean "{close[0]}"?)' if close else ""


def check_known(
    name: object,
    known: Iterable[str],
    what: str,
    *,
    are: str = "there are",
    error: type[HeadwayError] = ConfigError,
    hint: Callable[[str, Iterable[str]], str] = did_you_mean,
) -> None:
    """Raise `error` for a name that is not known: "`what` 'name' (did you mean ..?); there are a, b"."""
    names = [*known]
    if name not in names:
        raise error(f"{what} {name!r}{hint(str(name), names)}; {are} {', '.join(names) or 'none'}")


def near_file(path: Path) -> str:
    """`did_you_mean` for the name of what should be at a path: among what stands beside it."""
    return did_you_mean(path.name, [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else [])


def check_whole(what: str, value: object, least: int = 1, error: type[HeadwayError] = ConfigError) -> None:
    """Raises `error` unless a value is a whole number of at least `least`; True is none."""
    if type(value) is not int or value < least:
        raise error(f"{what} must be a whole number of at least {least}, got {value!r}")
