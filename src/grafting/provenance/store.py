"""Where artefacts lie: sentinel `provenance/<id>.json` (in git), payload `store/<id>/` (in DVC)."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from grafting.errors import UserError
from grafting.provenance import integrity
from grafting.provenance.files import write_json
from grafting.provenance.hashing import describe

#: Environment variable with the name of the run, set for runs on a cluster; their jobs inherit it.
RUN = "GRAFTING_RUN"


class Store:
    """The artefacts of one study folder.

    An artefact is named by its id `<stage>/<name>-<key>`; a reference adds an optional subfolder
    of its payload: `<id>:<subfolder>`.
    """

    def __init__(self, root: Path | str = ".") -> None:
        self.root = Path(root)

    def sentinel(self, job_id: str) -> Path:
        """Path of the sentinel; it exists exactly if the artefact is complete.

        A report has no payload in the store: it is exported to `results/`, and so is its sentinel, which
        therefore says which report is exported there. It holds nothing else, and the sidecar is
        `results/report.json`: git would take two branches' long sentinels for one file renamed twice, a conflict.
        """
        if job_id.startswith("report/"):
            return self.root / "results" / f"{job_id.replace('/', '-')}.json"
        return self.root / "provenance" / f"{job_id}.json"

    def _sidecar(self, job_id: str) -> Path:
        return self.root / "results" / "report.json" if job_id.startswith("report/") else self.sentinel(job_id)

    def work(self, job_id: str) -> Path:
        """Folder of a job's resume state."""
        return self.root / "work" / job_id

    def read(self, job_id: str) -> dict:
        """The sidecar, which is the sentinel's content; UserError if it is absent or no JSON."""
        path = self._sidecar(job_id)
        try:
            sidecar = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(sidecar, dict):
                return sidecar
            raise UserError(f"{path}: holds no mapping; delete it and run snakemake again")
        except FileNotFoundError:
            raise UserError(f"{path}: no such artefact; run snakemake to make it") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not valid JSON ({error}); delete it and run snakemake again") from None

    def target(self, job_id: str) -> str:
        """The id under which the payload really lies: a selected artefact is a link to the chosen one."""
        seen = []
        while (link := self.read(job_id).get("link")) is not None:
            seen.append(job_id)
            if link in seen:
                raise UserError(f"{self.sentinel(job_id)}: links in a circle; delete {', '.join(seen)}")
            job_id = link
        return job_id

    def folder(self, reference: str) -> Path:
        """Where a payload (or its subfolder) lies, or would lie if it were here; links are followed."""
        job_id, _, subfolder = reference.partition(":")
        return self.root / "store" / self.target(job_id) / subfolder

    def payload(self, reference: str) -> Path:
        """Folder of one payload; see `payloads`."""
        return self.payloads([reference])[0]

    def payloads(self, references: Sequence[str]) -> list[Path]:
        """Folders of payloads (or of their subfolders), whole and as their sidecars describe them.

        Those that are absent are fetched from DVC's cache or remote, together. Errors: UserError that names one
        that is nowhere to be had, or whose files are not what was published.
        """
        targets = list(dict.fromkeys(self.target(reference.partition(":")[0]) for reference in references))
        files = {target: self.read(target).get("payload", {}) for target in targets}
        lacking = {target: files[target] for target in targets if self._lacks(target, files[target])}
        reasons = {}
        if lacking:
            from grafting.provenance.fetch import bring

            reasons = bring(self, lacking)
        for target in targets:
            folder = self.root / "store" / target
            if self._lacks(target, files[target]):
                raise UserError(
                    f"{folder}: the payload of {target} is absent although its sentinel exists "
                    f"({reasons.get(target, 'it vanished')}); bring it back with `.venv/bin/dvc checkout` or "
                    f"`dvc pull`, or let `grafting repair` remove {self.sentinel(target)} so that it is made again"
                )
            if wrong := integrity.altered(self.intact(target), folder, files[target]):
                raise UserError(
                    f"{folder / wrong[0]}: altered or cut off, its size or hash is not the recorded one; "
                    "`grafting repair --deep` brings the payload back from DVC, or has it made again"
                )
        return [self.folder(reference) for reference in references]

    def _lacks(self, target: str, files: dict[str, dict]) -> bool:
        folder = self.root / "store" / target
        return not folder.exists() or bool(integrity.absent(folder, files))

    def intact(self, job_id: str) -> Path:
        """Where is noted which files of a payload were found unaltered, and when they had been changed last."""
        return self.root / "work" / "intact" / f"{job_id}.json"

    def code(self, code: str) -> Path:
        """Path of the record of what a code digest is made of."""
        return self.root / "provenance" / "code" / f"{code}.json"

    def keep_code(self, code: str, manifest: Callable[[], dict | None]) -> None:
        """Record what a code digest is made of, once, so that `grafting why` can name the module that changed."""
        if not self.code(code).exists() and (content := manifest()) is not None:
            write_json(self.code(code), content)

    def with_key(self, stage: str, key: str) -> str | None:
        """Id of a complete artefact of this stage with this key, whatever its readable name."""
        found = sorted((self.root / "provenance" / stage).glob(f"*-{key}.json"))
        return f"{stage}/{found[0].stem}" if found else None

    def with_name(self, stage: str, name: str) -> list[str]:
        """Ids of complete artefacts of this stage with this readable name, whatever their key."""
        paths = sorted((self.root / "provenance" / stage).glob(f"{name}-*.json"))
        return [f"{stage}/{path.stem}" for path in paths if path.stem.rpartition("-")[0] == name]

    def aside(self, job_id: str) -> Path:
        """A fresh folder on the store's own file system, to be published later by `publish`."""
        path = self.root / "store" / ".aside" / f"{job_id.replace('/', '~')}.{socket.gethostname()}.{os.getpid()}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def sweep_aside(self) -> None:
        """Remove what killed jobs of this machine left aside."""
        for path in (self.root / "store" / ".aside").glob(f"*.{socket.gethostname()}.*"):
            pid = path.name.rpartition(".")[2]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc").exists():
                shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def lock(self, stage: str, key: str) -> Iterator[None]:
        """Hold the one who makes this artefact; others wait here. The empty file stays: removing it races."""
        path = self.root / "work" / "locks" / f"{stage}-{key}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def publish(self, job_id: str, aside: Path) -> dict[str, dict]:
        """Move a finished payload to its place by one rename; returns size and hash of each file.

        If another process published the same job first, its payload stays and ours is dropped:
        equal ids have equal content.
        """
        files = describe(aside)
        if not files:
            return files
        place = self.root / "store" / job_id
        if place.exists() and not self.sentinel(job_id).exists() and describe(place) != files:
            # a payload without its sentinel that is not ours either: what an interrupted copy or checkout left
            self.remove(job_id)
        if not self.settle(job_id, aside):
            files = describe(place)
        integrity.note(self.intact(job_id), place, files)
        return files

    def remove(self, job_id: str) -> None:
        """Remove a payload from the store: out of sight by one rename, then file by file."""
        remains = self.aside(job_id + ".remains")
        os.replace(self.root / "store" / job_id, remains)
        shutil.rmtree(remains, ignore_errors=True)
        self.intact(job_id).unlink(missing_ok=True)

    def settle(self, job_id: str, aside: Path) -> bool:
        """Rename a folder to the payload's place; if there is one already, that stays and ours is dropped (False)."""
        place = self.root / "store" / job_id
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(aside, place)
        except OSError:
            if not place.exists():
                raise
            shutil.rmtree(aside, ignore_errors=True)
            return False
        return True

    def write(self, job_id: str, sidecar: dict) -> None:
        """Write the sentinel, last of all and atomically."""
        path = self.sentinel(job_id)
        if (memory := self._memory()) is not None and not job_id.startswith("report/"):
            write_json(memory / f"{job_id}.json", sidecar)
        write_json(self._sidecar(job_id), sidecar)
        if job_id.startswith("report/"):
            write_json(path, {"id": job_id})
            for other in path.parent.glob("report-*.json"):
                if other != path:
                    other.unlink(missing_ok=True)

    # When one job of a bundle fails, Snakemake removes the outputs of the whole bundle, those of its finished jobs
    # too. Their payloads are complete, so a run on a cluster remembers its sentinels aside and puts them back.
    def _memory(self) -> Path | None:
        """Folder in which the running workflow remembers its sentinels; None outside such a run."""
        run = os.environ.get(RUN)
        return self.root / "work" / "runs" / run if run else None

    def recall(self, job_id: str) -> bool:
        """Put back the sentinel of a job that this run has finished already; False if it has not."""
        memory = self._memory()
        if memory is None or not (memory / f"{job_id}.json").exists():
            return False
        sidecar = json.loads((memory / f"{job_id}.json").read_text(encoding="utf-8"))
        place = self.root / "store" / job_id
        for name, about in sidecar.get("payload", {}).items():
            if not (place / name).is_file() or (place / name).stat().st_size != about["bytes"]:
                return False
        write_json(self.sentinel(job_id), sidecar)
        return True

    def recall_all(self) -> int:
        """At the end of a run: put back every sentinel that Snakemake removed, and forget; returns how many."""
        memory = self._memory()
        if memory is None:
            return 0
        ids = [path.relative_to(memory).with_suffix("").as_posix() for path in sorted(memory.rglob("*.json"))]
        count = sum(self.recall(job_id) for job_id in ids if not self.sentinel(job_id).exists())
        shutil.rmtree(memory.parent, ignore_errors=True)
        return count
