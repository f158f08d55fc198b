"""The systems of this project, one readable file each; `task` says what a recipe is."""
