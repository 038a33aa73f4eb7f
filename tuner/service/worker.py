"""A worker process of the planning service, which reads requests from stdin and writes results to stdout.

    python -m ebbtide.tuner.service.worker NICENESS BYTES

NICENESS is added to the niceness of the process, which lowers its CPU priority. BYTES limits how much the address
space of the process may grow.

Data is JSON in both directions and never pickled, so that no part of a request can be executed. A message is a tag, a
length and that many bytes. The server stops a worker by killing it. A worker ends by itself when its server has ended
(stdin is closed), even during a computation.
"""

import gc
import json
import os
import queue
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import psutil
from ebbtide.simulator.rules import BrokenRule, RuleError, broken
from pydantic import ValidationError

HEAD = struct.Struct(">cI")
RESULT, TEXT, INVALID, BROKEN, PROGRESS = b"r", b"t", b"i", b"b", b"p"
PROGRESS_EVERY_S = 0.2
# A worker computes this answer when it starts, which imports and compiles everything that answers need. A larger model
# would need the same code, and its plan search would take seconds.
FIRST = {"call": "answer", "body": {"model": {"layers": 2, "hidden": 64, "heads": 2, "vocabulary": 100}, "gpus": 4}}


def write_frame(stream: BinaryIO, tag: bytes, payload: bytes) -> None:
    """Write one message (a tag, a length and the bytes) to the pipe between the server and a worker process, and flush
    the pipe. If the server has ended, end this process.
    """
    try:
        stream.write(HEAD.pack(tag, len(payload)) + payload)
        stream.flush()
    except BrokenPipeError:  # the thread that reads stdin may see the server's end later
        os._exit(0)


def read_frame(stream: BinaryIO) -> tuple[bytes, bytes] | None:
    """Read the next message from the pipe between the server and a worker process. Return the tag and the bytes, or
    None if the pipe was closed.
    """
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    tag, size = HEAD.unpack(head)
    payload = stream.read(size)
    return (tag, payload) if len(payload) == size else None


def calls() -> dict[str, tuple[Any, Callable[..., Any]]]:
    """Return a dict from each kind of request to a worker process to the request's type and the function
    that answers it.
    """
    from ebbtide.tuner.service import answers, comparisons, report, requests

    return {
        "simulate": (requests.Simulate, answers.simulate),
        "answer": (requests.Answer, answers.answer),
        "ways-out": (requests.Scenario, answers.ways_out),
        "what-if": (requests.WhatIf, answers.what_if),
        "sweep": (comparisons.SweepCall, comparisons.sweep),
        "cards": (comparisons.CardsCall, comparisons.cards),
        "goodput": (requests.Goodput, answers.goodput),
        "trace": (requests.Planned, report.trace),
        "report": (report.ReportCall, report.html_of_call),
        "job/plan": (requests.PlanJob, answers.plan_job),
        "job/what-if": (requests.WhatIfJob, answers.what_if),
        "job/search": (requests.SearchJob, answers.search_job),
    }


class _Progress:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._last_s = stream, 0.0

    def __call__(self, share: float, note: str) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s >= PROGRESS_EVERY_S:
            self._last_s = now_s
            text = json.dumps({"share": share, "note": note})
            write_frame(self._stream, PROGRESS, text.encode())


def run(call: dict[str, Any], table: dict[str, Any], progress: Callable[..., None]) -> Any:
    """Answer one request in a worker process. Return a pair: a tag, and the bytes of the result or of the error.

    The tag tells a result, an error of the request, and an error of the program apart.
    """
    request = None
    try:
        request, function = table[call["call"]]
        result = function(request.model_validate(call["body"]), progress)
        if isinstance(result, str):
            return TEXT, result.encode()
        return RESULT, json.dumps(result, allow_nan=False).encode()
    except ValidationError as error:
        return _invalid(*broken(error, call["body"], request))
    except RuleError as error:
        return _invalid(BrokenRule(error.key, str(error)))
    except MemoryError:
        rule = "accumulation, layers and subgroups must fit into a worker's memory, but take more: lower accumulation"
        return _invalid(BrokenRule("accumulation", rule, str(call["body"].get("accumulation"))))
    # Raised by a library, with a text that would not help the user.
    except (ValueError, ArithmeticError, RecursionError):
        traceback.print_exc()
        rule = "the numbers must stay within what can be computed, but these do not"
        return _invalid(BrokenRule("", rule))
    except Exception:  # reported to the client and in the log. The worker goes on
        traceback.print_exc()
        return BROKEN, b"an error of ebbtide's own, which the server's log tells"


def _invalid(*rows: BrokenRule) -> tuple[bytes, bytes]:
    return INVALID, json.dumps(rows).encode()


def limit_memory(extra_bytes: int) -> None:
    """Limit how much the address space of this worker process may grow. Beyond the limit, Python raises MemoryError."""
    import resource

    taken = psutil.Process().memory_info().vms
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + extra_bytes, hard))


def _listen(stream: BinaryIO, inbox: queue.SimpleQueue[bytes]) -> None:
    while (frame := read_frame(stream)) is not None:
        inbox.put(frame[1])
    os._exit(0)


def main() -> None:
    """Run a worker process: answer requests until stdin ends."""
    niceness, extra_bytes = int(sys.argv[1]), int(sys.argv[2])
    os.nice(niceness)
    # Libraries may print. Their output must not get between the frames of the protocol.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, inbox), daemon=True).start()
    table = calls()
    run(FIRST, table, lambda *_: None)
    # The objects that libraries made live as long as the process. Scanning them for garbage after every few schedules
    # would take a fifth of the time.
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        limit_memory(extra_bytes)
    write_frame(out, RESULT, b"ready")
    while True:
        write_frame(out, *run(json.loads(inbox.get()), table, _Progress(out)))


if __name__ == "__main__":
    main()
