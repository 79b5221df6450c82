"""Stands for a command that a fork of ``server.py`` is: waits for its exit code. Where that cannot come into this sandbox, becomes the command.

Run by file name with ``python -I -S``; it may import only the standard library.
"""

import json
import os
import signal
import socket
import struct
import sys

SANDBOX = "/run/forks"  # where a sandbox has the server's address

place, words = sys.argv[1], sys.argv[2:]
asked = json.dumps([words[1:], os.getcwd(), dict(os.environ)]).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect(place)
    socket.send_fds(server, [struct.pack("I", len(asked))], [1, 2])
    server.sendall(asked)
    if server.recv(1) != b"+":
        os.execvp(words[0], words)
    if place == SANDBOX:  # whoever sends it sends it to both children of init; the fork among them passes it on
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda sent, _: server.send(bytes([sent])))
    code = int(server.recv(16) or -signal.SIGKILL)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
os._exit(code)
