#!/bin/sh
# Makes .venv and installs requirements.lock and this package into it, once.
# The stamp holds a checksum of what decides the installation and the place of the environment (its scripts
# hold absolute paths, so an environment that was moved is made anew). Same stamp: nothing to do.
# Needs Python 3.11 or newer; PYTHON=/path/to/python chooses one.
set -eu
cd "$(dirname "$0")/.."

wanted() {
    cat requirements.lock pyproject.toml envs/setup.sh | cksum
    (cd .venv && pwd -P)
}

merge_driver() { # lets git merge lists of payloads and results; only in a repository of our own
    [ "$(git rev-parse --is-inside-work-tree 2>/dev/null)" = true ] || return 0
    [ -z "$(git rev-parse --show-prefix)" ] || return 0
    driver='.venv/bin/python -m grafting.provenance.merging %O %A %B'
    [ "$(git config --local merge.dvc.driver || true)" = "$driver" ] && return 0
    git config --local merge.dvc.name 'lists of payloads under DVC'
    git config --local merge.ours.name 'results: ours, until the next run exports those of the merged study'
    git config --local merge.ours.driver true
    git config --local merge.dvc.driver "$driver" # last: it says that all is set
}

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
        if usable "$candidate"; then
            echo "$candidate"
            return 0
        fi
    done
    found=$("${PYTHON:-python3}" --version 2>&1 || true)
    echo "setup: Python 3.11 or newer with its venv module is needed; ${PYTHON:-python3} is: ${found:-not there}." >&2
    echo "setup: install one (on Debian and Ubuntu: python3 and python3-venv) or name one: make setup PYTHON=..." >&2
    return 2
}

if [ -x .venv/bin/python ] && [ -f .venv/.stamp ] && [ "$(cat .venv/.stamp)" = "$(wanted)" ]; then
    merge_driver
    exit 0
fi

if [ -f .venv/.stamp ] && [ "$(tail -n 1 .venv/.stamp)" != "$(cd .venv && pwd -P)" ]; then
    clear=--clear # made elsewhere and moved here
else
    clear=
fi
if [ -n "$clear" ] || ! usable .venv/bin/python; then
    python=$(find_python) || exit $?
    echo "setup: making .venv with $("$python" --version)"
    "$python" -m venv $clear .venv
fi
rm -f .venv/.stamp
echo "setup: installing requirements.lock into .venv (once; takes some minutes)"
.venv/bin/python -m pip install -qq --disable-pip-version-check --no-input -r requirements.lock
.venv/bin/python -m pip install -qq --disable-pip-version-check --no-input --no-deps --no-build-isolation -e .
merge_driver
wanted >.venv/.stamp
echo "setup: done"
