"""One payload from DVC's cache or remote into the store, checked before it is seen there."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping

from grafting.errors import UserError
from grafting.provenance import integrity
from grafting.provenance.files import file_digest
from grafting.provenance.store import Store


def bring(store: Store, job_id: str, files: Mapping[str, Mapping]) -> str | None:
    """Put the payload of a finished job into the store; returns why that cannot be, None if it is there.

    Files come as links to DVC's cache, into which the remote is asked for those that are not there yet. Each is
    hashed (SHA-256 of the sidecar). A cached file that fails is dropped and asked for once more: a cache that
    lost a bit must not lose the payload. The payload appears by one rename.
    """
    from grafting.provenance.cache import Cache

    if not files or not all("md5" in about for about in files.values()):
        return "its sentinel does not say under which hash DVC keeps it"
    try:
        cache = Cache(store.root)
    except UserError as error:
        return str(error)
    with cache:
        md5s = {name: about["md5"] for name, about in files.items()}
        if not cache.has(md5s.values()):
            print(f"fetching the payload of {job_id} from the DVC remote", file=sys.stderr, flush=True)
        if (reason := cache.pull(md5s.values())) is not None:
            return reason
        links, aside = cache.links(), store.aside(job_id)
        try:
            for name, about in files.items():
                target = aside / name
                target.parent.mkdir(parents=True, exist_ok=True)
                for attempt in (1, 2):
                    cache.place(about["md5"], target, links)
                    if target.stat().st_size == about["bytes"] and file_digest(target) == about["sha256"]:
                        break
                    if attempt == 1:
                        cache.drop(about["md5"])
                        reason = cache.pull([about["md5"]])
                    if attempt == 2 or reason is not None:
                        why = reason or "the remote's copy is altered too"
                        return f"DVC's copy of {name} is altered, its hash is not the recorded one; {why}"
            if (store.root / "store" / job_id).exists():  # a part of it
                store.remove(job_id)
            store.settle(job_id, aside)
            integrity.note(store.intact(job_id), store.root / "store" / job_id, files)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return None
