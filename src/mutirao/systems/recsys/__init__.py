"""Recommendation: ratings, factorisation whose users stay at home, and item vectors carried from elsewhere."""
