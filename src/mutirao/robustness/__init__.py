"""Byzantine robustness: attacks, and the filters that screen updates before they are aggregated."""
