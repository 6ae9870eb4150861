"""Payloads from DVC's cache or remote into the store, checked before they are seen there."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from grafting.errors import UserError
from grafting.provenance import integrity
from grafting.provenance.files import file_digest
from grafting.provenance.store import Store

if TYPE_CHECKING:
    from grafting.provenance.cache import Cache


def bring(store: Store, wanted: Mapping[str, Mapping[str, Mapping]]) -> dict[str, str]:
    """Put payloads of finished jobs (id -> files as its sidecar describes them) into the store.

    Returns for each that is not there now the reason. The remote is asked once, for what the cache lacks.
    """
    from grafting.provenance.cache import Cache

    unnamed = "its sentinel does not say under which hash DVC keeps it"
    reasons = {i: unnamed for i, files in wanted.items() if not files or any("md5" not in a for a in files.values())}
    try:
        cache = Cache(store.root)
    except UserError as error:
        return dict.fromkeys(wanted, str(error))
    with cache:
        lacking = {
            job_id: md5s
            for job_id, files in wanted.items()
            if job_id not in reasons
            and (md5s := {about["md5"] for about in files.values() if not cache.has([about["md5"]])})
        }
        if lacking and cache.remote():
            shown = next(iter(lacking)) if len(lacking) == 1 else f"{len(lacking)} payloads"
            print(f"fetching {shown} from the DVC remote {cache.remote()!r}", file=sys.stderr, flush=True)
        failed = cache.pull({md5 for md5s in lacking.values() for md5 in md5s})
        reasons |= {job_id: failed for job_id, md5s in lacking.items() if failed is not None and not cache.has(md5s)}
        for job_id, files in wanted.items():
            if job_id not in reasons and (reason := _settle(store, cache, job_id, files)) is not None:
                reasons[job_id] = reason
    return reasons


def _settle(store: Store, cache: Cache, job_id: str, files: Mapping[str, Mapping]) -> str | None:
    """Put one payload, all of whose files are in the cache, into the store by one rename; returns why not, or None.

    Files come as links to the cache. Each is hashed (SHA-256 of the sidecar).
    """
    stage, _, name = job_id.partition("/")
    folder = store.root / "store" / job_id
    # jobs that need the same payload wait for the first; a running job holds another lock, its own
    with store.lock(stage, name.rpartition("-")[2]):
        if folder.exists() and not integrity.absent(folder, files):
            return None
        links, aside = cache.links(), store.aside(job_id)
        try:
            for path, about in files.items():
                target = aside / path
                target.parent.mkdir(parents=True, exist_ok=True)
                cache.place(about["md5"], target, links)
                if _differs(target, about):
                    # a cache that lost a bit must not lose the payload: ask the remote for that file once more
                    cache.drop(about["md5"])
                    reason = cache.pull([about["md5"]])
                    if reason is None:
                        cache.place(about["md5"], target, links)
                        reason = "the remote's copy is altered too" if _differs(target, about) else None
                    if reason is not None:
                        return f"DVC's copy of {path} is altered, its hash is not the recorded one; {reason}"
            if folder.exists():  # a part of it
                store.remove(job_id)
            store.settle(job_id, aside)
            integrity.note(store.intact(job_id), folder, files)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return None


def _differs(path, about: Mapping) -> bool:
    return path.stat().st_size != about["bytes"] or file_digest(path) != about["sha256"]
