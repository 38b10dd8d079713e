"""A host's cable that this process holds: it loses, delays or refuses the frames that pass.

In place of `tc netem`, which not every kernel has, and for what that cannot do: cuts in one
direction between two hosts, and packets of which only the small ones pass. The frames of one host
go over a TAP device while a `Wire` is open; the cables of the others are as they were.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass

from tests.integration.hosts import Host, ip

__all__ = ["EVERYBODY", "Weather", "Wire", "send_plain_frames"]

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_SIOCETHTOOL = 0x8946
# Checksums, segmentation by TSO and by GSO: else a frame is not what it is on a real cable.
_OFFLOADS = (0x17, 0x1F, 0x24)
_ETH_P_ALL, _PACKET_OUTGOING = 0x0003, 4
_FRAME = 65536

EVERYBODY = frozenset({"everybody"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What becomes of the frames between a host and the others.

    Attributes:
        delay: seconds, each way.
        loss: share of the frames, 0 to 1, each way.
        largest: bytes of an IP packet; larger ones are lost, and nobody is told. 0: no limit.
        mute: the addresses to which nothing goes; `EVERYBODY`: none of it goes anywhere.
        deaf: the addresses from which nothing comes.
    """

    delay: float = 0.0
    loss: float = 0.0
    largest: int = 0
    mute: frozenset[str] = frozenset()
    deaf: frozenset[str] = frozenset()

    def passes(self, frame: bytes, *, leaves: bool, chance: float) -> bool:
        """Whether this frame arrives; ``chance``, of 0 to 1, decides where it may be lost."""
        cut = self.mute if leaves else self.deaf
        other = _ends(frame)[leaves]
        if cut is EVERYBODY or other in cut:
            return False
        if self.largest and len(frame) - 14 > self.largest:
            return False
        return chance >= self.loss


def _ends(frame: bytes) -> tuple[str, str]:
    """Its sender and its receiver, as addresses; "" where it is not of IPv4."""
    kind = frame[12:14]
    if kind == b"\x08\x00":
        return socket.inet_ntoa(frame[26:30]), socket.inet_ntoa(frame[30:34])
    if kind == b"\x08\x06":
        return socket.inet_ntoa(frame[28:32]), socket.inet_ntoa(frame[38:42])
    return "", ""


class Wire:
    """A context manager; when it ends, the host's cable is in the switch again."""

    def __init__(self, host: Host, weather: Weather, seed: int = 0, network: int = 1) -> None:
        self._end, self._tap = f"v{network}h{host.number}", f"t{network}h{host.number}"
        self._switch = f"br{network}"
        self._weather = weather
        self._random = random.Random(seed)
        self._waiting: list[tuple[float, int, bool, bytes]] = []
        self._count = 0
        self._ended, self._end_now = os.pipe()
        self.lost = 0

    def __enter__(self) -> Wire:
        self._inside = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        wanted = struct.pack("16sH14x", self._tap.encode(), _IFF_TAP | _IFF_NO_PI)
        fcntl.ioctl(self._inside, _TUNSETIFF, wanted)
        self._outside = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        self._outside.bind((self._end, _ETH_P_ALL))
        self._outside.setblocking(False)
        ip(f"link set {self._end} nomaster")
        ip(f"link set {self._tap} master {self._switch} up")
        self._thread = threading.Thread(target=self._run, name=f"wire-{self._end}", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        os.write(self._end_now, b"x")
        self._thread.join()
        os.close(self._inside)
        self._outside.close()
        os.close(self._ended)
        os.close(self._end_now)
        ip(f"link set {self._end} master {self._switch}")

    def _run(self) -> None:
        while True:
            left = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            outside = self._outside.fileno()
            ready, _, _ = select.select([outside, self._inside, self._ended], [], [], left)
            if self._ended in ready:
                return
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, leaves, frame = heapq.heappop(self._waiting)
                self._send(frame, leaves=leaves)
            if outside in ready:
                frame, sender = self._outside.recvfrom(_FRAME)
                # A packet socket is also given what it sends itself.
                if sender[2] != _PACKET_OUTGOING:
                    self._take(frame, leaves=True)
            if self._inside in ready:
                self._take(os.read(self._inside, _FRAME), leaves=False)

    def _take(self, frame: bytes, *, leaves: bool) -> None:
        if not self._weather.passes(frame, leaves=leaves, chance=self._random.random()):
            self.lost += 1
        elif self._weather.delay:
            self._count += 1
            due = time.monotonic() + self._weather.delay
            heapq.heappush(self._waiting, (due, self._count, leaves, frame))
        else:
            self._send(frame, leaves=leaves)

    def _send(self, frame: bytes, *, leaves: bool) -> None:
        try:
            if leaves:
                os.write(self._inside, frame)
            else:
                self._outside.send(frame)
        except OSError:  # A cable that is full, or pulled out, loses it.
            self.lost += 1


def send_plain_frames(host: Host, device: str) -> None:
    """Let a device of the host send frames as a real cable has them."""
    with host.new_socket() as line:
        for setting in _OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", setting, 0), 8)
            request = struct.pack("16sP16x", device.encode(), ctypes.addressof(value))
            fcntl.ioctl(line, _SIOCETHTOOL, request)
