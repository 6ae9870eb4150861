"""Generated code, run against tests in a process of its own. Off unless the config allows it.

The process has a limit on CPU seconds, wall seconds and memory, an empty environment and an empty working folder, and a
seccomp filter under which it can open files for reading only: it can start no process or thread, open no socket,
write, rename or remove no file. Where such a filter cannot be installed, nothing is run.
"""

import json
import os
import platform
import re
import secrets
import signal
import subprocess
import sys
import tempfile

from grafting.errors import UserError

ALLOWED = "GRAFTING_RUN_GENERATED_CODE"
#: System calls that are refused, per machine: processes, sockets, files other than for reading, other processes.
REFUSED = {
    "x86_64": {
        "arch": 0xC000003E, "open": 2, "openat": 257,
        "numbers": [
            41, 42, 49, 50, 53, 56, 57, 58, 59, 62, 76, 77, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 101, 133,
            155, 161, 165, 166, 200, 234, 258, 259, 260, 263, 264, 265, 266, 268, 272, 280, 285, 308, 310, 311, 316,
            317, 321, 322, 425, 426, 427, 434, 435, 437,
        ],
    },
    "aarch64": {
        "arch": 0xC00000B7, "open": None, "openat": 56,
        "numbers": [
            33, 34, 35, 36, 37, 38, 39, 40, 41, 45, 46, 47, 51, 52, 53, 54, 55, 88, 97, 117, 129, 130, 131, 198, 199,
            200, 201, 203, 220, 221, 268, 270, 271, 276, 277, 280, 281, 425, 426, 427, 434, 435, 437,
        ],
    },
}  # fmt: skip

# Runs inside the limited process. It reads one JSON line (limits, filter, nonce, program) from standard input and
# writes the nonce, which the program cannot know beforehand, behind its verdict.
RUNNER = r"""
import ctypes, json, os, resource, struct, sys
task = json.loads(sys.stdin.readline())
report = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
def limit(what, value):
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))
limit(resource.RLIMIT_CPU, task["seconds"])
limit(resource.RLIMIT_AS, task["memory_bytes"])
limit(resource.RLIMIT_FSIZE, 0)
limit(resource.RLIMIT_CORE, 0)
limit(resource.RLIMIT_NOFILE, 64)
ops = b"".join(struct.pack("<HBBI", *op) for op in task["filter"])
buffer = ctypes.create_string_buffer(ops)
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(len(ops) // 8, ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
filtered = libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.addressof(program), 0, 0) == 0
def tell(verdict):
    # writing to a pipe is no file of the disk: RLIMIT_FSIZE does not apply
    os.write(report, json.dumps([task["nonce"], verdict]).encode() + b"\n")
    os._exit(0)
if not filtered:
    tell("no filter")
try:
    exec(compile(task["program"], "<generated>", "exec"), {"__name__": "__main__"})
except MemoryError:
    tell("out of memory")
except PermissionError:
    tell("forbidden operation")
except AssertionError:
    tell("wrong")
except SyntaxError:
    tell("syntax error")
except BaseException:
    tell("raised an error")
tell("correct")
"""


def seccomp_filter(machine: str) -> list[list[int]]:
    """The filter as [code, jump if true, jump if false, operand] (Linux, struct sock_filter).

    KeyError: unknown machine.
    """
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, refuse, allow = 0x80000000, 0x00050001, 0x7FFF0000
    about = REFUSED[machine]
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    ops = [[load, 0, 0, 4], [equal, 1, 0, about["arch"]], [give, 0, 0, kill], [load, 0, 0, 0]]
    ops += [[at_least, 0, 1, 0x40000000], [give, 0, 0, refuse]]  # the x32 numbers of x86-64
    for number in about["numbers"]:
        ops += [[equal, 0, 1, number], [give, 0, 0, refuse]]
    for name, argument in (("open", 1), ("openat", 2)):
        if about[name] is not None:
            flags = 16 + 8 * argument
            ops += [[equal, 0, 4, about[name]], [load, 0, 0, flags], [any_bit, 0, 1, writing]]
            ops += [[give, 0, 0, refuse], [give, 0, 0, allow]]
    return [*ops, [give, 0, 0, allow]]


def run_program(program: str, seconds: int = 10, memory_mb: int = 1024) -> str:
    """ "correct" if the program runs to its end; else wrong (an assertion), raised an error, timed out, ...

    UserError: this machine has no seccomp filter for the process.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in REFUSED:
        raise UserError(
            f"generated code cannot be shut in on {sys.platform}/{machine} (Linux on x86_64 or aarch64 is needed); "
            "set evaluation.run_generated_code: false"
        )
    nonce = secrets.token_hex(16)
    task = {
        "program": program,
        "nonce": nonce,
        "seconds": seconds,
        "memory_bytes": memory_mb << 20,
        "filter": seccomp_filter(machine),
    }
    with tempfile.TemporaryDirectory(prefix="grafting-code-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", RUNNER],
            cwd=folder,
            env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(json.dumps(task).encode() + b"\n", timeout=2 * seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "timed out"
    for line in out.splitlines():
        try:
            given, verdict = json.loads(line)
        except (ValueError, TypeError):
            continue
        if given == nonce:
            if verdict == "no filter":
                raise UserError(
                    "generated code cannot be shut in: this kernel refuses a seccomp filter; "
                    "set evaluation.run_generated_code: false"
                )
            return verdict
    return "timed out" if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL) else "ended early"


def extract(text: str, entry_point: str, prompt: str) -> str | None:
    """The program in a response: the last fenced block (or the text), behind the prompt if it lacks the function."""
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    code = blocks[-1] if blocks else text
    if not code.strip():
        return None
    return code if re.search(rf"^\s*def\s+{re.escape(entry_point)}\b", code, re.MULTILINE) else prompt + code


def check(text: str, example: dict, options: dict) -> tuple[bool, str]:
    """HumanEval's form: example["answer"] is JSON {"prompt", "test", "entry_point"}; the test defines check(f)."""
    if os.environ.get(ALLOWED) != "1":
        raise UserError(
            "the scorer `code` runs what the model wrote, which is off: set evaluation.run_generated_code: true "
            "if you accept that (it runs in a process without network, files to write, or processes of its own)"
        )
    task = json.loads(example["answer"])
    code = extract(text, task["entry_point"], task["prompt"])
    if code is None:
        return False, "no answer found"
    program = f"{code}\n\n{task['test']}\n\ncheck({task['entry_point']})\n"
    verdict = run_program(program, options.get("seconds", 10), options.get("memory_mb", 1024))
    return verdict == "correct", verdict
