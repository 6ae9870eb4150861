"""The one place where the Hugging Face Hub is asked for anything: pinned revisions, checked bytes, clear errors.

With HF_HUB_OFFLINE=1 only the cache is read. HF_ENDPOINT, HF_HOME and HF_TOKEN work as users know them. What comes
back is checked against the hashes that the repository states (SHA-256 of large files, git's hash of small ones),
which the downloading library leaves to the size. Light: the library is imported on use.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from grafting.errors import UserError

COMMIT = re.compile(r"[0-9a-f]{40}")
MODEL_FILES = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt")


def snapshot(repository: str, revision: str | None, patterns: Sequence[str] = MODEL_FILES, kind: str = "model") -> Path:
    """Folder with the files of a repository ("model" or "dataset") at a commit. An interrupted download goes on.

    UserError: no commit hash, no such repository or revision, no access, offline and not in the cache, a broken
    connection, or bytes that are not those of the repository (they are removed, so that another try is whole).
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not COMMIT.fullmatch(revision or ""):
        raise UserError(
            f"{kind} {repository}: revision {revision!r} is not a full commit hash (40 hex digits); pin one"
        )
    disable_progress_bars()
    try:
        path = snapshot_download(repository, revision=revision, repo_type=kind, allow_patterns=list(patterns))
    except Exception as error:
        raise UserError(f"{kind} {repository}@{revision}: {_reason(error)}") from None
    folder = Path(path)
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        _check(file, f"{kind} {repository}@{revision}, file {file.relative_to(folder)}")
    return folder


def file(repository: str, revision: str | None, name: str, kind: str = "dataset") -> Path:
    """One file of a repository at a commit. UserError: see `snapshot`; also a name that is not there."""
    found = snapshot(repository, revision, [name], kind) / name
    if not found.is_file():
        raise UserError(f"{kind} {repository}@{revision} has no file {name!r}; look at its list of files")
    return found


def _reason(error: Exception) -> str:
    """What went wrong and what to do, by the library's exception."""
    from huggingface_hub import errors

    # order matters: a gated repository is also a "not found", an incomplete one also a missing entry
    if isinstance(error, errors.GatedRepoError):
        return "access is gated: accept its terms on its page, then set HF_TOKEN to a token of that account"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such repository, or a private one: check the name, or set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return "no such revision in this repository; copy the commit hash from its history"
    if isinstance(error, errors.IncompleteSnapshotError):
        return "only a part of it is in the cache and the Hub cannot be reached; run again with a connection"
    if isinstance(error, errors.LocalEntryNotFoundError):
        if "disabled" in str(error):
            return "not in the cache, and HF_HUB_OFFLINE forbids fetching it; fetch it once with HF_HUB_OFFLINE=0"
        return f"not in the cache, and the Hub cannot be reached ({_first_line(error)}); run again to go on"
    return f"cannot be fetched ({type(error).__name__}: {_first_line(error)}); run again to go on"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _check(path: Path, what: str) -> None:
    """The bytes of a cached file against its name in the cache, which is the hash that the repository states."""
    blob = path.resolve()
    stated = blob.name
    if re.fullmatch(r"[0-9a-f]{64}", stated):
        hasher = hashlib.sha256()
    elif COMMIT.fullmatch(stated):  # git's blob hash: SHA-1 of a header and the content
        hasher = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
    else:
        return  # a cache without symbolic links keeps no hashes
    with blob.open("rb") as content:
        while block := content.read(1 << 20):
            hasher.update(block)
    if hasher.hexdigest() != stated:
        blob.unlink()
        path.unlink(missing_ok=True)
        raise UserError(
            f"{what}: the bytes do not have the hash that the repository states ({hasher.hexdigest()[:12]}..., "
            f"stated {stated[:12]}...); the damaged file is removed: run again"
        )
