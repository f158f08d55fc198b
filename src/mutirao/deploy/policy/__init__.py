"""A site's policy: what it allows, how that is enforced, and what was spent of its privacy budget."""
