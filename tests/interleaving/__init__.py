"""Real handlers in real threads, of which one runs at a time: which, a seed decides."""
