"""Errors of the Hugging Face Hub in our words."""

from collections.abc import Iterator
from contextlib import contextmanager

from headway.errors import HubError


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
