"""What a curious server reads out of updates: `mutirao drill`."""
