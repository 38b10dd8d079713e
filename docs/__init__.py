"""The pages; a package, or one of the same name that a dependency brings would be found."""
