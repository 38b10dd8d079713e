"""What nodes ask each other directly: their addresses, links between neighbours, one listener."""
