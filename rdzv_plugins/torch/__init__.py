"""Torch's other parts on our stores: c10d stores, rendezvous backends, torch's own handler.

Importing this package makes the errors of `rdzv_plugins.kv` subclasses of torch's errors, which
torch and its users catch.
"""

from torch.distributed.elastic.rendezvous import api

from rdzv_plugins.kv import RendezvousConnectionError, RendezvousError, RendezvousStateError

# Set late, because nothing else needs torch. Subclasses would not do: modules that were imported
# earlier raise the errors without torch's base.
RendezvousConnectionError.__bases__ = RendezvousError, api.RendezvousConnectionError
RendezvousStateError.__bases__ = RendezvousError, api.RendezvousStateError
