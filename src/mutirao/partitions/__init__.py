"""What `mutirao.partition` is made of besides the ways to deal by label: other skews, and how skewed a partition is."""
