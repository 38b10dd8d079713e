"""The pages; a package, or that of py-consul 1.6, which is named docs too, would be found."""
