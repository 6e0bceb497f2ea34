"""Locates a model: a local folder or file, or a repository of the Hugging Face Hub, downloaded once; translates the
Hub's errors.

| source | meaning |
|---|---|
| a path that exists | that path |
| `OWNER/NAME[@REVISION]` | a repository of the Hub, if neither such a path nor a folder OWNER exists |
| `hf://OWNER/NAME[@REVISION]` | always a repository of the Hub |
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headway.errors import CheckpointError, ConfigError, HubError, did_you_mean
from headway.storage.files import current_folder

# Files of a model: configs, weights, tokenizers; no pickles, which can run code when other programs load them.
MODEL_FILES = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.model",
    "*.spm",
    "vocab.txt",
    "merges.txt",
    "vocab.bpe",
]
PICKLES = ["*.bin", "*.pth"]

# pathlib turns hf:// into hf:/
_ADDRESS = re.compile(
    r"(?P<hub>hf:/{1,2})?(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?"
)


def is_address(source: str | Path) -> bool:
    """Returns whether `source` names a repository of the Hub and no local path."""
    match = _ADDRESS.fullmatch(str(source))
    if match is None or match["hub"] is not None:
        return match is not None
    return not current_folder(source).exists() and not Path(source).parent.is_dir()


def local_model(
    source: str | Path,
    *,
    revision: str | None = None,
    allow_pickle: bool = False,
    files: Sequence[str] | None = None,
) -> Path:
    """Returns the folder (or GGUF file) of a model; a repository's configs, weights and tokenizer (or the files that
    match `files`) are downloaded first.

    Raises CheckpointError for a model that is neither local nor can be downloaded, ConfigError for a revision of a
    local folder, and for two different revisions."""
    match = _ADDRESS.fullmatch(str(source))
    if match is None or not is_address(source):
        if current_folder(source).exists():
            if revision is not None:
                raise ConfigError(
                    f"revision {revision!r} applies to Hub ids only, but {source} is a local path; remove it"
                )
            return Path(source)
        hub = f"; for the Hub repository use hf://{source}" if match else ""
        raise CheckpointError(f"{source}: no such file or folder{_beside(source)}{hub}")
    if None not in (revision, match["revision"]) and revision != match["revision"]:
        raise ConfigError(
            f"{source} names a revision other than revision {revision!r}; give only one of them"
        )
    from huggingface_hub import snapshot_download

    patterns = [*MODEL_FILES, *(PICKLES if allow_pickle else [])] if files is None else [*files]
    try:
        return Path(
            snapshot_download(match["id"], revision=revision or match["revision"], allow_patterns=patterns)
        )
    except Exception as error:  # of any kind: it means that there is nothing to load
        local = (
            ""
            if match["hub"]
            else f"no such local file or folder{_beside(source)}, and as a Hugging Face Hub id "
        )
        raise CheckpointError(
            f"{source}: {local}it could not be downloaded "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else 'no details'}). "
            "Check the name and the network; HF_HUB_OFFLINE=1 forbids downloads, gated models need HF_TOKEN"
        ) from error


def _beside(source: str | Path) -> str:
    """Returns a hint for a message about a missing path: the nearest name beside it, or some of the folders there."""
    path = Path(source)
    siblings = sorted(p.name for p in path.parent.iterdir() if p.is_dir()) if path.parent.is_dir() else []
    hint = did_you_mean(path.name, siblings)
    return hint or (f" ({path.parent} has {', '.join(siblings[:8])})" if siblings else "")


@contextmanager
def asking(what: str) -> Iterator[None]:
    """Converts errors of the Hub about `what` inside the `with` block to HubErrors that say what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"{what}: the repository is gated; request access on its page on the Hub, then set HF_TOKEN to your token"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{what}: the Hub has no such repository, or it is private; check owner and name, or set HF_TOKEN to a "
            "token with read access"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{what}: the repository has no such revision; give a branch, a tag or a commit"
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise HubError(
            f"{what}: not in the local cache, and the Hub is disabled (HF_HUB_OFFLINE=1) or unreachable"
        ) from error
    except errors.EntryNotFoundError as error:
        raise HubError(f"{what}: the repository has no such file") from error
    except errors.HFValidationError as error:
        raise HubError(f"{what}: not a repository id, which is OWNER/NAME ({error})") from error
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        hint = "; the token (HF_TOKEN) is invalid or lacks the permission" if code in (401, 403) else ""
        raise HubError(f"{what}: the Hub answered {code}: {error.server_message or error}{hint}") from error
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        raise HubError(f"{what}: the Hub is unreachable ({error}); run the same again to continue") from error
