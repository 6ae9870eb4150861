"""DVC's cache, lists and remote of a study folder, by the MD5 of files.

Payloads of a stage are one directory for DVC: `store/<stage>.dvc` names a list (`<md5>.dir` in the cache) of
all files of all payloads. `dvc add` of one payload writes the whole list anew, so that many payloads cost the
square of their number; here a run's payloads enter the list at once. The format is DVC's own.

This module imports DVC (a second), so nothing that runs while Snakemake reads its rules imports it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml
from dvc.config import NoRemoteError
from dvc.lock import LockError
from dvc.repo import Repo
from dvc.scm import SCMError
from dvc_data.hashfile.db import get_index
from dvc_data.hashfile.db.local import LocalHashFileDB
from dvc_data.hashfile.hash_info import HashInfo
from dvc_objects.fs import localfs
from dvc_objects.fs.generic import test_links, transfer

from grafting.errors import UserError
from grafting.provenance.files import write_text
from grafting.provenance.hashing import describe_file

#: In the order of our liking; only what the file system can do is used.
LINKS = ["reflink", "hardlink", "symlink"]
#: List of a stage: payload's name -> path inside it -> MD5.
Listing = dict[str, dict[str, str]]


class Cache:
    """Cache and remote of the study in `root`; use it in a `with` block.

    Errors: UserError if `root` has no .dvc folder, or DVC's configuration cannot be read.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        if not (self.root / ".dvc").is_dir():
            raise UserError(f"{self.root.resolve()}: not under DVC (no .dvc folder); `dvc init` makes one")
        # DVC's advice to stage store/*.dvc, and its list of missing files, say nothing new to our readers
        logging.getLogger("dvc").setLevel(logging.ERROR)
        try:
            self.repo = Repo(str(self.root))
        except SCMError:  # a folder without git can still be versioned
            self.repo = Repo(str(self.root), config={"core": {"no_scm": True}})
        self.objects = self.repo.cache.local

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_) -> None:
        self.repo.close()

    # ---- objects ---------------------------------------------------------------------------------
    def path(self, md5: str) -> Path:
        """Where the cache holds, or would hold, the file with this MD5."""
        return Path(self.objects.oid_to_path(md5))

    def has(self, md5s: Iterable[str]) -> bool:
        """Are all of them in the cache? (Their content is not read.)"""
        return all(self.path(md5).is_file() for md5 in md5s)

    def holds(self, md5: str) -> bool:
        """Is a file in the cache and as its name says? Its content is read."""
        return self.path(md5).is_file() and describe_file(self.path(md5))["md5"] == md5

    def remote(self) -> str | None:
        """Name of the default remote; None if none is configured."""
        return self.repo.config["core"].get("remote")

    def in_remote(self, md5s: Iterable[str]) -> set[str]:
        """Those of the MD5s that the default remote holds; none if there is no remote.

        UserError if the remote cannot be asked.
        """
        wanted = set(md5s)
        if not wanted:
            return set()
        try:
            objects = self.repo.cloud.get_remote_odb()
            return set(objects.list_oids_exists(wanted)) if objects.fs.exists(objects.path) else set()
        except NoRemoteError:
            return set()
        except Exception as error:  # each kind of remote has exceptions of its own
            raise UserError(
                f"the DVC remote {self.remote()!r} cannot be asked ({type(error).__name__}: {error})"
            ) from None

    def pull(self, md5s: Iterable[str]) -> str | None:
        """Bring files from the remote into the cache; returns why that did not succeed, None if it did.

        Jobs that lack the same files wait for the first. The files come into a folder of their own and from there
        into the cache by rename: DVC, let loose on the cache, tries to clone each file and for that cuts a file that
        came there meanwhile to nothing, together with the payloads that it is linked to.
        """
        missing = {md5 for md5 in md5s if not self.path(md5).is_file()}
        if not missing:
            return None
        try:
            with self._writing() as aside:
                wanted = {md5 for md5 in missing if not self.path(md5).is_file()}
                remote = self.repo.cloud.get_remote_odb()
                fetched = LocalHashFileDB(localfs, str(aside))
                ids = {HashInfo("md5", md5) for md5 in wanted}
                self.repo.cloud.transfer(remote, fetched, ids, verify=remote.verify, src_index=get_index(remote))
                for md5 in wanted:
                    if (file := Path(fetched.oid_to_path(md5))).is_file():
                        self.path(md5).parent.mkdir(parents=True, exist_ok=True)
                        file.chmod(0o444)
                        os.replace(file, self.path(md5))
        except NoRemoteError:
            return "not in DVC's cache, and no DVC remote is configured (`dvc remote add -d NAME URL`)"
        except Exception as error:
            return f"the DVC remote {self.remote()!r} failed ({type(error).__name__}: {error})"
        return None if self.has(missing) else f"neither in DVC's cache nor in the DVC remote {self.remote()!r}"

    @contextmanager
    def _writing(self) -> Iterator[Path]:
        """Hold the one who writes into this cache; gives the name of a folder on its file system, not there yet."""
        place = Path(self.objects.path).parent / "fetching"
        place.mkdir(parents=True, exist_ok=True)
        with (place / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            aside = place / "files"
            shutil.rmtree(aside, ignore_errors=True)  # of one who was killed
            try:
                yield aside
            finally:
                shutil.rmtree(aside, ignore_errors=True)

    def drop(self, md5: str) -> None:
        """Remove one object from the cache, e.g. one whose content is not what its name says."""
        with suppress(FileNotFoundError):
            self.path(md5).unlink()

    def links(self) -> list[str]:
        """Link types that work between cache and store, best first; `copy` if none does.

        Tried out with a small file. If DVC's configured types are not usable, or a better one is, the
        outcome is written to .dvc/config.local: DVC itself, asked for a type that the file system lacks,
        silently keeps a full copy. A usable type that somebody put there stays.
        """
        target = self.root.resolve() / "store" / "link"
        usable = test_links(list(LINKS), localfs, self.objects.path, localfs, str(target)) or ["copy"]
        local = self.repo.config.read("local").get("cache", {}).get("type")
        configured = local or self.objects.cache_types
        configured = configured.split(",") if isinstance(configured, str) else list(configured)
        if configured[0] != usable[0]:
            if local and configured[0] in usable:
                usable = [configured[0], *(link for link in usable if link != configured[0])]
            else:
                with self.repo.config.edit("local") as settings:
                    settings.setdefault("cache", {})["type"] = ",".join(usable)
        self.objects.cache_types = usable
        return usable

    def place(self, md5: str, target: Path, links: list[str]) -> None:
        """Make `target` the cached file with this MD5, by the best link type there is; atomic."""
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            try:
                transfer(localfs, str(self.path(md5)), localfs, str(aside), links=[*links, "copy"])
            except OSError as error:
                if error.errno != errno.EMLINK:
                    raise
                # a small file that tens of thousands of checkpoints share has as many names as it can have
                transfer(localfs, str(self.path(md5)), localfs, str(aside), links=["copy"])
            os.replace(aside, target)
        finally:
            aside.unlink(missing_ok=True)

    # ---- lists -----------------------------------------------------------------------------------
    def pointer(self, stage: str) -> Path:
        """The .dvc file of a stage."""
        return self.root / "store" / f"{stage}.dvc"

    def listed(self, md5: str) -> Listing | None:
        """Content of a list; None if it is neither in the cache nor in the remote."""
        if self.pull([md5]) is not None:
            return None
        found: Listing = {}
        for entry in json.loads(self.path(md5).read_text(encoding="utf-8")):
            name, _, path = entry["relpath"].partition("/")
            found.setdefault(name, {})[path] = entry["md5"]
        return found

    def listing(self, stage: str) -> Listing | None:
        """What DVC lists of a stage: empty if it has no .dvc file, None if its list is nowhere to be had."""
        pointer = self.pointer(stage)
        return self.listed(pointed(pointer.read_text(encoding="utf-8"))) if pointer.exists() else {}

    def keep(self, listing: Listing) -> str:
        """Put a list into the cache; returns its name `<md5>.dir`."""
        entries = [
            {"md5": md5, "relpath": f"{name}/{path}"} for name, files in listing.items() for path, md5 in files.items()
        ]
        text = json.dumps(sorted(entries, key=lambda entry: entry["relpath"]), sort_keys=True)
        md5 = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest() + ".dir"
        if not self.path(md5).exists():
            write_text(self.path(md5), text)
            self.path(md5).chmod(0o444)
        return md5

    def add(self, stage: str, payloads: Mapping[str, Mapping[str, Mapping]]) -> None:
        """Take payloads (name -> file -> description, as sidecars have it) into cache and list.

        Their files are not read: the caller knows that they are what their descriptions say. The cache gets
        a link to each, or a copy and the store a link to it, as the file system allows; equal files are kept
        once. The caller holds `lock`.
        Errors: UserError if the stage's list is nowhere (its other entries would be lost).
        """
        listing = self.listing(stage)
        if listing is None:
            raise UserError(
                f"{self.pointer(stage)}: its list is neither in DVC's cache nor in a remote, so entries would be "
                "lost; let whoever made it `dvc push`, or `git checkout` an older one"
            )
        links, added = self.links(), 0
        for name, files in payloads.items():
            added += 0 if name in listing else sum(about["bytes"] for about in files.values())
            folder = self.root.resolve() / "store" / stage / name
            paths = [str(folder / path) for path in files]
            md5s = [about["md5"] for about in files.values()]
            with self._writing():
                self.objects.add(paths, localfs, md5s, hardlink=links[0] == "hardlink")
            for path, md5 in zip(paths, md5s, strict=True):
                if not self._linked(path, md5, links[0]):
                    self.place(md5, Path(path), links)
            self.repo.state.save_many(
                [(path, HashInfo("md5", md5), None) for path, md5 in zip(paths, md5s, strict=True)], localfs
            )
            listing[name] = {path: about["md5"] for path, about in files.items()}
        self.write(stage, listing, added)

    def _linked(self, path: str, md5: str, link: str) -> bool:
        if link in ("hardlink", "symlink"):
            return os.path.samefile(path, self.path(md5))
        return True

    def write(self, stage: str, listing: Listing, added: int | None = None) -> None:
        """Write a stage's list and point to it. `added`: bytes that came to it; None: its size is not known."""
        pointer = self.pointer(stage)
        if listing:
            write_text(pointer, self.pointing(pointer, stage, listing, added))
        else:
            pointer.unlink(missing_ok=True)

    def pointing(self, pointer: Path, folder: str, listing: Listing, added: int | None) -> str:
        """Text of a .dvc file for `folder` beside it, with a new list; what else the file says stays."""
        text = pointer.read_text(encoding="utf-8") if pointer.exists() else ""
        content = yaml.safe_load(text) or {"outs": [{}]}
        out = content["outs"][0]
        known = out.pop("size", None if text else 0)
        if added is not None and known is not None:
            out["size"] = known + added
        nfiles = sum(map(len, listing.values()))
        out |= {"md5": self.keep(listing), "nfiles": nfiles, "hash": "md5", "path": folder}
        return yaml.safe_dump(content, sort_keys=False)

    @contextmanager
    def lock(self, seconds: float = 600.0):
        """Hold DVC's lock of this folder; waits for another DVC command to end.

        Errors: dvc.lock.LockError after `seconds`.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.repo.lock.lock()
                break
            except LockError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        try:
            yield
        finally:
            self.repo.lock.unlock()


def pointed(text: str) -> str:
    """The list that a .dvc file names; UserError if it names none."""
    try:
        return yaml.safe_load(text)["outs"][0]["md5"]
    except (yaml.YAMLError, KeyError, IndexError, TypeError):
        raise UserError(
            "a .dvc file under store/ names no list (a merge conflict in it?); `git checkout` one side, run "
            "`make setup` for the merge driver, and merge again"
        ) from None
