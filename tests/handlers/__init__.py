"""Real handlers, with their threads and their waits, over the in-memory store: no server."""
