"""Tasks, recipes, and the flow that trains them."""
