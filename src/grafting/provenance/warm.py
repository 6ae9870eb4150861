"""A warm process that has imported torch and transformers and forks one child per job.

Importing them costs three to four CPU seconds, more than many a small job. The Snakefile starts one warm
process for local runs and stops it at the end; `delegate` hands it a job over a Unix socket whose path
stands in GRAFTING_WARM. Without it (cluster nodes, single commands) a job imports for itself: the result
is the same. The warm process never starts threads or touches a GPU before it forks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time

VARIABLE = "GRAFTING_WARM"
#: What reaches the client is meant for the job: those that stop it, and those that saving.signal may name.
FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGURG,
    signal.SIGXCPU,
)
PRELOADED = (
    "torch",
    "torch._dynamo",  # the first optimiser imports it: more than a second
    "numpy",
    "accelerate",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
    "safetensors.torch",
    "grafting.provenance.runner",
    # the rooms as they are when the run starts, as their digests in the plan are; the report's libraries
    # are heavy and needed once, so it imports for itself
    "grafting.evaluation.frontier",
    "grafting.evaluation.select",
    "grafting.evaluation.stage",
    "grafting.evaluation.suites",
    "grafting.merging.deltas",
    "grafting.merging.stage",
    "grafting.merging.sweep",
    "grafting.models.stage",
    "grafting.rollouts.stage",
    "grafting.sensitivity.stage",
    "grafting.tasks.mmlu",
    "grafting.tasks.science",
    "grafting.tasks.stage",
    "grafting.tasks.tiny",
    "grafting.training.lineage",
    "grafting.training.objectives.self_distillation",
    "grafting.training.stage",
)


def delegate(target: str, arguments: list[str]) -> int | None:
    """Let the warm process run a job; None if there is none (the caller then runs it itself)."""
    address = os.environ.get(VARIABLE)
    if not address:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(address)
        request = json.dumps({"target": target, "arguments": arguments, "cwd": os.getcwd()}).encode()
        socket.send_fds(connection, [len(request).to_bytes(4, "big") + request], [0, 1, 2])
        stream = connection.makefile("r")
        pid = int(stream.readline())
    except (OSError, ValueError):
        connection.close()
        return None

    received: list[int] = []

    def forward(number: int, _frame) -> None:
        received.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    try:
        status = stream.readline()
    except OSError:
        status = ""
    for number in FORWARDED:  # the job has ended: nothing is to change its status any more
        signal.signal(number, signal.SIG_IGN)
    if status.strip():
        return int(status)
    reason = f"ended by {signal.Signals(received[0]).name}" if received else "killed (out of memory?)"
    with contextlib.suppress(OSError):
        print(f"{' '.join(arguments)}: the job was {reason}; run again to go on", file=sys.stderr)
    return 128 + received[0] if received else 137


def _receive(connection: socket.socket) -> tuple[dict, list[int]]:
    data, descriptors, _, _ = socket.recv_fds(connection, 65536, 3)
    length = int.from_bytes(data[:4], "big")
    data = data[4:]
    while len(data) < length:
        data += connection.recv(length - len(data))
    return json.loads(data), descriptors


def _leave_with(connection: socket.socket) -> None:
    """End this child when the one who asked for it is gone, so that it saves its work and leaves."""
    with contextlib.suppress(OSError):
        connection.recv(1)  # a client never sends more than its request
    os.kill(os.getpid(), signal.SIGTERM)


def _child(connection: socket.socket) -> int:
    request, descriptors = _receive(connection)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for descriptor, place in zip(descriptors, (0, 1, 2), strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.chdir(request["cwd"])
    connection.sendall(f"{os.getpid()}\n".encode())
    threading.Thread(target=_leave_with, args=(connection,), daemon=True).start()
    from grafting.provenance.runner import run

    return run(request["target"], request["arguments"])


def serve(address: str, parent: int) -> None:
    """Serve until `parent` is no longer our parent."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(64)
    listener.settimeout(1.0)
    for name in PRELOADED:
        importlib.import_module(name)
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        connection.settimeout(None)
        if os.fork() == 0:
            listener.close()
            status = 1
            try:
                status = _child(connection)
                sys.stdout.flush()
                sys.stderr.flush()
                connection.sendall(f"{status}\n".encode())
            finally:
                os._exit(status)
        connection.close()
    listener.close()
    shutil.rmtree(os.path.dirname(address), ignore_errors=True)


def start() -> tuple[int, str]:
    """Start a warm process as our child and point GRAFTING_WARM to it; returns its pid and socket."""
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="grafting-warm-")
    address = os.path.join(folder, "socket")
    process = subprocess.Popen(
        [sys.executable, "-m", "grafting.provenance.warm", address, str(os.getpid())],
        stdin=subprocess.DEVNULL,
    )
    while not os.path.exists(address) and process.poll() is None:
        time.sleep(0.02)
    os.environ[VARIABLE] = address
    return process.pid, address


def stop(pid: int, address: str) -> None:
    """End the warm process and remove its socket."""
    os.environ.pop(VARIABLE, None)
    try:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
    shutil.rmtree(os.path.dirname(address), ignore_errors=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
