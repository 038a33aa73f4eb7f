"""A small program that asks a prepared process (`tests.prepared`), which has already imported torch and DeepSpeed, to
fork itself and run a Python program. It ends when the fork ends.

pytest-xdist starts it for each of its workers, and tests of the documentation start it for each command `tune`.

    python -IS forked_client.py SOCKET -c PROGRAM
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
