"""What is here of all that git names: in the store, in DVC's cache, in a remote, or nowhere; and the mending."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from grafting.errors import UserError
from grafting.plan.jobs import STAGES
from grafting.provenance import integrity
from grafting.provenance.store import Store

if TYPE_CHECKING:
    from grafting.provenance.cache import Cache


@dataclass
class Health:
    """Ids of artefacts by where their payload is: each in one list.

    present   whole in store/
    cached    not (whole) in store/, but in DVC's cache here
    remote    in neither, but in the default DVC remote
    missing   nowhere
    altered   in store/, but a file's size or hash is not the recorded one
    damaged   the sentinel itself cannot be read

    `unversioned` are those of the present that DVC does not list yet, `mendable` those of the altered whose
    files the cache or the remote still has as they should be. `remote_name`: None if no remote is configured.
    """

    present: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    remote: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    altered: dict[str, list[str]] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    unversioned: list[str] = field(default_factory=list)
    mendable: list[str] = field(default_factory=list)
    remote_name: str | None = None

    @property
    def sound(self) -> bool:
        """Is everything that git names to be had, as it was made?"""
        return not (self.missing or self.altered or self.damaged)


def examine(store: Store, deep: bool = False) -> Health:
    """Where every payload is that a sentinel names.

    The remote is asked for what is neither in the store nor in the cache, and for nothing else. `deep`: hash
    every file of the store instead of those only that changed since they were hashed last.
    Errors: UserError if the remote cannot be asked.
    """
    health, elsewhere = Health(), {}
    for job_id, files in sidecars(store, health.damaged):
        folder = store.root / "store" / job_id
        if not folder.is_dir() or integrity.absent(folder, files):
            elsewhere[job_id] = files
        elif wrong := integrity.altered(store.intact(job_id), folder, files, deep):
            health.altered[job_id] = wrong
            elsewhere[job_id] = files
        else:
            health.present.append(job_id)
    if (store.root / ".dvc").is_dir():
        from grafting.provenance.cache import Cache

        with Cache(store.root) as cache:
            health.remote_name = cache.remote()
            _look_elsewhere(health, elsewhere, cache)
            listed = {f"{stage}/{name}" for stage in STAGES for name in cache.listing(stage) or ()}
            health.unversioned = [job_id for job_id in health.present if job_id not in listed]
    else:
        health.missing = [job_id for job_id in elsewhere if job_id not in health.altered]
        health.unversioned = list(health.present)
    return health


def sidecars(store: Store, damaged: list[str]):
    """(id, described files) of every artefact with a payload of its own; ids that cannot be read go to `damaged`."""
    for stage in STAGES:
        for path in sorted((store.root / "provenance" / stage).glob("*.json")):
            job_id = f"{stage}/{path.stem}"
            try:
                sidecar = store.read(job_id)
            except UserError:
                damaged.append(job_id)
                continue
            if "link" not in sidecar:  # else its payload is the chosen one's
                yield job_id, sidecar.get("payload", {})


def _look_elsewhere(health: Health, elsewhere: dict[str, dict], cache: Cache) -> None:
    """Sort what the store does not hold whole into cached, remote and missing; altered files into mendable."""
    lacking: dict[str, set[str]] = {}
    for job_id, files in elsewhere.items():
        md5s = {about.get("md5", "") for about in files.values()}
        if not md5s or "" in md5s:
            lacking[job_id] = {""}
            continue
        # a hard link shares its fault with the cache, so what is altered here may be altered there too
        wrong = {files[name]["md5"] for name in health.altered.get(job_id, ())}
        lacking[job_id] = {md5 for md5 in md5s if not cache.has([md5]) or (md5 in wrong and not cache.holds(md5))}
    held = cache.in_remote({md5 for md5s in lacking.values() for md5 in md5s} - {""})
    for job_id, md5s in lacking.items():
        if job_id in health.altered:
            if md5s <= held:
                health.mendable.append(job_id)
        elif not md5s:
            health.cached.append(job_id)
        elif md5s <= held:
            health.remote.append(job_id)
        else:
            health.missing.append(job_id)


def _purge(store: Store, md5s: list[str]) -> None:
    """Drop altered files from DVC's cache too: a hard link shares its fault with it."""
    if (store.root / ".dvc").is_dir():
        from grafting.provenance.cache import Cache

        with Cache(store.root) as cache:
            for md5 in md5s:
                if cache.path(md5).is_file() and not cache.holds(md5):
                    cache.drop(md5)


@dataclass
class Mended:
    """Ids: payloads brought back from DVC, and those whose sentinels were removed so that they are made again."""

    restored: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)


def repair(store: Store, health: Health) -> Mended:
    """Bring altered payloads back from DVC; remove the sentinels of those that are nowhere, and damaged ones.

    Links to a removed artefact are removed with it. The next run makes exactly these again; nothing else is
    touched.
    """
    from grafting.provenance.fetch import bring

    mended, lost = Mended(), {*health.missing, *health.damaged}
    for job_id, wrong in health.altered.items():
        files = store.read(job_id)["payload"]
        store.remove(job_id)
        _purge(store, [files[name].get("md5", "") for name in wrong])
        if job_id in health.mendable and not bring(store, {job_id: files}):
            mended.restored.append(job_id)
        else:
            lost.add(job_id)
    for stage in STAGES:
        for path in sorted((store.root / "provenance" / stage).glob("*.json")):
            job_id = f"{stage}/{path.stem}"
            if job_id not in lost and store.read(job_id).get("link") in lost:
                lost.add(job_id)
    for job_id in sorted(lost):
        store.sentinel(job_id).unlink(missing_ok=True)
    mended.removed = sorted(lost)
    return mended
