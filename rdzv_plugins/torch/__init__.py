"""Torch's other parts on our stores: c10d stores, rendezvous backends, a handler of its own.

Importing it makes the errors of `rdzv_plugins.kv` torch's: torch and its users catch those.
"""

from torch.distributed.elastic.rendezvous import api

from rdzv_plugins.kv import RendezvousConnectionError, RendezvousError, RendezvousStateError

# Set late, because nothing else needs torch. Subclasses would not do: modules that were imported
# earlier raise the errors without torch's base.
RendezvousConnectionError.__bases__ = RendezvousError, api.RendezvousConnectionError
RendezvousStateError.__bases__ = RendezvousError, api.RendezvousStateError
