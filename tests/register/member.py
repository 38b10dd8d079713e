"""A member as a process of its own: ``python -m tests.register.member INDEX PORT...``."""

import socket
import sys

from rdzv_plugins.stores._members.server import MemberThread

if __name__ == "__main__":
    index, *ports = map(int, sys.argv[1:])
    places = [[("127.0.0.1", port)] for port in ports]
    listener = socket.create_server(places[index][0])
    member = MemberThread(listener, places, index, "cluster", b"secret")
    member.start()
    member.join()
