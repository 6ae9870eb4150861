"""Which payloads nothing names any more, and dropping them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from grafting.plan.jobs import STAGES
from grafting.provenance.store import Store


@dataclass
class Garbage:
    """Ids of payloads that may go. `here`: those in store/, with their bytes; `listed`: all that DVC lists."""

    here: dict[str, int] = field(default_factory=dict)
    listed: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.here or self.listed)


def _git(root: Path, *arguments: str) -> list[str]:
    """Output lines of git; none outside git, or before the first commit."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _ids(paths: Iterable[str]) -> set[str]:
    """Ids of the sentinels among paths that start with provenance/."""
    return {path.removeprefix("provenance/").removesuffix(".json") for path in paths if path.endswith(".json")}


def named(store: Store) -> set[str]:
    """Ids whose sentinel is in a commit that a ref points to (branches here and remote, tags, DVC's experiments,
    the stash) or in a work tree of the repository, committed or not."""
    root = store.root
    found = _ids(path.relative_to(root).as_posix() for path in (root / "provenance").rglob("*.json"))
    revisions = {*_git(root, "for-each-ref", "--format=%(objectname)"), *_git(root, "rev-parse", "HEAD")}
    for revision in revisions:
        found |= _ids(_git(root, "ls-tree", "-r", "--name-only", revision, "provenance/"))
    prefix = "".join(_git(root, "rev-parse", "--show-prefix"))
    for line in _git(root, "worktree", "list", "--porcelain"):
        word, _, place = line.partition(" ")
        if word == "worktree":
            other = Path(place) / prefix
            found |= _ids(path.relative_to(other).as_posix() for path in (other / "provenance").rglob("*.json"))
        elif word == "HEAD":
            found |= _ids(_git(root, "ls-tree", "-r", "--name-only", place, "provenance/"))
    return found


def collect(store: Store, planned: set[str]) -> Garbage:
    """Payloads whose sentinel is nowhere in git or its work trees, and that no current plan (`planned`) names."""
    garbage, kept = Garbage(), named(store) | planned
    for stage in STAGES:
        for folder in sorted((store.root / "store" / stage).glob("*")):
            if folder.is_dir() and f"{stage}/{folder.name}" not in kept:
                size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                garbage.here[f"{stage}/{folder.name}"] = size
    if (store.root / ".dvc").is_dir():
        from grafting.provenance.cache import Cache

        with Cache(store.root) as cache:
            for stage in STAGES:
                garbage.listed += [i for name in cache.listing(stage) or () if (i := f"{stage}/{name}") not in kept]
    return garbage


def drop(store: Store, garbage: Garbage) -> str | None:
    """Remove the payloads from the store, from DVC's lists and from its cache; returns a notice, if there is one.

    The cache keeps what a list of any branch, tag or experiment names, as `dvc gc` decides it; a cache outside
    this folder may serve others and is left alone. Remotes are never touched.
    """
    for job_id in garbage.here:
        store.remove(job_id)
    if not (store.root / ".dvc").is_dir():
        return None
    from grafting.provenance.cache import Cache

    command = "dvc gc --workspace --all-branches --all-tags --all-experiments"
    with Cache(store.root) as cache:
        gone = set(garbage.listed)
        with cache.lock():
            for stage in STAGES:
                listing = cache.listing(stage) or {}
                left = {name: files for name, files in listing.items() if f"{stage}/{name}" not in gone}
                if left != listing:
                    cache.write(stage, left)
        if not Path(cache.objects.path).is_relative_to((store.root / ".dvc").resolve()):
            return f"DVC's cache {cache.objects.path} may serve other folders and was left as it is; see `{command}`"
        try:
            cache.repo.gc(workspace=True, all_branches=True, all_tags=True, all_experiments=True)
        except Exception as error:  # a list of some branch is nowhere, say
            return f"DVC's cache was left as it is ({type(error).__name__}: {error}); see `{command}`"
    return None
