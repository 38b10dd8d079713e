"""The recipes of docs/recipes, followed to the letter. `make test-recipes` runs them."""
