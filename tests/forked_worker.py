"""The program that pytest starts for each of its workers: it has the worker forked from a process that has already
imported torch and DeepSpeed, see `tests.prepared`. It runs until the worker ends.

    python -IS forked_worker.py SOCKET -u -c PROGRAM
"""

import json
import os
import socket
import sys

_, address, _, *words = sys.argv
request = {"words": words, "env": dict(os.environ), "cwd": os.getcwd(), "finalize": False}
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as prepared:
    prepared.connect(address)
    socket.send_fds(prepared, [json.dumps(request).encode()], [0, 1, 2])
    told = prepared.recv(100)
sys.exit(int(told) if told else 1)
