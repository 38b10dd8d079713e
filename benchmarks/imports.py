"""Imported once, in the process from which those with handlers are forked: clients take seconds."""

import contextlib
import importlib

from rdzv_plugins.stores import STORES

importlib.import_module("rdzv_plugins.process.handler")
for _client in STORES.values():
    with contextlib.suppress(ImportError):
        importlib.import_module(_client.partition(":")[0])
with contextlib.suppress(ImportError):
    importlib.import_module("torch.distributed.elastic.rendezvous.etcd_rendezvous_backend")
