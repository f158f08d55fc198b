"""Cervical-cancer screening: from whole slides to a head that hospitals train together."""
