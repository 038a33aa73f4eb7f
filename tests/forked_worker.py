"""A small program that pytest-xdist starts for each of its workers. It asks a prepared process (`tests.prepared`),
which has already imported torch and DeepSpeed, to fork the worker. It ends when the worker ends.

    python -IS forked_worker.py SOCKET -u -c PROGRAM
"""

import json
import os
import signal
import socket
import sys

signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, pytest ends the worker
_, address, *words = sys.argv
request = {"words": words[words.index("-c") :], "env": dict(os.environ), "cwd": os.getcwd(), "finalize": False}
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as prepared:
    prepared.connect(address)
    socket.send_fds(prepared, [json.dumps(request).encode()], [0, 1, 2])
    told = prepared.recv(100)
sys.exit(int(told) if told else 1)
