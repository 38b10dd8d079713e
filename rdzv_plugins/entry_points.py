"""The entry points of ``torchrun.handlers``: one factory per backend.

torch loads all entry points at each start, while ``torch.distributed.elastic.rendezvous`` is still
being imported. Hence the rest of this package, client libraries and torch are imported only when a
handler is created.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

    Creator = Callable[[RendezvousParameters], RendezvousHandler]

__all__ = ["HandlerFactory", "handler_factory", "refuse_without_torch"]


@dataclass(frozen=True)
class HandlerFactory:
    """The object that an entry point of ``torchrun.handlers`` names.

    Attributes:
        client: ``"<module>:<class>"`` of a `rdzv_plugins.kv.KeyValueClient`, or the name of a store
            of this package.
    """

    client: str

    def __call__(self) -> Creator:
        return _creator(self.client)


# Cached, because torch's registry accepts a second registration only of the same object.
@cache
def _creator(client: str) -> Creator:
    def create(params: RendezvousParameters) -> RendezvousHandler:
        refuse_without_torch(f"the {params.backend} backend")
        from rdzv_plugins.process.factory import create_handler

        return create_handler(client, params)

    return create


def handler_factory(client: str) -> HandlerFactory:
    """Make an entry point for the store of ``client``, in this package or another.

    Call it in a module that imports nothing else, and name the result in ``pyproject.toml`` under
    ``[project.entry-points."torchrun.handlers"]``::

        mystore = handler_factory("mypackage.mystore:Client")
    """
    return HandlerFactory(client)


# Cached, because reading torch's metadata takes a sixth of the time of creating a handler.
@cache
def refuse_without_torch(who: str) -> None:
    """Raise `ValueError`, which says what ``who`` needs, if torch is missing or too old.

    torch is only an extra, because users choose its build, so pip does not check it. This function
    does not import torch.
    """
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    found = "none is installed"
    # Check the version too: an older torch does not load the group ``torchrun.handlers``.
    if find_spec("torch") is not None:
        try:
            found = version("torch")
        except PackageNotFoundError:
            return  # A user's own build has no metadata.
        if tuple(int(part) for part in found.split(".")[:2]) >= (2, 6):
            return
        found = f"{found} is installed"
    raise ValueError(
        f"{who} needs torch 2.6 or later, and {found}. Install the build that fits this host's "
        'GPUs, or: pip install "rdzv-plugins[torch]"'
    )


def __getattr__(name: str) -> HandlerFactory:
    """The entry point of a store of this package; ``pyproject.toml`` lists the stores."""
    if name.startswith("_"):
        raise AttributeError
    return handler_factory(name.replace("_", "-"))
