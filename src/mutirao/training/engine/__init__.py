"""The engine that simulates the clients of a round: a C kernel, stacks, threads, processes, or one by one.

`docs/engine.md` explains the choices, how `auto` chooses, and what is guaranteed; `dispatch` is the entry point.
"""
