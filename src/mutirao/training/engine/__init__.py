"""How the clients of a round are simulated: by a kernel, stacked, in threads, or in turn, with the same results.

`docs/engine.md` explains the ways, how one is chosen and what is guaranteed; `ways` is where it begins.
"""
