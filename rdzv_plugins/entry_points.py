"""The entry points of ``torchrun.handlers``: one factory a backend.

torch loads all of them at each start, while ``torch.distributed.elastic.rendezvous`` is still being
imported. So nothing of this package, of a client library or of torch is imported before a handler
is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

    Creator = Callable[[RendezvousParameters], RendezvousHandler]


# torch's registry takes a second registration of a name only if it is the same object.
@cache
def _creator(backend: str) -> Creator:
    def create(params: RendezvousParameters) -> RendezvousHandler:
        from rdzv_plugins.handler import create_handler

        return create_handler(backend, params)

    return create


def redis() -> Creator:
    """``--rdzv-backend=redis``."""
    return _creator("redis")


def zookeeper() -> Creator:
    """``--rdzv-backend=zookeeper``."""
    return _creator("zookeeper")


def dynamodb() -> Creator:
    """``--rdzv-backend=dynamodb``."""
    return _creator("dynamodb")


def consul() -> Creator:
    """``--rdzv-backend=consul``."""
    return _creator("consul")


def etcd_v3() -> Creator:
    """``--rdzv-backend=etcd-v3``."""
    return _creator("etcd-v3")
