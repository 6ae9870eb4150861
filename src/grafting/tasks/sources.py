"""Public data files under data_root: found by name, checked by size at once and by SHA-256 when read."""

import hashlib
import os
from pathlib import Path

from grafting.errors import UserError

ROOT_VARIABLE = "GRAFTING_DATA_ROOT"


def check_sources(folder: str, files: list[dict], data_root: str | Path | None = None) -> list[Path]:
    """Paths of the files {"name", "sha256", "bytes"?} in data_root/folder; looks at existence and size only.

    Fast enough to call before anything starts. `data_root` None: the environment variable GRAFTING_DATA_ROOT.
    UserError: no data root, a file is missing, or its size is not the stated one.
    """
    root = data_root or os.environ.get(ROOT_VARIABLE)
    if not files:
        raise UserError(f"data source {folder}: no files are named; list them in sources.lock.yaml")
    if not root:
        names = ", ".join(f"{folder}/{file['name']}" for file in files)
        raise UserError(f"these data files are needed: {names}; set data_root to the folder that holds {folder}/")
    paths = []
    for file in files:
        path = Path(root) / folder / file["name"]
        if not path.is_file():
            raise UserError(f"data file missing: {path}; put it there, or set data_root to the folder with {folder}/")
        size = path.stat().st_size
        if size == 0:
            raise UserError(f"data file empty: {path}; fetch it again")
        if file.get("bytes") is not None and size != file["bytes"]:
            raise UserError(
                f"data file {path} has {size} bytes, sources.lock.yaml says {file['bytes']}; "
                "fetch the stated version, or lock this one (grafting sources)"
            )
        paths.append(path)
    return paths


def read_sources(folder: str, files: list[dict], data_root: str | Path | None = None) -> dict[str, bytes]:
    """Name -> bytes of each file, SHA-256 verified. UserError as in `check_sources`, and on a wrong hash.

    Files that name a Hub data set ("hub", "revision", "path") come from there; the revision pins their bytes.
    """
    contents = {}
    remote = [file for file in files if "hub" in file]
    for file in remote:
        from grafting import hub

        contents[file["name"]] = hub.file(file["hub"], file["revision"], file["path"]).read_bytes()
    files = [file for file in files if "hub" not in file]
    if remote and not files:
        return contents
    for file, path in zip(files, check_sources(folder, files, data_root), strict=True):
        data = path.read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if not file.get("sha256"):
            raise UserError(f"data file {path}: no sha256 stated; lock it in sources.lock.yaml (found {found})")
        if found != file["sha256"]:
            raise UserError(
                f"data file {path}: sha256 is {found}, sources.lock.yaml says {file['sha256']}; "
                "fetch the stated version, or lock this one (grafting sources)"
            )
        contents[file["name"]] = data
    return contents
