"""Merge driver of git for DVC's lists of payloads (`store/<stage>.dvc`), set up by `make setup`.

DVC's own driver needs the lists of both sides in the local cache; this one fetches them from the remote.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from grafting.errors import UserError
from grafting.provenance.cache import Cache, Listing, pointed
from grafting.provenance.files import write_text


def merged(base: Listing, ours: Listing, theirs: Listing) -> Listing:
    """What both sides list, without what one of them dropped.

    Errors: UserError if both list a payload of one name with other files; equal names have equal content.
    """
    result = {}
    for name in ours.keys() | theirs.keys():
        if name in base and not (name in ours and name in theirs):
            continue  # one side dropped it
        sides = [side[name] for side in (ours, theirs) if name in side and side[name] != base.get(name)]
        if len(sides) == 2 and sides[0] != sides[1]:
            raise UserError(f"{name}: the two sides list other files for it")
        result[name] = sides[0] if sides else base[name]
    return result


def merge_files(cache: Cache, ancestor: Path, our: Path, their: Path) -> None:
    """Merge three versions of a .dvc file into `our`. Errors: UserError; `our` is then as it was."""
    listings = []
    for path in (ancestor, our, their):
        text = path.read_text(encoding="utf-8")
        listing = cache.listed(pointed(text)) if text.strip() else {}
        if listing is None:
            raise UserError(
                f"the list {pointed(text)} is neither in DVC's cache nor in its remote; `dvc push` it first"
            )
        listings.append(listing)
    folder = yaml.safe_load(our.read_text(encoding="utf-8"))["outs"][0]["path"]
    write_text(our, cache.pointing(our, folder, merged(*listings), None))


def main(arguments: list[str]) -> int:
    """`%O %A %B` of git; exit status 1 leaves a conflict to the user."""
    try:
        with Cache(Path()) as cache:
            merge_files(cache, *map(Path, arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
