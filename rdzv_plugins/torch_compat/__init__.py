"""What torch has besides the handler: c10d stores, rendezvous backends, a handler of its own."""
