"""New payloads are put under DVC after every run, finished or not.

Each stage's payloads are one directory for DVC, listed by `store/<stage>.dvc`. Only payloads that DVC does
not hold yet are added, so that entries whose payload is not on this machine stay. What a killed run left is
added by the next one, or by `grafting add`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from grafting.errors import UserError
from grafting.plan.jobs import STAGES
from grafting.provenance import integrity
from grafting.provenance.files import write_text
from grafting.provenance.hashing import describe_file
from grafting.provenance.store import Store

if TYPE_CHECKING:
    from grafting.provenance.cache import Cache


@dataclass
class Added:
    """Ids of payloads that DVC lists now, and of those it must not take: altered since they were made."""

    taken: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def complete(store: Store, stage: str) -> dict[str, dict]:
    """Payload's name -> its files as its sidecar describes them, of all whole payloads here with a sentinel."""
    found = {}
    for folder in sorted((store.root / "store" / stage).glob("*")):
        if not folder.is_dir() or not store.sentinel(f"{stage}/{folder.name}").exists():
            continue
        try:
            files = store.read(f"{stage}/{folder.name}").get("payload", {})
        except UserError:
            continue  # `grafting status` names it
        if files and not integrity.absent(folder, files):
            found[folder.name] = files
    return found


def untracked(store: Store, cache: Cache) -> dict[str, dict[str, dict]]:
    """Stage -> payloads here (see `complete`) that DVC does not list, or whose files its cache has lost."""
    found = {}
    for stage in STAGES:
        known = cache.listing(stage) or {}
        new = {
            name: files
            for name, files in complete(store, stage).items()
            if set(known.get(name, {})) != set(files) or not cache.has(known[name].values())
        }
        if new:
            found[stage] = new
    return found


def add_payloads(store: Store) -> Added:
    """Put what is new under DVC; waits while another DVC command holds the lock.

    Errors: UserError if the folder is not under DVC or a stage's list is nowhere to be had; what DVC raises.
    """
    from grafting.provenance.cache import Cache

    added = Added()
    with Cache(store.root) as cache, cache.lock():
        for stage, payloads in untracked(store, cache).items():
            whole = {}
            for name, files in payloads.items():
                job_id = f"{stage}/{name}"
                if integrity.altered(store.intact(job_id), store.root / "store" / job_id, files):
                    added.refused.append(job_id)
                else:
                    whole[name] = _with_md5(store.root / "store" / job_id, files)
            if whole:
                cache.add(stage, whole)
                added.taken += [f"{stage}/{name}" for name in whole]
        _add_models(store, cache)
        if "DVC_EXP_NAME" in os.environ:
            # an experiment's commit holds what git knows, and the outputs of dvc.yaml; these are neither at first
            made = [*(store.root / "store").glob("*.dvc"), *(store.root / "results").glob("*.dvc")]
            made += (store.root / "results").glob("report*.json")
            cache.repo.scm.add([str(path) for path in made])
    return added


def _add_models(store: Store, cache: Cache) -> None:
    """Put `results/models/` under DVC: the selected models at fixed places, for `dvc get` and `dvc artifacts`.

    The report leaves links to payloads there. They become folders of links to DVC's cache, which is what DVC
    itself makes of them on checkout; no file is kept twice. A model that is not here is listed all the same.
    """
    from grafting.provenance.cache import pointed

    folder = store.root / "results" / "models"
    links = [path for path in sorted(folder.glob("*")) if path.is_symlink()]
    if not links:
        return
    pointer, kinds = folder.with_name("models.dvc"), cache.links()
    known = cache.listed(pointed(pointer.read_text(encoding="utf-8"))) if pointer.exists() else {}
    listing = {name: files for name, files in (known or {}).items() if (folder / name).is_dir()}
    for link in links:
        payload = Path(os.path.normpath(folder / os.readlink(link))).relative_to(os.path.normpath(store.root / "store"))
        files = store.read(payload.as_posix())["payload"]
        if any("md5" not in about for about in files.values()):
            continue  # recorded by a version that noted none: its link stays a link
        listing[link.name] = {name: about["md5"] for name, about in files.items()}
        if cache.has(listing[link.name].values()):
            aside = folder / f".{link.name}.{os.getpid()}"
            for name, md5 in listing[link.name].items():
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                cache.place(md5, aside / name, kinds)
            link.unlink()
            os.rename(aside, link)
    if listing:
        write_text(pointer, cache.pointing(pointer, "models", listing, None))


def _with_md5(folder: Path, files: Mapping[str, Mapping]) -> dict[str, Mapping]:
    """The description of files with their MD5, which a sidecar may lack that another version wrote."""
    return {name: about if "md5" in about else describe_file(folder / name) for name, about in files.items()}


def main() -> int:
    """Entry after a run: a fault here never fails the run, but it is said."""
    if not Path(".dvc").is_dir():
        return 0  # somebody's choice; `grafting status` says what is under no version control
    started = time.monotonic()
    try:
        added = add_payloads(Store())
    except Exception as error:  # whatever DVC raises, the payloads are safe in store/
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        print(
            f"notice: DVC did not take the new payloads ({kind}{error}); they are safe in store/. "
            "Try again with `grafting add`.",
            file=sys.stderr,
        )
        return 1
    for job_id in added.refused:
        print(f"notice: store/{job_id} is altered and was not put under DVC; see `grafting status`", file=sys.stderr)
    if added.taken:
        seconds = time.monotonic() - started
        print(f"DVC: {len(added.taken)} new payloads under version control ({seconds:.0f} s)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
