"""Recommendation: ratings, federated matrix factorisation, and item vectors transferred between catalogues."""
