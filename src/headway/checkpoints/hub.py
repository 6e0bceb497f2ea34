"""The Hugging Face Hub: models fetched and published, and its errors in our words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.checkpoints.adapter_config import CONFIG as ADAPTER_CONFIG
from headway.checkpoints.folder import load_folder
from headway.checkpoints.remote import MODEL_FILES, PICKLES
from headway.errors import CheckpointError, HubError
from headway.models import cost

CARD = "README.md"


@contextmanager
def asking(what: str) -> Iterator[None]:
    """While open, errors of the Hub about `what` become HubErrors that say what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"{what}: its owner grants access; ask for it on the page of the Hub, then set HF_TOKEN to a token of yours"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{what}: the Hub has no such repository, or it is private; check owner and name, and set HF_TOKEN to a "
            "token that may read it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{what}: it has no such revision; give a branch, a tag or a commit") from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise HubError(
            f"{what}: it was not fetched before, and the Hub is not asked (HF_HUB_OFFLINE=1), or not reached"
        ) from error
    except errors.EntryNotFoundError as error:
        raise HubError(f"{what}: the repository has no such file") from error
    except errors.HFValidationError as error:
        raise HubError(f"{what}: no name of a repository; it is OWNER/NAME ({error})") from error
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        hint = "; the token (HF_TOKEN) is not accepted, or may not do this" if code in (401, 403) else ""
        raise HubError(f"{what}: the Hub says {code}: {error.server_message or error}{hint}") from error
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        raise HubError(
            f"{what}: the Hub is not reached ({error}); what is here stays, and the same goes on"
        ) from error


def download(
    name: str, out: str | Path | None = None, *, revision: str | None = None, allow_pickle: bool = False
) -> Path:
    """The files of a model of the Hub, in the folder `out`, or where the Hub's library keeps them; again, only what is
    missing.

    Raises HubError for what there is not, or where weights are pickles unless `allow_pickle`; CheckpointError for a
    folder that holds something else."""
    import huggingface_hub

    folder = None if out is None else Path(out)
    if folder is not None and folder.exists() and any(folder.iterdir()) and not (folder / ".cache").exists():
        raise CheckpointError(f"{folder} holds something already; choose another folder (--out)")
    with asking(name):
        files = huggingface_hub.HfApi().list_repo_files(name, revision=revision)
        if not allow_pickle and not any(file.endswith(".safetensors") for file in files):
            raise HubError(
                f"{name}: its weights are no safetensors (it has {', '.join(sorted(files)[:8])}); pickles are fetched "
                "with --allow-pickle alone"
            )
        wanted = [*MODEL_FILES, *(PICKLES if allow_pickle else [])]
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=wanted, local_dir=folder
            )
        )


def push(folder: str | Path, name: str, *, private: bool = False, message: str = "A model of headway") -> str:
    """Publishes a folder of a model, or of an adapter, as OWNER/NAME, which is made where there is none; with a card,
    unless the folder has one (README.md). Returns the address.

    Raises CheckpointError for a folder that holds neither, HubError for what the Hub refuses."""
    import huggingface_hub

    path = Path(folder)
    text = card(path, name)
    api = huggingface_hub.HfApi()
    with asking(name):
        address = str(api.create_repo(name, private=private, exist_ok=True))
        if not (path / CARD).exists():
            api.upload_file(
                path_or_fileobj=text.encode(), path_in_repo=CARD, repo_id=name, commit_message=message
            )
        own = [*MODEL_FILES, CARD]
        left = ["optimizer.safetensors", "training.json"]  # of a checkpoint
        api.upload_folder(
            repo_id=name, folder_path=path, allow_patterns=own, ignore_patterns=left, commit_message=message
        )
    return address


def card(folder: Path, name: str) -> str:
    """A short model card: what it is, and how it is run. Raises CheckpointError for what is no model."""
    if (folder / ADAPTER_CONFIG).exists():
        base = json.loads((folder / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
        head = f"base_model: {base}\nlibrary_name: peft\ntags: [headway, lora]"
        return (
            f"---\n{head}\n---\n\n# {name}\n\nAn adapter of {base}, made with headway; PEFT reads it, too.\n"
        )
    spec = load_folder(folder).spec
    count = cost.parameter_count(spec)
    facts = f"{spec.family}, {count:,} parameters, {spec.layers} layers, context {spec.trained_context}"
    use = f'```python\nimport headway\n\nmodel = headway.load("{name}")\n```'
    head = "library_name: headway\ntags: [headway]"
    return f"---\n{head}\n---\n\n# {name}\n\nA model made with headway: {facts}.\n\n{use}\n"
