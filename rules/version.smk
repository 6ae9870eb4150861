"""Before and after a run: the warm process for local jobs, and DVC for what was made."""

import subprocess

from grafting.provenance import warm

WARM = []


def begin():
    """Start the warm process where jobs run on this machine; cluster nodes import for themselves."""
    STORE.sweep_aside()
    if workflow.is_main_process and not workflow.non_local_exec:
        WARM.append(warm.start())


def end():
    """Stop the warm process; put new payloads under version control, also after a failed run."""
    while WARM:
        warm.stop(*WARM.pop())
    subprocess.run([sys.executable, "-m", "grafting.provenance.versioning"], check=False)


onstart:
    begin()


onsuccess:
    end()


onerror:
    end()
